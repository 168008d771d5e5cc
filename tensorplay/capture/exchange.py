"""Collectives in a capture: nodes that exchange once at each call, though the capture itself exchanges nothing.

In: a functional collective as the function mode sees it, or one of those that write, as the dispatcher does.
Out: what stands in for its result; nodes of functional collectives, with the writes behind them.
Always: a collective that is not known here, or that a function which stays whole calls, is refused before it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from .. import collectives
from ..collectives import STAND_INS, Tensor

# Wrappers that keep processes in step, in objects and native code that capture cannot see: what to do instead.
COORDINATORS = {
    "torch.nn.parallel.distributed": "wrap the compiled module, DistributedDataParallel(tp.compile(module))",
    "torch.distributed.fsdp": "compile under the hooks, layer.forward = tp.compile(layer.forward)",
    "torch.distributed._composable": "compile under the hooks, layer.forward = tp.compile(layer.forward)",
}
C10D = "torch.distributed.distributed_c10d"  # the module whose functions are entered, down to their operators
_FUNCTIONAL: Any = torch.ops._c10d_functional


def coordinator(module: str) -> str:
    """Why code of a module of torch cannot be captured; '' where nothing speaks against it."""
    if not module.startswith(("torch.distributed.", "torch.nn.parallel.")):
        return ""
    for name, instead in COORDINATORS.items():
        if module == name or module.startswith(f"{name}."):
            return f"runs {name}, whose state capture cannot see: {instead}"
    return ""


def exchange(recorder: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """The node of a functional collective."""
    name = collectives.name_of(func)
    if name not in STAND_INS or kwargs:
        recorder.refuse(f"{name} exchanges data with other processes in a way that a graph does not repeat")

    def stand_in(*given: Any) -> Any:
        recorder.watch.seen.random = True  # as random numbers, what arrives is not to be asked for twice
        return STAND_INS[name](*given)

    return recorder.record(func, collectives.plain(args), {}, stand_in)


def exchange_in_place(recorder: Any, op: Any, args: tuple) -> Any:
    """A collective that writes, as a functional one whose result is copied."""
    name = op._schema.name.partition("::")[2]
    known = _IN_PLACE.get(name)
    if known is None or recorder.watch.seen is not None:
        recorder.refuse(f"{name} exchanges data with other processes in a way that a graph does not repeat")
    from torch._C._distributed_c10d import FakeWork, ProcessGroup, ReduceOp, Work

    groups: list[Any] = [a for a in args if type(a) is torch.ScriptObject]
    group = ProcessGroup.unbox(groups[0])
    kinds = {int(value): kind.lower() for kind, value in cast(Any, ReduceOp.RedOpType).__members__.items()}
    kind = kinds[int(groups[1].op())] if len(groups) > 1 else ""
    if kind == "premul_sum":
        recorder.refuse(f"{name} with {kind}")
    with recorder.watch:  # the function mode is on: the module's functions are entered
        written, value = cast(Any, known)(recorder, args, group, kind)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (value, *written)):
            recorder.refuse(f"{name} writes a tensor that requires grad, past autograd")
        value = _FUNCTIONAL.wait_tensor(value)
        for t, part in zip(written, value.split(value.shape[0] // len(written)) if len(written) > 1 else (value,)):
            t.copy_(part.view(t.shape))
    done = Work.boxed(FakeWork())
    return (args[0], done) if len(op._schema.returns) > 1 else done


def _one(recorder: Any, tensors: list) -> Tensor:
    if len(tensors) != 1:
        recorder.refuse("exchanges several tensors at once")
    return tensors[0]


def _all_reduce(recorder: Any, args: tuple, group: Any, kind: str) -> tuple[list[Tensor], Tensor]:
    t = _one(recorder, args[0])
    return [t], _FUNCTIONAL.all_reduce(t, kind, group.group_name)


def _broadcast(recorder: Any, args: tuple, group: Any, kind: str) -> tuple[list[Tensor], Tensor]:
    t = _one(recorder, args[0])
    return [t], _FUNCTIONAL.broadcast(t, args[2], group.group_name)


def _gather_into(recorder: Any, args: tuple, group: Any, kind: str) -> tuple[list[Tensor], Tensor]:
    return [args[0]], _FUNCTIONAL.all_gather_into_tensor(args[1], group.size(), group.group_name)


def _scatter_into(recorder: Any, args: tuple, group: Any, kind: str) -> tuple[list[Tensor], Tensor]:
    return [args[0]], _FUNCTIONAL.reduce_scatter_tensor(args[1], kind, group.size(), group.group_name)


def _gather(recorder: Any, args: tuple, group: Any, kind: str) -> tuple[list[Tensor], Tensor]:
    t, outs = _one(recorder, args[1]), _one(recorder, args[0])
    if any(out.shape != t.shape for out in outs):
        recorder.refuse("gathers tensors of several sizes")
    return outs, _FUNCTIONAL.all_gather_into_tensor(t if t.dim() else t.view(1), group.size(), group.group_name)


_IN_PLACE: dict[str, Callable[[Any, tuple, Any, str], tuple[list[Tensor], Tensor]]] = {
    "allreduce_": _all_reduce,
    "broadcast_": _broadcast,
    "_allgather_base_": _gather_into,
    "_reduce_scatter_base_": _scatter_into,
    "allgather_": _gather,
}
