"""View operators: how each is undone, so that a write through a view becomes a new value of its base (section 4.9).

In: a view operator with its arguments, the layout of its base, the value written to the view.
Out: `scatter`, which makes the base's new value, and `element`, the single view behind one result of `split` and its like.
Always: view(scatter(base, value)) == value, and every other element of the result is base's (proposition 4.4). The
result has the base's size, and its strides wherever the base is dense.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from ...errors import UnsupportedError
from ..loops.nodes import Spec

aten = torch.ops.aten
Emit = Callable[..., fx.Node]  # (target, args, spec) -> the new node


@dataclass(frozen=True)
class Link:
    """How a value views its parent: target(parent, *args)."""

    target: Any
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Undo:
    """One row. `copies`: the result is a new tensor whatever the value's layout; else it is itself a view of the value."""

    apply: Callable[[Emit, fx.Node, fx.Node, tuple[Any, ...]], fx.Node]
    copies: bool


def _bound(target: torch._ops.OpOverload, args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments after the base, defaults filled in."""
    rest = [a for a in target._schema.arguments[1:] if not a.kwarg_only]
    return tuple(args) + tuple(a.default_value for a in rest[len(args) :])


def _scatter(inverse: torch._ops.OpOverload) -> Undo:
    def apply(emit: Emit, base: fx.Node, value: fx.Node, args: tuple[Any, ...]) -> fx.Node:
        return emit(inverse, (base, value, *args), base.meta["spec"])

    return Undo(apply, copies=True)


def _strided(emit: Emit, base: fx.Node, value: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    """Written into the elements in the order in which they lie: `as_strided_scatter` would count from the begin of the
    storage, which at run time is that of a whole arena."""
    layout: Spec = base.meta["spec"]
    size, stride, offset = (*args, None)[:3]
    order = sorted(range(len(layout.size)), key=lambda d: -layout.stride[d] if layout.size[d] != 1 else 0)
    flat = base if order == sorted(order) else emit(aten.permute.default, (base, order))
    flat = _scattered(emit, flat, value, size, stride, (layout.offset if offset is None else offset) - layout.offset)
    turned: Spec = flat.meta["spec"]
    if order == sorted(order) or turned.numel == 0:
        return flat
    return emit(aten.permute.default, (flat, [order.index(d) for d in range(len(order))]))


def _unfolded(emit: Emit, base: fx.Node, value: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    whole = _packed(emit, base)
    seen = spec(aten.unfold.default, (whole, *args))
    return _scattered(emit, whole, value, seen.size, seen.stride, seen.offset - whole.meta["spec"].offset)


def _packed(emit: Emit, value: fx.Node) -> fx.Node:
    """The value as a contiguous tensor."""
    known: Spec = value.meta["spec"]
    stride = torch.empty(known.size, device="meta").stride()
    if known.stride == stride:
        return value
    return emit(aten.clone.default, (value,), Spec(known.size, stride, known.dtype, known.device), memory_format=torch.contiguous_format)


def _scattered(emit: Emit, base: fx.Node, value: fx.Node, size: Sequence[int], stride: Sequence[int], offset: int) -> fx.Node:
    """`base`, whose elements lie side by side, with `value` at `offset` + the sum of index * stride."""
    if overlaps(size, stride):
        raise UnsupportedError("a write through overlapping memory (as_strided, unfold or expand)")
    layout: Spec = base.meta["spec"]
    if 0 in size:
        return base
    shape, rank, index = list(layout.size), len(size), None
    for d, (n, step) in enumerate(zip(size, stride, strict=True)):
        along = Spec((n,), (1,), torch.int64, layout.device)
        at = emit(aten.arange.start_step, (offset, offset + n * max(step, 1), max(step, 1)), along, dtype=torch.int64, device=layout.device)
        at = emit(aten.view.default, (at, [n if k == d else 1 for k in range(rank)]))
        if index is not None:
            both = [max(a, b) for a, b in zip(index.meta["spec"].size, at.meta["spec"].size, strict=True)]
            sums = Spec(tuple(both), torch.empty(both, device="meta").stride(), torch.int64, layout.device)
            index = emit(aten.add.Tensor, (index, at), sums)
        else:
            index = at
        offset = 0
    if index is None:
        index = emit(aten.full.default, ([1], offset), Spec((1,), (1,), torch.int64, layout.device), dtype=torch.int64, device=layout.device)
    flat = emit(aten.view.default, (_packed(emit, base), [layout.numel]))
    parts = [emit(aten.view.default, (_packed(emit, x), [-1])) for x in (index, value)]
    return emit(aten.view.default, (emit(aten.scatter.src, (flat, 0, *parts), flat.meta["spec"]), shape))


def _same(emit: Emit, base: fx.Node, value: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    return value


def _resized(emit: Emit, base: fx.Node, value: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    size = base.meta["spec"].size
    return value if value.meta["spec"].size == size else emit(aten.view.default, (value, list(size)))


def _expanded(emit: Emit, base: fx.Node, value: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    if base.meta["spec"].numel != value.meta["spec"].numel:
        raise UnsupportedError("a write through an expanded view")
    return _resized(emit, base, value, args)


def _permuted(emit: Emit, base: fx.Node, value: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    rank = len(args[0])
    back = [0] * rank
    for at, dim in enumerate(args[0]):
        back[dim % rank] = at
    return emit(aten.permute.default, (value, back))


def _swapped(target: torch._ops.OpOverload) -> Undo:
    return Undo(lambda emit, base, value, args: emit(target, (value, *args)), copies=False)


def _recast(emit: Emit, base: fx.Node, value: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    return emit(aten.view.dtype, (value, base.meta["spec"].dtype))


UNDO: dict[Any, Undo] = {
    aten.select.int: _scatter(aten.select_scatter.default),
    aten.slice.Tensor: _scatter(aten.slice_scatter.default),
    aten.diagonal.default: _scatter(aten.diagonal_scatter.default),
    aten.as_strided.default: Undo(_strided, copies=True),
    aten.unfold.default: Undo(_unfolded, copies=True),
    aten.t.default: _swapped(aten.t.default),
    aten.transpose.int: _swapped(aten.transpose.int),
    aten.permute.default: Undo(_permuted, copies=False),
    aten.view.default: Undo(_resized, copies=False),
    aten._unsafe_view.default: Undo(_resized, copies=False),
    aten._reshape_alias.default: Undo(_resized, copies=False),
    aten.squeeze.default: Undo(_resized, copies=False),
    aten.squeeze.dim: Undo(_resized, copies=False),
    aten.squeeze.dims: Undo(_resized, copies=False),
    aten.unsqueeze.default: Undo(_resized, copies=False),
    aten.expand.default: Undo(_expanded, copies=False),
    aten.alias.default: Undo(_same, copies=False),
    aten.detach.default: Undo(_same, copies=False),
    aten.view.dtype: Undo(_recast, copies=False),
    aten.view_as_real.default: _swapped(aten.view_as_complex.default),
    aten.view_as_complex.default: _swapped(aten.view_as_real.default),
    aten._conj.default: _swapped(aten._conj.default),
    aten._neg_view.default: _swapped(aten._neg_view.default),
}

LISTS = {
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}


def parent(node: fx.Node) -> fx.Node | None:
    """The node whose memory this node's result shares, or None: it is a tensor of its own."""
    if node.op != "call_function":
        return None
    target, args = node.target, cast(tuple[Any, ...], node.args)
    if target is operator.getitem:
        return args[0].args[0] if args[0].target in LISTS else None
    if target in UNDO:
        return args[0]
    if target in LISTS or not isinstance(target, torch._ops.OpOverload):
        return None
    returns = target._schema.returns
    if len(returns) == 1 and (info := returns[0].alias_info) is not None and not info.is_write:
        for at, a in enumerate(target._schema.arguments):
            if a.alias_info is not None and a.alias_info.before_set & info.before_set:
                return args[at]
    return None


def link(node: fx.Node) -> Link:
    """The single view that makes `node` out of its parent (for `as_strided`: out of the root of all its parents)."""
    if node.target is aten.as_strided.default:
        return Link(node.target, (*node.args[1:3], node.meta["spec"].offset))
    if node.target is not operator.getitem:
        return Link(node.target, tuple(node.args[1:]))
    source, index = cast(tuple[Any, ...], node.args)
    args = _bound(source.target, source.args[1:])
    if source.target is aten.unbind.int:
        return Link(aten.select.int, (args[0], index))
    sizes, dim = args
    if isinstance(sizes, int):
        return Link(aten.slice.Tensor, (dim, index * sizes, (index + 1) * sizes))
    start = sum(sizes[:index])
    return Link(aten.slice.Tensor, (dim, start, start + sizes[index]))


def apply(emit: Emit, base: fx.Node, view: Link) -> fx.Node:
    """The view of `base`."""
    return emit(view.target, (base, *view.args))


def scatter(emit: Emit, base: fx.Node, value: fx.Node, view: Link) -> fx.Node:
    """base with `value` where the view looks."""
    row = UNDO.get(view.target)
    if row is not None:
        return row.apply(emit, base, value, _bound(view.target, view.args))
    raise UnsupportedError(f"a write through {view.target}: it has no scatter inverse")


def copies(view: Link) -> bool:
    """Whether scatter makes a new tensor, whatever the value's layout."""
    row = UNDO.get(view.target)
    return row is None or row.copies


def spec(target: Any, args: tuple[Any, ...]) -> Spec:
    """The layout of target(*args), a view of the first argument; computed on tensors without memory."""
    base: Spec = args[0].meta["spec"]
    blank = torch.empty(0, dtype=base.dtype, device="meta").as_strided(base.size, base.stride, base.offset)
    found = target(blank, *args[1:])
    return Spec(tuple(found.shape), tuple(found.stride()), found.dtype, base.device, found.storage_offset())


def overlaps(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two points of a layout may share memory; may say yes for interleaved layouts that do not."""
    if 0 in size:
        return False
    reach = 0
    for step, n in sorted((s, n) for n, s in zip(size, stride, strict=True) if n != 1):
        if step <= reach:
            return True
        reach += (n - 1) * step
    return False
