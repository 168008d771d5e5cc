"""Operator-level decomposition: which operators are replaced by others, and by which (section 4.8, definition 4.2).

In: an operator overload.  Out: `rule(op)`, a function with the operator's arguments that computes the same with other
operators, or None where the operator stays. Which do: those with a row in the table of operators (the base B), those
that draw random numbers, and those without a rule; the last become fallback kernels.
A rule is one of ours, or the operator's own composite kernel, which is exact by definition. torch's table
(`torch._decomp`) is not used: of its rules for operators without a row most import sympy when they run, and some differ
from the operator on NaN, infinities and float64.
Always: a rule runs under the recorder, so that what it calls is looked up in turn; one that does not cover its
arguments returns NotImplemented first. Rules never lead back to their own operator (proposition 4.3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .foreach import one_by_one
from .mutate import random

aten = torch.ops.aten
Rule = Callable[..., Any]
OWN: dict[torch._ops.OpOverload, Rule] = {}


def own(*ops: torch._ops.OpOverload) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        for op in ops:
            OWN[op] = rule
        return rule

    return add


MEAN, SUM = 1, 2  # at::Reduction


def _reduced(x: Tensor, reduction: int) -> Tensor:
    if reduction == MEAN:
        return aten.mean.default(x)
    return aten.sum.default(x) if reduction == SUM else x


@own(aten.mse_loss.default)
def mse_loss(x: Tensor, y: Tensor, reduction: int = MEAN) -> Tensor:
    d = aten.sub.Tensor(x, y)
    return _reduced(aten.mul.Tensor(d, d), reduction)


@own(aten.zero.default)
def zero(x: Tensor) -> Tensor:
    return aten.full_like.default(x, 0)


@own(aten.glu.default)
def glu(x: Tensor, dim: int = -1) -> Tensor:
    half = x.shape[dim] // 2
    low = x.dtype
    if low in (torch.bfloat16, torch.float16):  # one rounding, as the kernel has
        x = aten._to_copy.default(x, dtype=torch.float32)
    value, gate = aten.slice.Tensor(x, dim, 0, half), aten.slice.Tensor(x, dim, half, 2 * half)
    found = aten.mul.Tensor(value, aten.sigmoid.default(gate))
    return found if x.dtype == low else aten._to_copy.default(found, dtype=low)


@own(aten.block_diag.default)
def block_diag(tensors: list[Tensor]) -> Tensor:
    blocks = [aten.view.default(t, [1] * (2 - t.dim()) + list(t.shape)) for t in tensors]
    width, left, rows = sum(b.shape[1] for b in blocks), 0, []
    for b in blocks:
        rows.append(aten.constant_pad_nd.default(b, [left, width - left - b.shape[1]]))
        left += b.shape[1]
    return aten.cat.default(rows)


@own(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    x: Tensor, y: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    if any(t is not None and t.dtype != x.dtype for t in (y, weight, pos_weight)):
        return NotImplemented  # the kernel's in-place steps keep the target's dtype
    log = aten.log_sigmoid_forward.default(x)[0]
    if pos_weight is not None:
        log = aten.mul.Tensor(aten.add.Tensor(aten.mul.Tensor(aten.sub.Tensor(pos_weight, 1), y), 1), log)
    loss = aten.sub.Tensor(aten.mul.Tensor(aten.rsub.Scalar(y, 1), x), log)
    if weight is not None:
        loss = aten.mul.Tensor(loss, weight)
    return _reduced(loss, reduction)


def _placed(scatter: torch._ops.OpOverload) -> Rule:
    """The backward of a view that picks elements: the gradient in a tensor of zeros."""

    def rule(g: Tensor, sizes: list[int], *place: Any) -> Any:
        zeros = aten.full.default(sizes, 0, dtype=g.dtype, device=g.device)
        return scatter(zeros, g, *place)

    return rule


own(aten.select_backward.default)(_placed(aten.select_scatter.default))
own(aten.slice_backward.default)(_placed(aten.slice_scatter.default))
own(aten.diagonal_backward.default)(_placed(aten.diagonal_scatter.default))


@own(aten.glu_backward.default)
def glu_backward(g: Tensor, x: Tensor, dim: int) -> Tensor:
    half, low = x.shape[dim] // 2, x.dtype
    if low in (torch.bfloat16, torch.float16):
        x, g = aten._to_copy.default(x, dtype=torch.float32), aten._to_copy.default(g, dtype=torch.float32)
    value, gate = aten.slice.Tensor(x, dim, 0, half), aten.slice.Tensor(x, dim, half, 2 * half)
    y = aten.sigmoid.default(gate)
    first = aten.mul.Tensor(y, g)
    second = aten.mul.Tensor(aten.mul.Tensor(aten.mul.Tensor(aten.rsub.Scalar(y, 1), y), g), value)
    found = aten.cat.default([first, second], dim)
    return found if x.dtype == low else aten._to_copy.default(found, dtype=low)


@own(aten.as_strided_scatter.default)
def as_strided_scatter(x: Tensor, src: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None) -> Tensor:
    """A copy that is written: an offset into the storage says nothing where memory is planned anew."""
    copy = aten.clone.default(x)
    if copy.stride() != x.stride():
        raise UnsupportedError("as_strided_scatter on a tensor whose elements do not lie side by side")
    start = x.storage_offset() if storage_offset is None else storage_offset
    aten.copy_.default(aten.as_strided.default(copy, size, stride, start - x.storage_offset()), src)
    return copy


@own(aten.as_strided_copy.default)
def as_strided_copy(x: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None) -> Tensor:
    view = aten.as_strided.default(x, size, stride, storage_offset)
    return aten.clone.default(view, memory_format=torch.contiguous_format)


def has_row(op: torch._ops.OpOverload) -> bool:
    """Whether lowering has a row for the operator: it belongs to the base."""
    return _has_row()(op)


@functools.cache
def _has_row() -> Callable[[torch._ops.OpOverload], bool]:
    from ..ops import table

    return table.has_row


@functools.cache
def rule(op: torch._ops.OpOverload) -> Rule | None:
    if op in OWN:  # first: the result is the same, and its parts fuse with their neighbours
        return OWN[op]
    if op._schema.name.startswith("aten::_foreach_") and not op._schema.is_mutable:
        return one_by_one(op)
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    may_alias = any(r.alias_info is not None for r in op._schema.returns)
    if composite and (may_alias or not (has_row(op) or random(op))):  # `reshape` views or copies: show which
        return functools.partial(op._op_dk, torch.DispatchKey.CompositeImplicitAutograd)
    return None
