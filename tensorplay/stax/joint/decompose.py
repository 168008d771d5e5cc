"""Operator-level decomposition: which operators are replaced by others, and by which (section 4.8, definition 4.2).

In: an operator overload.  Out: `rule(op)`, a function with the operator's arguments that computes the same with other
operators, or None where the operator stays. Which do: those with a row in the table of operators (the base B), those
that draw random numbers, and those without a rule; the last become fallback kernels.
Always: a rule runs under the recorder, so that what it calls is looked up in turn; it may return NotImplemented for
arguments that it does not cover. Rules never lead back to their own operator (proposition 4.3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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


@own(aten.fill.Scalar)
def fill(x: Tensor, value: Any) -> Tensor:
    return _full(x, value)


@own(aten.fill.Tensor)
def fill_tensor(x: Tensor, value: Tensor) -> Tensor:
    if value.dtype != x.dtype or value.device != x.device:
        value = aten._to_copy.default(value, dtype=x.dtype, device=x.device)
    return aten.clone.default(aten.expand.default(value, list(x.shape)), memory_format=torch.contiguous_format)


@own(aten.zero.default)
def zero(x: Tensor) -> Tensor:
    return _full(x, 0)


@own(aten.zeros_like.default)
def zeros_like(x: Tensor, **options: Any) -> Tensor:
    return aten.full_like.default(x, 0, **options)


@own(aten.ones_like.default)
def ones_like(x: Tensor, **options: Any) -> Tensor:
    return aten.full_like.default(x, 1, **options)


def _full(x: Tensor, value: Any) -> Tensor:
    if x.dtype == torch.bool:
        value = bool(value)
    return aten.full.default(list(x.shape), value, dtype=x.dtype, layout=x.layout, device=x.device, pin_memory=False)


@own(aten._index_put_impl.default)
def index_put_impl(x: Tensor, indices: list, values: Tensor, accumulate: bool = False, unsafe: bool = False) -> Tensor:
    return aten.index_put.default(x, indices, values, accumulate)


# Rules of torch's table that are used, by name of the operator; each was run on torch's own operator samples.
TORCH: frozenset[str] = frozenset()


def has_row(op: torch._ops.OpOverload) -> bool:
    """Whether lowering has a row for the operator: it belongs to the base."""
    return _has_row()(op)


@functools.cache
def _has_row() -> Callable[[torch._ops.OpOverload], bool]:
    from ..ops import table

    return table.has_row


@functools.cache
def rule(op: torch._ops.OpOverload) -> Rule | None:
    if has_row(op) or random(op):
        return None
    if op in OWN:
        return OWN[op]
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        return functools.partial(op._op_dk, torch.DispatchKey.CompositeImplicitAutograd)
    return torch._decomp.decomposition_table.get(op) if from_torch(op) else None


def from_torch(op: torch._ops.OpOverload) -> bool:
    """Whether the rule is one of torch's, which need not keep strides or dtypes."""
    return str(op) in TORCH
