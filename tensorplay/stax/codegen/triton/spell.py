"""How values, operators and reductions are spelled in Triton.

In: the operator's name and dtype.  Out: text with `{0}`, `{1}`, ... for the operands, and the names of the device
functions that it calls.  Always: the bits are torch's where the operator is exact; Triton's unary minus is 0 - x
and its zero literal has no sign, so that both are spelled as products here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ...dtypes import TABLE
from ...ops.atoms import ATOMS

# device functions, printed at the head of a module that uses them
FUNCTIONS = {
    "div_floor": """
def div_floor(a, b):
    q = a // b
    return tl.where((a % b != 0) & ((a < 0) != (b < 0)), q - 1, q)""",
    "mod_floor": """
def mod_floor(a, b):
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)""",
    "remainder": """
def remainder(a, b):
    r = libdevice.fmod(a, b)
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)""",
    "plus": """
def plus(a, b):
    return a + b""",
    "multiply": """
def multiply(a, b):
    return a * b""",
    "either": """
def either(a, b):
    return a | b""",
    "both": """
def both(a, b):
    return a & b""",
    "maximum": """
def maximum(a, b):
    return tl.maximum(a, b, tl.PropagateNan.ALL)""",
    "minimum": """
def minimum(a, b):
    return tl.minimum(a, b, tl.PropagateNan.ALL)""",
    "first_max": """
def first_max(a, i, b, j):
    # NaN is the extreme; of equals, the first
    left = (a > b) | ((a != a) & (b == b)) | (((a == b) | ((a != a) & (b != b))) & (i < j))
    return tl.where(left, a, b), tl.where(left, i, j)""",
    "first_min": """
def first_min(a, i, b, j):
    # NaN is the extreme; of equals, the first
    left = (a < b) | ((a != a) & (b == b)) | (((a == b) | ((a != a) & (b != b))) & (i < j))
    return tl.where(left, a, b), tl.where(left, i, j)""",
    "last_max": """
def last_max(a, i, b, j):
    # NaN is the extreme; of equals, the last
    right = (b != b) | ((a == a) & (b >= a))
    return tl.where(right, b, a), tl.where(right, j, i)""",
    "last_min": """
def last_min(a, i, b, j):
    # NaN is the extreme; of equals, the last
    right = (b != b) | ((a == a) & (b <= a))
    return tl.where(right, b, a), tl.where(right, j, i)""",
    "merge": """
def merge(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    # mean and sum of squared deviations of two parts
    n = n_a + n_b
    share = tl.where(n == 0, 0.0, n_b / tl.where(n == 0, 1.0, n))
    delta = mean_b - mean_a
    return mean_a + delta * share, m2_a + m2_b + delta * delta * n_a * share, n""",
}

# spellings that depend on the kind of dtype, before those of the table of atoms
_KINDS = {
    ("neg", "f"): "{0} * -1.0",
    ("neg", "i"): "0 - {0}",
    ("div", "f64"): "{0} / {1}",
    ("sqrt", "f64"): "tl.sqrt({0})",
    ("div_floor", "i"): "div_floor({0}, {1})",
    ("remainder", "i"): "mod_floor({0}, {1})",
    ("remainder", "f"): "remainder({0}, {1})",
    ("fmod", "i"): "{0} % {1}",
    ("fmod", "f"): "libdevice.fmod({0}, {1})",
    ("signbit", "f"): "libdevice.signbit({0}) != 0",
    ("mul", "b"): "{0} & {1}",
    ("maximum", "b"): "{0} | {1}",
    ("minimum", "b"): "{0} & {1}",
}


def kind(dtype: torch.dtype) -> str:
    return "b" if dtype == torch.bool else "f" if dtype.is_floating_point else "i"


def spelling(op: str, dtype: torch.dtype) -> str | None:
    """The template of an atom on operands of `dtype`; None where Triton has none."""
    return _KINDS.get((op, TABLE[dtype].name)) or _KINDS.get((op, kind(dtype))) or ATOMS[op].triton


def literal(x: Any) -> str:
    """A Python number; the sign of a zero is lost on Triton and is up to the caller."""
    if type(x) is float and not math.isfinite(x):
        return f"float('{x}')"
    return repr(abs(x)) if x == 0 and type(x) is float else repr(x)


def full(x: Any, dtype: torch.dtype, shape: str) -> str:
    text = f"tl.full({shape}, {literal(x)}, {TABLE[dtype].triton})"
    negative_zero = type(x) is float and x == 0 and math.copysign(1, x) < 0
    return f"{text} * -1.0" if negative_zero else text


def cast(name: str, have: torch.dtype, want: torch.dtype) -> str:
    if have == want:
        return name
    text = name if name.isidentifier() else f"({name})"
    return f"{text} != 0" if want == torch.bool else f"{text}.to({TABLE[want].triton})"


def called(text: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that a module's statements mention."""
    code = re.sub(r"#.*", "", text)
    return [n for n in names if re.search(rf"(?<![\w.]){n}\b", code)]


def extreme(dtype: torch.dtype, sign: int) -> Any:
    if dtype.is_floating_point:
        return sign * math.inf
    if dtype == torch.bool:
        return sign > 0
    return torch.iinfo(dtype).max if sign > 0 else torch.iinfo(dtype).min


@dataclass(frozen=True)
class Fold:
    """A reduction: the identity, how two partial results join, how a block folds along its rows."""

    identity: Any  # a number, or the sign of the extreme that it is
    join: str
    fold: str
    extreme: bool = False

    def start(self, dtype: torch.dtype) -> Any:
        if self.extreme:
            return extreme(dtype, self.identity)
        return {"b": bool, "f": float, "i": int}[kind(dtype)](self.identity)


FOLDS = {
    "sum": Fold(0, "{0} + {1}", "tl.sum({0}, 1)"),
    "prod": Fold(1, "{0} * {1}", "tl.reduce({0}, 1, multiply)"),
    "any": Fold(0, "{0} | {1}", "tl.reduce({0}, 1, either)"),
    "all": Fold(1, "{0} & {1}", "tl.reduce({0}, 1, both)"),
    "amax": Fold(-1, "maximum({0}, {1})", "tl.reduce({0}, 1, maximum)", True),
    "amin": Fold(1, "minimum({0}, {1})", "tl.reduce({0}, 1, minimum)", True),
}
# kinds that carry an index beside the value: the function that keeps the better of two, the sign of the worst value
INDEXED = {
    "argmax": ("first_max", -1), "max_index": ("first_max", -1),
    "argmin": ("first_min", 1), "min_index": ("first_min", 1),
}  # fmt: skip
