"""Collectives: operators that exchange tensors with other processes (row X.05).

In: operators of torch.distributed as the dispatcher or a function mode sees them.
Out: for each a stand-in that exchanges nothing, for runs that only record.
Always: recording never communicates, so that a call of a compiled function exchanges once, whichever of the processes
compile meanwhile. What a stand-in gives has the right type and layout, and values that arrived could have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd")  # namespaces whose operators return what arrived
IN_PLACE = "c10d"  # the namespace of those that write it
WAITS = ("wait_tensor", "_wrap_tensor_autograd")


def _same(x: Tensor, *_: Any) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _exchanged(x: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    rows = x[:1].expand(sum(received), *x.shape[1:]) if received and x.shape[0] else x
    return _same(rows if rows.shape[0] == sum(received) or not received else x.new_zeros(sum(received), *x.shape[1:]))


def _each(one: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    return lambda tensors, *rest: [one(t, *rest) for t in tensors]


def _gathered(x: Tensor, count: int, group: Any) -> Tensor:
    return torch.cat([x] * count)


def _scattered(x: Tensor, kind: str, count: int, group: Any) -> Tensor:
    return _same(x[: x.shape[0] // count])


STAND_INS: dict[str, Callable[..., Any]] = {
    "all_reduce": _same,
    "broadcast": _same,
    "all_gather_into_tensor": _gathered,
    "reduce_scatter_tensor": _scattered,
    "all_to_all_single": _exchanged,
    "all_reduce_coalesced": _each(_same),
    "all_gather_into_tensor_coalesced": _each(_gathered),
    "reduce_scatter_tensor_coalesced": _each(_scattered),
    **dict.fromkeys(WAITS, _same),
}


def name_of(func: Any) -> str:
    """The name of a functional collective, overload or packet; '' for everything else."""
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.name.partition("::")[2] if func.namespace in FUNCTIONAL else ""
    if isinstance(func, torch._ops.OpOverloadPacket):
        space, _, name = func._qualified_op_name.partition("::")
        return name if space in FUNCTIONAL else ""
    return ""


def plain(args: tuple) -> tuple:
    """Arguments with the names of groups in place of the groups."""
    return tuple([a if isinstance(a, (Tensor, str, int, list, tuple)) else getattr(a, "group_name", a) for a in args])
