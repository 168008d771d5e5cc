"""One operator as an operator graph: eager's result beside the loops' result."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tensorplay.stax.joint.opgraph import OpGraph
from tensorplay.stax.loops.interpret import interpret
from tensorplay.stax.loops.lower import lower
from tensorplay.stax.loops.nodes import Extern, Loops, Spec
from tensorplay.stax.loops.verify import verify


def _spec(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Spec.of(x)
    return tuple(map(_spec, x)) if isinstance(x, (tuple, list)) else x


def opgraph(target: Any, args: tuple, kwargs: dict | None = None) -> tuple[OpGraph, list[torch.Tensor], list[Any]]:
    """The graph of one call, its tensor inputs and eager's results."""
    kwargs = kwargs or {}
    inputs: list[torch.Tensor] = []
    graph = fx.Graph()
    with torch.no_grad():
        eager = target(*args, **kwargs)

    def lift(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            node = graph.placeholder(f"x{len(inputs)}")
            node.meta["spec"] = Spec.of(x)
            inputs.append(x)
            return node
        return x

    args, kwargs = pytree.tree_map(lift, (args, kwargs))
    call = graph.call_function(target, args, kwargs)
    call.meta["spec"] = _spec(eager)
    several = isinstance(eager, (tuple, list))
    results = list(eager) if several else [eager]
    outputs = [call]
    if several:
        outputs = []
        for k, r in enumerate(results):
            item = graph.call_function(operator.getitem, (call, k))
            item.meta["spec"] = _spec(r)
            outputs.append(item)
    graph.output(tuple(outputs))
    return OpGraph(fx.GraphModule(torch.nn.Module(), graph)), inputs, results


def both(target: Any, args: tuple, kwargs: dict | None = None) -> tuple[list[Any], list[Any], Loops]:
    """Eager's results, the loops' results and the loops."""
    ops, inputs, eager = opgraph(target, args, kwargs)
    loops = verify(lower(ops))
    return eager, interpret(loops, inputs), loops


def native(loops: Loops) -> bool:
    """Whether no node is a call of torch."""
    return not any(isinstance(n, Extern) for n in loops.nodes)


def same(a: torch.Tensor, b: torch.Tensor, ulps: float = 0, either_zero: bool = False) -> str:
    """'' where equal (NaN equals NaN, 0 differs from -0 unless either may come) or within a few units in the last place."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}"
    if not a.dtype.is_floating_point:
        return "" if torch.equal(a, b) else f"{(a != b).sum()} of {a.numel()} differ"
    x, y = a.double(), b.double()
    ok = (x == y) | (x.isnan() & y.isnan())
    if ulps:
        info = torch.finfo(a.dtype)
        room = ulps * info.eps * x.abs().clamp_min(info.tiny)
        ok |= (x - y).abs() <= room
        ok |= (x.abs() <= 2 * info.tiny) & (y.abs() <= 2 * info.tiny)
        ok |= (x.abs() >= info.max) & (y.abs() >= info.max * (1 - 2 * ulps * info.eps)) & (x.sign() == y.sign())
    if not either_zero:
        ok &= (x != 0) | (y != 0) | (x.signbit() == y.signbit())
    if ok.all():
        return ""
    at = (~ok).flatten().nonzero()[0, 0]
    return f"{(~ok).sum()} of {a.numel()} differ, first {a.flatten()[at]} against {b.flatten()[at]} at {at}"
