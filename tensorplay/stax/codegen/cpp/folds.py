"""How reductions are accumulated: declarations, one step, and the result, for vectors and for scalars.

In: the kind and dtype of a `Fold`.  Out: C++ fragments.
Always: sums of floats that may be long are kept in blocks with compensation, so that their error does not grow with
the length; extremes keep NaN; the order of combination is fixed.
"""

from __future__ import annotations

import torch

from ...dtypes import TABLE, compute
from .shape import Fold

INDEXED = {"argmax": 1, "argmin": -1, "max_index": 1, "min_index": -1}


def ctype(dtype: torch.dtype) -> str:
    return "bool" if dtype is torch.bool else TABLE[compute(dtype)].name


def kind_of(fold: Fold) -> str:
    """The kind by which the fold runs: extremes of booleans are any and all."""
    if fold.body.dtype is torch.bool:
        return {"amax": "any", "amin": "all", "prod": "all", "sum": "any"}.get(fold.kind, fold.kind)
    return "sum" if fold.kind == "mean" else fold.kind


def lowest(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "-__builtin_inff()" if compute(dtype) is torch.float32 else "-__builtin_inf()"
    low = torch.iinfo(dtype).min
    return {"i64": "(-9223372036854775807l - 1)", "i32": "(-2147483647 - 1)"}.get(ctype(dtype), f"({ctype(dtype)}){low}")


def highest(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return lowest(dtype)[1:]
    high = torch.iinfo(dtype).max
    return f"{high}l" if ctype(dtype) == "i64" else f"({ctype(dtype)}){high}"


def identity(fold: Fold) -> str:
    """The value of the fold over nothing, as a scalar."""
    kind, dtype = kind_of(fold), fold.body.dtype
    match kind:
        case "sum":
            return f"({ctype(dtype)})0"
        case "prod":
            return f"({ctype(dtype)})1"
        case "amax" | "argmax" | "max_index":
            return "false" if dtype is torch.bool else lowest(dtype)
        case "amin" | "argmin" | "min_index":
            return "true" if dtype is torch.bool else highest(dtype)
        case "any":
            return "false"
        case "all":
            return "true"
    raise KeyError(kind)


def combine(fold: Fold, a: str, b: str) -> str:
    """a combined with b, both scalars or both vectors (masks)."""
    match kind_of(fold):
        case "sum":
            return f"{a} + {b}"
        case "prod":
            return f"{a} * {b}"
        case "amax":
            return f"maximum({a}, {b})"
        case "amin":
            return f"minimum({a}, {b})"
        case "any":
            return f"{a} | {b}"
        case "all":
            return f"{a} & {b}"
    raise KeyError(fold.kind)


def live(fold: Fold, value: str, n: str) -> str:
    """A vector whose dead lanes hold the identity."""
    if not n:
        return value
    match kind_of(fold):
        case "any":
            return f"both({value}, {n})"
        case "all":
            return f"either({value}, {n})"
    return f"keep({value}, {n}, {identity(fold)})"


def across(fold: Fold, vector: str) -> str:
    """All lanes into one scalar."""
    kind = kind_of(fold)
    return f"{kind}({vector})"


def stored(text: str, have: str, dtype: torch.dtype) -> str:
    """A scalar of type `have` as a value of `dtype`, rounded to it."""
    want = ctype(dtype)
    if compute(dtype) is not dtype:
        return f"round_{TABLE[dtype].name}({text})"
    if want == have:
        return text
    return f"{text} != 0" if want == "bool" else f"cast_lane<{want}>({text})"


def is_sum(fold: Fold) -> bool:
    return kind_of(fold) == "sum" and fold.body.dtype.is_floating_point
