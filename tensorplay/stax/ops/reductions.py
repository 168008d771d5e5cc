"""Reductions and scans: what is combined, along which dimensions, and what is done with the result.

Half types accumulate in float32, integers in int64. Formulas that pass over the data twice (softmax, logsumexp) are
written as several reductions; the scheduler joins them where their rows agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from . import scalar as s
from .lowered import Lowered, compute, numel, point, to, widened
from .pointwise import truth
from .row import Library, Refuse, declare
from .scalar import Scalar, where
from .views import reshaped

aten = torch.ops.aten


def span(size: Sequence[int], dims: Sequence[int] | None) -> int:
    """How many elements a reduction over `dims` combines."""
    return numel(size) if not dims else numel(size[d] for d in set(d % max(len(size), 1) for d in dims)) if size else 1


def mapped(formula: Any, *xs: Lowered, dtype: torch.dtype | None = None) -> Lowered:
    """A formula over lowered tensors of one size (sizes of 1 broadcast); nominal dtype of the first by default."""
    body = formula(*(Scalar(x.body) for x in xs)).expr
    size = tuple(max(ns) if 0 not in ns else 0 for ns in zip(*(x.size for x in xs), strict=True))
    return Lowered(size, dtype or xs[0].dtype, body, tuple(dict.fromkeys(o for x in xs for o in x.origins)))


def as_dims(dim: Any) -> tuple[int, ...] | None:
    """A dim argument as a tuple; None and () mean all."""
    return None if dim is None else (dim,) if isinstance(dim, int) else tuple(dim) or None


def accumulated(cx: Any, x: Lowered) -> Lowered:
    """`x` converted to the result dtype that eager recorded, before it is combined."""
    return to(x, cx.spec.dtype)


@declare("reduction", aten.sum.default, aten.sum.dim_IntList)
def _sum(cx: Any, x: Lowered, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Lowered:
    return cx.reduce("sum", accumulated(cx, x), as_dims(dim), keepdim, (cx.spec.dtype,))[0]


@declare("reduction", aten.nansum.default)
def _nansum(cx: Any, x: Lowered, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Lowered:
    if x.dtype.is_floating_point:
        x = mapped(lambda v: where(s.isnan(v), 0, v), x)
    return _sum(cx, x, dim, keepdim)


@declare("reduction", aten.trace.default)
def _trace(cx: Any, x: Lowered) -> Lowered:
    n = min(x.size)
    (i,) = point((n,))
    return _sum(cx, cx.viewed(x, (n,), [i, i]))


@declare("reduction", aten.mean.default, aten.mean.dim)
def _mean(cx: Any, x: Lowered, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Lowered:
    (total,) = cx.reduce("sum", accumulated(cx, x), as_dims(dim), keepdim, (cx.spec.dtype,))
    n = span(x.size, as_dims(dim))
    return mapped(lambda t: t / float(n), total)


@declare("reduction", aten.prod.default, aten.prod.dim_int)
def _prod(cx: Any, x: Lowered, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Lowered:
    return cx.reduce("prod", accumulated(cx, x), as_dims(dim), keepdim, (cx.spec.dtype,))[0]


def _extreme(kind: str) -> Any:
    def lower(cx: Any, x: Lowered, dim: Any = None, keepdim: bool = False) -> Lowered:
        if not span(x.size, as_dims(dim)):
            raise Refuse("extreme of nothing")
        return cx.reduce(kind, x, as_dims(dim), keepdim)[0]

    return lower


declare("reduction", aten.amax.default, aten.max.default)(_extreme("amax"))
declare("reduction", aten.amin.default, aten.min.default)(_extreme("amin"))


@declare("reduction", aten.aminmax.default, reads=2)
def _aminmax(cx: Any, x: Lowered, *, dim: Any = None, keepdim: bool = False) -> tuple[Lowered, Lowered]:
    if not span(x.size, as_dims(dim)):
        raise Refuse("extreme of nothing")
    x = cx.kept(x)
    return cx.reduce("amin", x, as_dims(dim), keepdim)[0], cx.reduce("amax", x, as_dims(dim), keepdim)[0]


def ordered(x: Lowered) -> Lowered:
    """`x` as numbers whose order can be asked for: in registers, false and true are masks of 0 and -1."""
    return to(x, torch.uint8) if x.dtype == torch.bool else x


def _with_index(kind: str) -> Any:
    def lower(cx: Any, x: Lowered, dim: int, keepdim: bool = False) -> tuple[Lowered, ...]:
        if not span(x.size, (dim,)):
            raise Refuse("extreme of nothing")
        if x.dtype == torch.bool:
            value, at = cx.reduce(kind, ordered(x), (dim,), keepdim, (torch.uint8, torch.int64))
            return to(value, torch.bool), at
        return cx.reduce(kind, x, (dim,), keepdim, (x.dtype, torch.int64))

    return lower


declare("reduction", aten.max.dim)(_with_index("max_index"))
declare("reduction", aten.min.dim)(_with_index("min_index"))


def _arg(kind: str) -> Any:
    def lower(cx: Any, x: Lowered, dim: int | None = None, keepdim: bool = False) -> Lowered:
        if not span(x.size, as_dims(dim)):
            raise Refuse("extreme of nothing")
        return cx.reduce(kind, ordered(x), as_dims(dim), keepdim, (torch.int64,))[0]

    return lower


declare("reduction", aten.argmax.default)(_arg("argmax"))
declare("reduction", aten.argmin.default)(_arg("argmin"))


def _quantifier(kind: str) -> Any:
    def lower(cx: Any, x: Lowered, dim: Any = None, keepdim: bool = False) -> Lowered:
        test = mapped(truth, x, dtype=torch.bool)
        if dim is not None and not isinstance(dim, int) and len(dim) == 0:  # of each element
            return to(test, cx.spec.dtype)
        return to(cx.reduce(kind, test, as_dims(dim), keepdim)[0], cx.spec.dtype)

    return lower


declare("reduction", aten.any.default, aten.any.dim, aten.any.dims)(_quantifier("any"))
declare("reduction", aten.all.default, aten.all.dim, aten.all.dims)(_quantifier("all"))


@declare("reduction", aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def _count_nonzero(cx: Any, x: Lowered, dim: Any = None) -> Lowered:
    ones = mapped(lambda v: truth(v).to(torch.int64), x, dtype=torch.int64)
    return cx.reduce("sum", ones, as_dims(dim))[0]


# ---- variance --------------------------------------------------------------------------------------------------------


def moments(cx: Any, x: Lowered, dims: Any, keepdim: bool) -> tuple[Lowered, Lowered, int]:
    """Mean and sum of squared deviations by one Welford pass, in the compute dtype, and the number of elements."""
    mean, squares = cx.reduce("welford", widened(x), dims, keepdim, (compute(x.dtype),) * 2)
    return mean, squares, span(x.size, dims)


def _variance(cx: Any, x: Lowered, dim: Any, correction: Any, keepdim: bool, root: bool) -> tuple[Lowered, Lowered]:
    if not x.dtype.is_floating_point:
        raise Refuse(f"variance of {x.dtype}")
    wide = mapped(lambda v: v.to(torch.float64), widened(x), dtype=torch.float64)  # as eager: no square overflows
    mean, squares, n = moments(cx, wide, as_dims(dim), keepdim)
    divisor = max(n - (1 if correction is None else correction), 0)

    def finish(m: Any) -> Any:
        v = m / float(divisor)
        return s.sqrt(v) if root else v

    if n == 0:
        nothing = Lowered(mean.size, mean.dtype, s.literal(math.nan, mean.body.dtype))
        return to(nothing, x.dtype), to(nothing, x.dtype)
    narrow = compute(x.dtype)
    return nominal(to(mapped(finish, squares), narrow), x.dtype), nominal(to(mean, narrow), x.dtype)


def nominal(x: Lowered, dtype: torch.dtype) -> Lowered:
    """`x` under a nominal dtype of the same arithmetic, without rounding: a store will round."""
    return x if x.dtype == dtype else Lowered(x.size, dtype, x.body, x.origins)


@declare("reduction", aten.var.correction)
def _var(cx: Any, x: Lowered, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Lowered:
    return _variance(cx, x, dim, correction, keepdim, root=False)[0]


@declare("reduction", aten.std.correction)
def _std(cx: Any, x: Lowered, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Lowered:
    return _variance(cx, x, dim, correction, keepdim, root=True)[0]


@declare("reduction", aten.var_mean.correction)
def _var_mean(cx: Any, x: Lowered, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Lowered, Lowered]:
    return _variance(cx, x, dim, correction, keepdim, root=False)


@declare("reduction", aten.std_mean.correction)
def _std_mean(cx: Any, x: Lowered, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Lowered, Lowered]:
    return _variance(cx, x, dim, correction, keepdim, root=True)


# ---- exponentials ----------------------------------------------------------------------------------------------------


def _exponentials(cx: Any, x: Lowered, dim: int) -> tuple[Lowered, Lowered]:
    """x - max and its exponential along dim."""
    (high,) = cx.reduce("amax", x, (dim,), True)
    shifted = mapped(lambda v, m: v - m, x, high)
    return shifted, mapped(s.exp, shifted)


def _softmax_rows(cx: Any, x: Lowered, dim: int) -> Lowered:
    if not x.size:
        x, dim = reshaped(cx, x, (1,)), 0
    if not x.numel:
        return x
    x = cx.kept(widened(x))
    e = cx.store(_exponentials(cx, x, dim)[1])
    (total,) = cx.reduce("sum", e, (dim,), True)
    return mapped(lambda v, t: v / t, e, total)


@declare("reduction", aten._softmax.default, aten.softmax.int, reads=2)
def _softmax(cx: Any, x: Lowered, dim: int, half_to_float: Any = False, **_: Any) -> Lowered:
    x = to(x, cx.spec.dtype) if not half_to_float else x
    return nominal(reshaped(cx, _softmax_rows(cx, x, dim), cx.spec.size), cx.spec.dtype)


@declare("reduction", aten._safe_softmax.default, reads=3)
def _safe_softmax(cx: Any, x: Lowered, dim: int, dtype: Any = None) -> Lowered:
    x = cx.kept(to(x, cx.spec.dtype))
    if not x.size or not x.numel:
        raise Library("safe softmax without rows")
    (empty,) = cx.reduce("all", mapped(lambda v: s.eq(v, -math.inf), x, dtype=torch.bool), (dim,), True)
    rows = _softmax_rows(cx, x, dim)
    return nominal(mapped(lambda v, t: where(t, 0, v), rows, empty), cx.spec.dtype)


@declare("reduction", aten._log_softmax.default, aten.log_softmax.int, reads=3)
def _log_softmax(cx: Any, x: Lowered, dim: int, half_to_float: Any = False, **_: Any) -> Lowered:
    size, dtype = x.size, cx.spec.dtype
    x = to(x, dtype) if not half_to_float else x
    if not size:
        x, dim = reshaped(cx, x, (1,)), 0
    if not x.numel:
        return nominal(x, dtype)
    x = cx.kept(widened(x))
    shifted, e = _exponentials(cx, x, dim)
    (total,) = cx.reduce("sum", e, (dim,), True)
    log_total = mapped(s.log, total)
    log_total = cx.store(log_total) if log_total.numel > 1 else log_total
    return nominal(reshaped(cx, mapped(lambda v, t: v - t, shifted, log_total), size), dtype)


@declare("reduction", aten.logsumexp.default, reads=2)
def _logsumexp(cx: Any, x: Lowered, dim: Any, keepdim: bool = False) -> Lowered:
    dims = as_dims(dim)
    x = cx.kept(widened(to(x, cx.spec.dtype)))
    if not x.numel:
        raise Library("logsumexp of nothing")
    if dims is None and x.size and dim is not None and not isinstance(dim, int):
        raise Library("logsumexp over no dimensions")
    (high,) = cx.reduce("amax", x, dims, True)
    high = mapped(lambda m: where(s.isinf(m), 0, m), high)
    (total,) = cx.reduce("sum", mapped(lambda v, m: s.exp(v - m), x, high), dims, True)
    out = mapped(lambda t, m: s.log(t) + m, total, high)
    return nominal(reshaped(cx, out, cx.spec.size), cx.spec.dtype)


# ---- norms of vectors ------------------------------------------------------------------------------------------------


def _vector_norm(cx: Any, x: Lowered, order: float, dims: Any, keepdim: bool) -> Lowered:
    x = widened(to(x, cx.spec.dtype))
    wide = (x.dtype,)
    if order in (math.inf, -math.inf):
        if not span(x.size, dims):
            raise Refuse("extreme of nothing")
        return cx.reduce("amax" if order > 0 else "amin", mapped(abs, x), dims, keepdim, wide)[0]
    if order == 0:
        return cx.reduce("sum", mapped(lambda v: s.ne(v, 0).to(v.dtype), x), dims, keepdim, wide)[0]
    if order == 1 or span(x.size, dims) == 1:  # of one element eager takes the magnitude, which cannot overflow
        return cx.reduce("sum", mapped(abs, x), dims, keepdim, wide)[0]
    if order == 2:
        return mapped(s.sqrt, cx.reduce("sum", mapped(lambda v: v * v, x), dims, keepdim, wide)[0])
    (total,) = cx.reduce("sum", mapped(lambda v: s.pow_(abs(v), float(order)), x), dims, keepdim, wide)
    return mapped(lambda t: s.pow_(t, 1.0 / order), total)


@declare("reduction", aten.linalg_vector_norm.default)
def _linalg_vector_norm(cx: Any, x: Lowered, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Lowered:
    return nominal(_vector_norm(cx, x, float(ord), as_dims(dim), keepdim), cx.spec.dtype)


@declare(
    "reduction", aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim_dtype
)
def _norm(cx: Any, x: Lowered, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Lowered:
    return nominal(_vector_norm(cx, x, 2.0 if p is None else float(p), as_dims(dim), keepdim), cx.spec.dtype)


@declare("reduction", aten.dist.default)
def _dist(cx: Any, x: Lowered, y: Lowered, p: Any = 2) -> Lowered:
    size = tuple(torch.broadcast_shapes(x.size, y.size))
    x, y = cx.expanded(to(x, cx.spec.dtype), size), cx.expanded(to(y, cx.spec.dtype), size)
    return nominal(_vector_norm(cx, mapped(lambda a, b: a - b, x, y), float(p), None, False), cx.spec.dtype)


# ---- scans -----------------------------------------------------------------------------------------------------------


def _scan(cx: Any, kind: str, x: Lowered, dim: int, dtypes: Sequence[torch.dtype]) -> tuple[Lowered, ...]:
    if x.size:
        return cx.scan(kind, x, dim % len(x.size), dtypes)
    flat = cx.scan(kind, Lowered((1,), x.dtype, x.body, x.origins), 0, dtypes)
    return tuple(Lowered((), f.dtype, f.body, f.origins) for f in flat)


def _running(kind: str) -> Any:
    def lower(cx: Any, x: Lowered, dim: int, *, dtype: Any = None) -> Lowered:
        return _scan(cx, kind, accumulated(cx, x), dim, (cx.spec.dtype,))[0]

    return lower


declare("scan", aten.cumsum.default)(_running("sum"))
declare("scan", aten.cumprod.default)(_running("prod"))
declare("scan", aten.logcumsumexp.default, aten._logcumsumexp.default)(_running("logaddexp"))


def _running_extreme(kind: str) -> Any:
    def lower(cx: Any, x: Lowered, dim: int) -> tuple[Lowered, ...]:
        return _scan(cx, kind, x, dim, (x.dtype, torch.int64))

    return lower


declare("scan", aten.cummax.default)(_running_extreme("max_index"))
declare("scan", aten.cummin.default)(_running_extreme("min_index"))
