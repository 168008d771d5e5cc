"""A lowered tensor: a function from index to value (section 6.2).

In: sizes, dtypes and bodies.  Out: `Lowered`, its canonical variables, type promotion, broadcasting.
Always: the body of a `Lowered` has the compute dtype of its nominal dtype and mentions, of the canonical variables
`i0, i1, ...` of its size, only those of dimensions longer than 1. So two tensors of equal size share their
variables, composition needs no substitution, and a dimension of size 1 broadcasts by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from .. import dtypes
from ..expr import Expr, cast, integer, substitute, var

Number = bool | int | float


@dataclass(frozen=True, slots=True)
class Lowered:
    """`size`, nominal `dtype` and `body`; `origins` names the operators inlined into the body."""

    size: tuple[int, ...]
    dtype: torch.dtype
    body: Expr
    origins: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return numel(self.size)


@dataclass(frozen=True, slots=True)
class Read(Lowered):
    """A Python number that lies in memory, a float64 or an int64: to a promotion it brings its kind only."""


def numel(size: Iterable[int]) -> int:
    n = 1
    for s in size:
        n *= s
    return n


@lru_cache(maxsize=4096)
def axes(size: tuple[int, ...]) -> tuple[Expr, ...]:
    """The canonical loop variables of a size."""
    return tuple(var(f"i{k}", n) for k, n in enumerate(size))


@lru_cache(maxsize=4096)
def point(size: tuple[int, ...]) -> tuple[Expr, ...]:
    """The canonical index of a tensor of this size: its variables, 0 where the dimension has one element."""
    return tuple(integer(0) if n == 1 else v for n, v in zip(size, axes(size), strict=True))


def apart(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether no two elements share memory; gaps are allowed."""
    if 0 in size:
        return True
    reach = 1
    for st, n in sorted((st, n) for n, st in zip(size, stride, strict=True) if n != 1):
        if st < reach:
            return False
        reach += (n - 1) * st
    return True


def known(dtype: torch.dtype) -> bool:
    return dtypes.known(dtype)


def compute(dtype: torch.dtype) -> torch.dtype:
    """The dtype of bodies of this nominal dtype; a dtype without arithmetic stands for itself and is only moved."""
    return dtypes.compute(dtype) if dtypes.known(dtype) else dtype


def reindex(x: Lowered, size: Sequence[int], at: Sequence[Expr]) -> Lowered:
    """The tensor of `size` whose element at its canonical point is x[at]."""
    target = {v: e for v, e, n in zip(axes(x.size), at, x.size, strict=True) if n != 1}
    return Lowered(tuple(size), x.dtype, substitute(x.body, target), x.origins)


def broadcast(x: Lowered, size: tuple[int, ...]) -> Lowered:
    """`x` expanded to `size`; free where the ranks agree."""
    if x.size == size:
        return x
    lead = len(size) - len(x.size)
    if lead == 0 or x.body.free == frozenset():
        return Lowered(size, x.dtype, x.body, x.origins)
    return reindex(x, size, point(size)[lead:])


def convert(body: Expr, source: torch.dtype, target: torch.dtype) -> Expr:
    """A body of nominal dtype `source` as a body of nominal dtype `target`; conversion to a half type rounds."""
    if source == target:
        return body
    c = compute(target)
    return cast(body, c) if c == target else cast(cast(body, target), c)


def to(x: Lowered, dtype: torch.dtype) -> Lowered:
    """`x` converted to another nominal dtype, as `Tensor.to` does."""
    return x if x.dtype == dtype else Lowered(x.size, dtype, convert(x.body, x.dtype, dtype), x.origins)


def widened(x: Lowered) -> Lowered:
    """`x` under the nominal dtype that it is computed in, for the inner steps of a row: half types do not round."""
    return Lowered(x.size, compute(x.dtype), x.body, x.origins)


def number_dtype(x: Number) -> torch.dtype:
    """The dtype of which a Python number contributes the kind."""
    if isinstance(x, bool):
        return torch.bool
    return torch.int64 if isinstance(x, int) else torch.get_default_dtype()


def _kind(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.bool else 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


def promote(operands: Iterable[Lowered | Number]) -> torch.dtype:
    """The dtype in which eager combines the operands: tensors with dimensions, then 0-d tensors, then numbers.

    A lower category matters only where its kind (bool, integer, floating) is higher; a number brings its kind only.
    """
    levels: list[torch.dtype | None] = [None, None, None]
    for x in operands:
        if isinstance(x, Read):
            level, dtype = 2, torch.int64 if x.dtype == torch.int64 else torch.get_default_dtype()
        elif isinstance(x, Lowered):
            level, dtype = (0 if x.size else 1), x.dtype
        else:
            level, dtype = 2, number_dtype(x)
        now = levels[level]
        levels[level] = dtype if now is None else torch.promote_types(now, dtype)
    result: torch.dtype | None = None
    for found in levels:
        if found is not None and (result is None or _kind(found) > _kind(result)):
            result = found if result is None else torch.promote_types(result, found)
    assert result is not None
    return result
