"""Indirect reads: the index is itself a value, checked when it runs (row 6.17).

Negative indices wrap where eager wraps them (advanced indexing, take), and are an error where eager raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..expr import Expr, affine, cast, floordiv, index, integer, load, mod, parts, substitute
from ..loops.nodes import row_major
from . import scalar as s
from .lowered import Lowered, axes, broadcast, compute, numel, point, reindex
from .row import Library, Refuse, declare
from .scalar import Scalar, where
from .views import reshaped

aten = torch.ops.aten


def checked(x: Lowered, n: int, wrap: bool = False) -> Expr:
    """The values of an index tensor as an index into a dimension of n."""
    at = Scalar(cast(x.body, torch.int64))
    if wrap:
        at = where(at < 0, at + n, at)
    return index(at.expr, n)


def read_at(cx: Any, x: Lowered, size: Sequence[int], at: Sequence[Expr]) -> Lowered:
    """x[at] with indirect indices; a dimension of one element still has its index checked."""
    if cx.work(x) > 1:
        x = cx.store(x)
    if any(n == 1 and e.op != "integer" for n, e in zip(x.size, at, strict=True)):
        return _checked_ones(cx, x, size, at)
    return reindex(x, size, at)


def _checked_ones(cx: Any, x: Lowered, size: Sequence[int], at: Sequence[Expr]) -> Lowered:
    """The body of a dimension of one element does not mention its variable: the load must, so that the check runs."""
    source = cx.plain(x)
    if source is None:
        source = cx.plain(cx.store(x))
    target = {v: e for v, e, n in zip(axes(x.size), at, x.size, strict=True) if n != 1}
    place = substitute(source.args[1], target)
    extra = [(e, 1) for e, n in zip(at, x.size, strict=True) if n == 1 and e.op != "integer"]
    constant, terms = parts(place)
    place = affine(constant, (*terms, *extra))
    return Lowered(tuple(size), x.dtype, cast(load(source.name, place, source.dtype), compute(x.dtype)), x.origins)


@declare("index", aten.index_select.default)
def _index_select(cx: Any, x: Lowered, dim: int, index: Lowered) -> Lowered:
    size = cx.spec.size
    if not x.size:
        return x
    dim %= len(x.size)
    out = list(point(size))
    picks = reindex(index, size, [out[dim]]) if index.size else broadcast(index, size)
    out[dim] = checked(picks, x.size[dim])
    return read_at(cx, x, size, out)


@declare("index", aten.gather.default)
def _gather(cx: Any, x: Lowered, dim: int, index: Lowered, *, sparse_grad: bool = False) -> Lowered:
    size = cx.spec.size
    if not numel(size):
        return Lowered(size, x.dtype, s.literal(0, x.body.dtype))
    x = reshaped(cx, x, x.size or (1,))
    dim %= len(x.size)
    out = [integer(0) if n == 1 else e for e, n in zip(point(size or (1,)), x.size, strict=True)]
    out[dim] = checked(index, x.size[dim])
    return read_at(cx, x, size, out)


@declare("index", aten.embedding.default)
def _embedding(cx: Any, weight: Lowered, indices: Lowered, *_: Any, **__: Any) -> Lowered:
    size = cx.spec.size
    out = point(size)
    rank = len(indices.size)
    picks = reindex(indices, size, out[:rank])
    inner = [integer(0) if n == 1 else e for e, n in zip(out[rank:], weight.size[1:], strict=True)]
    return read_at(cx, weight, size, [checked(picks, weight.size[0]), *inner])


@declare("index", aten.take.default)
def _take(cx: Any, x: Lowered, index: Lowered) -> Lowered:
    flat = checked(index, x.numel, wrap=True)
    if not index.numel:
        return Lowered(index.size, x.dtype, s.literal(0, x.body.dtype))
    if not x.size:
        x = Lowered((1,), x.dtype, x.body, x.origins)
    at = [integer(0) if n == 1 else mod(floordiv(flat, st), n) for n, st in zip(x.size, row_major(x.size), strict=True)]
    if x.numel == 1:
        at[0] = flat
    return read_at(cx, x, index.size, at)


@declare("index", aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(cx: Any, x: Lowered, indices: Sequence[Lowered | None]) -> Lowered:
    size = cx.spec.size
    given = [k for k, t in enumerate(indices) if t is not None]
    if any(indices[k].dtype in (torch.bool, torch.uint8) for k in given):
        raise Refuse("a mask as index: the shape depends on data")
    if not given or not x.size:
        raise Library("index of a 0-d tensor or without indices")
    shape = _broadcast_shape([indices[k].size for k in given])
    if not numel(size):
        return Lowered(size, x.dtype, s.literal(0, x.body.dtype))
    adjacent = given == list(range(given[0], given[-1] + 1))
    first = given[0] if adjacent else 0
    out = point(size)
    picked = out[first : first + len(shape)]
    rest = iter((*out[:first], *out[first + len(shape) :]))
    at: list[Expr] = []
    for k, n in enumerate(x.size):
        t = indices[k] if k < len(indices) else None
        if t is None:
            e = next(rest)
            at.append(integer(0) if n == 1 else e)
        else:
            place = [integer(0) if m == 1 else e for m, e in zip(t.size, picked[len(shape) - len(t.size) :], strict=True)]
            at.append(checked(reindex(cx.kept(t) if cx.work(t) > 1 else t, size, place), n, wrap=True))
    return read_at(cx, x, size, at)


def _broadcast_shape(sizes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*sizes))
