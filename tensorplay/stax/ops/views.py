"""Views: an index map instead of a copy (row 6.05); reshape by division and remainder (row 6.06).

In: a lowered tensor.  Out: the same body at other indices. Kind 'view' marks the operators whose result shares the
memory of their first operand in eager; an output of the graph keeps that aliasing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import UnsupportedError
from ..expr import (
    Expr,
    add,
    affine,
    cast,
    floordiv,
    in_range,
    index,
    integer,
    linear,
    load,
    loads,
    masked,
    mod,
    mul,
    rewrite,
    substitute,
    value,
)
from ..loops.nodes import row_major
from . import scalar as s
from .lowered import Lowered, compute, numel, point, to
from .row import Library, declare

aten = torch.ops.aten


def unflatten(size: Sequence[int], at: Sequence[Expr], old: Sequence[int]) -> list[Expr]:
    """The index into a row-major tensor of size `old` of the element at `at` in one of `size`, equally many elements.

    Dimensions are taken in groups of equal product, so that one that stays keeps its variable.
    """
    if numel(size) == 0:
        return [integer(0)] * len(old)
    out: list[Expr] = []
    j = k = 0
    while j < len(old) or k < len(size):
        left, right, jn, kn = 1, 1, j, k
        while True:
            if left <= right and jn < len(old) and (left < right or left == 1):
                left *= old[jn]
                jn += 1
            elif right < left and kn < len(size):
                right *= size[kn]
                kn += 1
            else:
                break
            if left == right and left != 1:
                break
        if left == right == 1 and kn < len(size):
            kn = len(size)
        group, new = old[j:jn], size[k:kn]
        if len(group) == len(new) == 1:
            out.append(at[k])
        else:
            flat = linear(at[k:kn], row_major(new))
            for n, st in zip(group, row_major(group), strict=True):
                out.append(integer(0) if n == 1 else mod(floordiv(flat, st), n))
        j, k = jn, kn
    return out


def reshaped(cx: Any, x: Lowered, size: tuple[int, ...]) -> Lowered:
    """Row-major reinterpretation."""
    return x if x.size == size else cx.viewed(x, size, unflatten(size, point(size), x.size))


@declare("view", aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default, aten.flatten.using_ints, aten.unflatten.int)
@declare("index", aten.view_copy.default)
def _view(cx: Any, x: Lowered, *_: Any, **__: Any) -> Lowered:
    return reshaped(cx, x, cx.spec.size)


@declare("view", aten.alias.default, aten.detach.default)
@declare("index", aten.alias_copy.default, aten.detach_copy.default)
def _alias(cx: Any, x: Lowered) -> Lowered:
    return x


def permuted(cx: Any, x: Lowered, dims: Sequence[int]) -> Lowered:
    dims = [d % len(x.size) for d in dims]
    size = tuple(x.size[d] for d in dims)
    out = point(size)
    at = [out[dims.index(k)] for k in range(len(dims))]
    return cx.viewed(x, size, at)


@declare("view", aten.permute.default)
@declare("index", aten.permute_copy.default)
def _permute(cx: Any, x: Lowered, dims: Sequence[int]) -> Lowered:
    return permuted(cx, x, dims)


@declare("view", aten.transpose.int)
@declare("index", aten.transpose_copy.int)
def _transpose(cx: Any, x: Lowered, dim0: int, dim1: int) -> Lowered:
    order = list(range(len(x.size)))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return permuted(cx, x, order)


@declare("view", aten.t.default, aten.numpy_T.default, aten.mT.default)
@declare("index", aten.t_copy.default)
def _t(cx: Any, x: Lowered) -> Lowered:
    order = list(range(len(x.size)))
    if cx.target is aten.mT.default:
        order[-1], order[-2] = order[-2], order[-1]
    else:
        order.reverse()
    return permuted(cx, x, order)


@declare("view", aten.movedim.intlist)
def _movedim(cx: Any, x: Lowered, source: Sequence[int], destination: Sequence[int]) -> Lowered:
    rank = len(x.size)
    order = [-1] * rank
    for a, b in zip(source, destination, strict=True):
        order[b % rank] = a % rank
    rest = iter(k for k in range(rank) if k not in order)
    return permuted(cx, x, [next(rest) if k < 0 else k for k in order])


@declare("view", aten.expand.default)
@declare("index", aten.expand_copy.default)
def _expand(cx: Any, x: Lowered, *_: Any, **__: Any) -> Lowered:
    return cx.expanded(x, cx.spec.size)


@declare("view", aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
@declare("index", aten.unsqueeze_copy.default, aten.squeeze_copy.default, aten.squeeze_copy.dim, aten.squeeze_copy.dims)
def _squeeze(cx: Any, x: Lowered, *_: Any, **__: Any) -> Lowered:
    size = cx.spec.size
    out = iter(e for e, n in zip(point(size), size, strict=True) if n != 1)
    return cx.viewed(x, size, [integer(0) if n == 1 else next(out) for n in x.size])


def selected(cx: Any, x: Lowered, dim: int, at: int) -> Lowered:
    dim %= len(x.size)
    size = x.size[:dim] + x.size[dim + 1 :]
    out = point(size)
    return cx.viewed(x, size, [*out[:dim], integer(at % x.size[dim]), *out[dim:]])


@declare("view", aten.select.int)
@declare("index", aten.select_copy.int)
def _select(cx: Any, x: Lowered, dim: int, index: int) -> Lowered:
    return selected(cx, x, dim, index)


def bounds(n: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Clamped ends of a slice of a dimension of n, as eager clamps them."""
    start, end = 0 if start is None else start, n if end is None else end
    start = min(max(start + n if start < 0 else start, 0), n)
    end = min(max(end + n if end < 0 else end, start), n)
    return start, end


def sliced(cx: Any, x: Lowered, dim: int, start: int, end: int, step: int = 1) -> Lowered:
    """x[start:end:step] along dim, with clamped ends."""
    n = -(-(end - start) // step)
    if n == x.size[dim]:
        return x
    size = (*x.size[:dim], n, *x.size[dim + 1 :])
    at = list(point(size))
    at[dim] = affine(start, ((at[dim], step),))
    return cx.viewed(x, size, at)


@declare("view", aten.slice.Tensor)
@declare("index", aten.slice_copy.Tensor)
def _slice(cx: Any, x: Lowered, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Lowered:
    dim %= len(x.size)
    return sliced(cx, x, dim, *bounds(x.size[dim], start, end), step)


@declare("view", aten.narrow.default)
def _narrow(cx: Any, x: Lowered, dim: int, start: int, length: int) -> Lowered:
    dim %= len(x.size)
    start = start + x.size[dim] if start < 0 else start
    return sliced(cx, x, dim, start, start + length)


def pieces(cx: Any, x: Lowered, dim: int) -> tuple[Lowered, ...]:
    """Consecutive slices along dim, as long as eager made them."""
    dim %= len(x.size)
    out, start = [], 0
    for spec in cx.specs:
        n = spec.size[dim]
        out.append(sliced(cx, x, dim, start, start + n))
        start += n
    return tuple(out)


@declare("view", aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unsafe_split.Tensor, aten.unsafe_chunk.default, aten.split.sizes, aten.unsafe_split_with_sizes.default, aten.tensor_split.sections, aten.tensor_split.indices)
@declare("index", aten.split_copy.Tensor, aten.split_with_sizes_copy.default)
def _split(cx: Any, x: Lowered, _: Any, dim: int = 0) -> tuple[Lowered, ...]:
    return pieces(cx, x, dim)


@declare("view", aten.unbind.int)
@declare("index", aten.unbind_copy.int)
def _unbind(cx: Any, x: Lowered, dim: int = 0) -> tuple[Lowered, ...]:
    return tuple(selected(cx, x, dim, k) for k in range(x.size[dim]))


@declare("view", aten.diagonal.default)
@declare("index", aten.diagonal_copy.default)
def _diagonal(cx: Any, x: Lowered, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Lowered:
    rank = len(x.size)
    dim1, dim2 = dim1 % rank, dim2 % rank
    size = cx.spec.size
    *rest, i = point(size)
    outer = iter(rest)
    at = [
        add(i, max(-offset, 0)) if k == dim1 else add(i, max(offset, 0)) if k == dim2 else next(outer) for k in range(rank)
    ]
    return cx.viewed(x, size, at)


@declare("view", aten.unfold.default)
@declare("index", aten.unfold_copy.default)
def _unfold(cx: Any, x: Lowered, dimension: int, size: int, step: int) -> Lowered:
    if not x.size:
        return cx.viewed(x, cx.spec.size, [])
    dimension %= len(x.size)
    *at, inner = point(cx.spec.size)
    at[dimension] = add(mul(at[dimension], step), inner)
    return cx.viewed(x, cx.spec.size, at)


@declare("view", aten.as_strided.default)
@declare("index", aten.as_strided_copy.default)
def _as_strided(cx: Any, x: Lowered, size: Any, stride: Any, storage_offset: int | None = None) -> Lowered:
    """Only over a buffer that is laid out as eager's storage: the operand must lie in it exactly as it does there."""
    source = cx.operand_spec
    found = cx.strided(x, source.stride)
    other = found is None or found.stride != source.stride
    if other and source.offset == 0 and sum((n - 1) * st for n, st in zip(source.size, source.stride)) + 1 == source.numel:
        x = cx.store(x, source.stride)
        found = cx.strided(x, source.stride)
    if found is None or found.stride != source.stride:
        raise UnsupportedError("as_strided of a value that has no memory of eager's layout")  # torch's own would read ours
    offset = (source.offset if storage_offset is None else storage_offset) - source.offset + found.offset
    buffer = cx.buffers[found.buffer]
    last = offset + sum((n - 1) * st for n, st in zip(size, stride, strict=True))
    if numel(size) and not 0 <= offset <= last < buffer.span:
        raise UnsupportedError("as_strided beyond the memory of its operand")
    size = tuple(size)
    at = linear(point(size), tuple(stride), offset)
    return Lowered(size, x.dtype, cast(load(buffer.name, at, buffer.dtype), compute(x.dtype)), x.origins)


# ---- copies with an index map ----------------------------------------------------------------------------------------


@declare("index", aten.flip.default)
def _flip(cx: Any, x: Lowered, dims: Sequence[int]) -> Lowered:
    at = list(point(x.size))
    for d in dims:
        d %= max(len(x.size), 1)
        if at and x.size[d] > 1:
            at[d] = affine(x.size[d] - 1, ((at[d], -1),))
    return cx.viewed(x, x.size, at)


@declare("index", aten.roll.default)
def _roll(cx: Any, x: Lowered, shifts: Sequence[int], dims: Sequence[int] = ()) -> Lowered:
    if not x.numel:
        return x
    size = x.size if dims else (x.numel,)
    flat = x if dims else reshaped(cx, x, size)
    at = list(point(size))
    for n, d in zip(shifts, dims or (0,), strict=True):
        at[d] = mod(add(at[d], -n % size[d]), size[d])
    rolled = cx.viewed(flat, size, at)
    return rolled if dims else reshaped(cx, rolled, x.size)


@declare("index", aten.repeat.default)
def _repeat(cx: Any, x: Lowered, _: Any) -> Lowered:
    size = cx.spec.size
    out = point(size)[len(size) - len(x.size) :]
    return cx.viewed(x, size, [integer(0) if n == 1 else mod(e, n) if n else e for e, n in zip(out, x.size, strict=True)])


CAT_LIMIT = {"cpu": 64, "cuda": 12}  # parts of a concatenation that one loop chooses from: on the CPU each becomes a loop


@declare("index", aten.cat.default)
def _cat(cx: Any, tensors: Sequence[Lowered], dim: int = 0) -> Lowered:
    size, dtype = cx.spec.size, cx.spec.dtype
    parts = [t for t in tensors if t.size != (0,) or len(size) == 1]
    dim %= max(len(size), 1)
    parts = [t for t in parts if t.size[dim]] or parts[:1]
    return joined(cx, [to(t, dtype) for t in parts], size, dim) if parts else Lowered(size, dtype, s.literal(0, compute(dtype)))


def joined(cx: Any, parts: Sequence[Lowered], size: tuple[int, ...], dim: int) -> Lowered:
    """Tensors side by side along dim: nested choices by the index."""
    if len(parts) > CAT_LIMIT[cx.device.type]:
        raise Library("a concatenation of many tensors")
    i = point(size)[dim]
    ends, total = [], 0
    for t in parts:
        total += t.size[dim]
        ends.append(total)
    if len(parts) == 1:
        return parts[0]
    body = s.literal(0, compute(parts[0].dtype))
    for t, end in zip(reversed(parts), reversed(ends), strict=True):
        t = cx.kept(t)
        at = list(point(size))
        at[dim] = add(i, t.size[dim] - end) if t.size[dim] != 1 else integer(0)
        body = masked(in_range(i, end - t.size[dim], end), cx.viewed(t, size, at).body, body)
    return Lowered(size, parts[0].dtype, body, tuple(dict.fromkeys(o for t in parts for o in t.origins)))


@declare("index", aten.stack.default)
def _stack(cx: Any, tensors: Sequence[Lowered], dim: int = 0) -> Lowered:
    size, dtype = cx.spec.size, cx.spec.dtype
    dim %= len(size)
    one = (*size[:dim], 1, *size[dim + 1 :])
    at = [e for k, e in enumerate(point(one)) if k != dim]
    return joined(cx, [cx.viewed(to(t, dtype), one, at) for t in tensors], size, dim)


@declare("index", aten.constant_pad_nd.default)
def _constant_pad(cx: Any, x: Lowered, pad: Sequence[int], value: Any = 0) -> Lowered:
    size = cx.spec.size
    out, at, test = point(size), list(point(size)), None
    for j in range(len(pad) // 2):
        k = len(size) - 1 - j
        at[k] = add(out[k], -pad[2 * j]) if x.size[k] != 1 else integer(0)
        inside = in_range(add(out[k], -pad[2 * j]), 0, x.size[k])
        if inside.op != "const" or not inside.args[0]:
            test = inside if test is None else s.logical_and(s.Scalar(test), s.Scalar(inside)).expr
    x = cx.kept(x)
    body = cx.viewed(x, size, at).body
    fill = s.literal(value if x.dtype.is_floating_point else bool(value) if x.dtype == torch.bool else int(value), body.dtype)
    return Lowered(size, x.dtype, body if test is None else masked(test, body, fill), x.origins)


def _padded(cx: Any, x: Lowered, pad: Sequence[int], place: Any) -> Lowered:
    size, at = cx.spec.size, list(point(cx.spec.size))
    for j in range(len(pad) // 2):
        k = len(size) - 1 - j
        if pad[2 * j] or pad[2 * j + 1]:
            i = s.Scalar(value(add(at[k], -pad[2 * j])))
            at[k] = index(place(i, x.size[k]).expr, x.size[k])
    return cx.viewed(x, size, at)


@declare("index", aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def _reflection_pad(cx: Any, x: Lowered, padding: Sequence[int]) -> Lowered:
    return _padded(cx, x, padding, lambda i, n: (n - 1) - abs((n - 1) - abs(i)))


@declare("index", aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def _replication_pad(cx: Any, x: Lowered, padding: Sequence[int]) -> Lowered:
    return _padded(cx, x, padding, lambda i, n: s.minimum(s.maximum(i, 0), n - 1))


@declare("index", aten.diag_embed.default)
def _diag_embed(cx: Any, x: Lowered, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Lowered:
    size = cx.spec.size
    out = point(size)
    dim1, dim2 = dim1 % len(size), dim2 % len(size)
    along = add(out[dim1], min(offset, 0)) if x.size[-1] != 1 else integer(0)
    at = [e for k, e in enumerate(out) if k not in (dim1, dim2)] + [along]
    x = cx.kept(x)
    rows = affine(-offset, ((out[dim1], -1), (out[dim2], 1)))
    body = masked(in_range(rows, 0, 1), cx.viewed(x, size, at).body, s.literal(0, x.body.dtype))
    if size[dim1] > x.size[-1]:  # the diagonal does not reach the first or the last rows
        start = max(-offset, 0)
        inside = in_range(out[dim1], start, start + x.size[-1])
        body = masked(inside, body, s.literal(0, x.body.dtype))
    return Lowered(size, x.dtype, body, x.origins)


@declare("index", aten.rot90.default)
def _rot90(cx: Any, x: Lowered, k: int = 1, dims: Sequence[int] = (0, 1)) -> Lowered:
    a, b = (d % len(x.size) for d in dims)
    k %= 4
    if k == 2:
        return _flip(cx, x, (a, b))
    if k == 0:
        return x
    order = list(range(len(x.size)))
    order[a], order[b] = b, a
    return permuted(cx, _flip(cx, x, (b,)), order) if k == 1 else _flip(cx, permuted(cx, x, order), (b,))


@declare("index", aten.narrow_copy.default)
def _narrow_copy(cx: Any, x: Lowered, dim: int, start: int, length: int) -> Lowered:
    return _narrow(cx, x, dim, start, length)


# ---- scatter inverses of views ---------------------------------------------------------------------------------------


def _replaced(x: Lowered, test: Expr, source: Expr, pinned: dict[Expr, Expr] | None = None) -> Lowered:
    """x, and `source` where `test` holds; there the variables in `pinned` have the values given.

    What the source reads of x's own elements is spelled as x spells it, so that a write-back can happen in place.
    """
    if pinned:
        places = {substitute(read, pinned): read for read in loads(x.body)}
        source = rewrite(source, lambda _: None, given=places)
    if test.op == "const":
        return Lowered(x.size, x.dtype, source if test.args[0] else x.body, x.origins)
    return Lowered(x.size, x.dtype, masked(test, source, x.body), x.origins)


@declare("index", aten.select_scatter.default)
def _select_scatter(cx: Any, x: Lowered, src: Lowered, dim: int, index: int) -> Lowered:
    dim %= len(x.size)
    index %= x.size[dim]
    out = point(x.size)
    source = cx.viewed(to(src, x.dtype), x.size, [e for k, e in enumerate(out) if k != dim])
    return _replaced(x, in_range(out[dim], index, index + 1), source.body, {out[dim]: integer(index)})


@declare("index", aten.slice_scatter.default)
def _slice_scatter(cx: Any, x: Lowered, src: Lowered, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Lowered:
    dim %= len(x.size)
    start, end = bounds(x.size[dim], start, end)
    if start >= end:
        return x
    at = list(point(x.size))
    i = at[dim]
    offset = add(i, -start)
    shape = (*x.size[:dim], -(-(end - start) // step), *x.size[dim + 1 :])
    at[dim] = floordiv(offset, step) if shape[dim] != 1 else integer(0)
    src = cx.expanded(to(src, x.dtype), shape)
    test = in_range(i, start, end)
    if step > 1:
        on_step = in_range(mod(offset, step), 0, 1)
        test = on_step if test.op == "const" else s.logical_and(s.Scalar(test), s.Scalar(on_step)).expr
    return _replaced(x, test, cx.viewed(src, x.size, at).body)


@declare("index", aten.diagonal_scatter.default)
def _diagonal_scatter(cx: Any, x: Lowered, src: Lowered, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Lowered:
    dim1, dim2 = dim1 % len(x.size), dim2 % len(x.size)
    out = point(x.size)
    if not src.numel:
        return x
    along = add(out[dim1], min(offset, 0)) if src.size[-1] != 1 else integer(0)
    at = [e for k, e in enumerate(out) if k not in (dim1, dim2)] + [along]
    source = cx.viewed(to(src, x.dtype), x.size, at)
    test = in_range(add(out[dim2], affine(-offset, ((out[dim1], -1),))), 0, 1)
    return _replaced(x, test, source.body, {out[dim2]: add(out[dim1], offset)})
