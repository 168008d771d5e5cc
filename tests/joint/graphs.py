"""What the tests of this folder share: retrace a function, run the operator graph, compare with eager."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tensorplay.stax.joint.opgraph import OpGraph
from tensorplay.stax.joint.retrace import retrace
from tensorplay.stax.loops.nodes import Spec

aten = torch.ops.aten


def module(fn: Callable[..., Any], count: int) -> fx.GraphModule:
    """A captured graph of one node that calls `fn`."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(count)]
    graph.output(graph.create_node("call_function", fn, tuple(inputs), name="program"))
    return fx.GraphModule(torch.nn.Module(), graph)


def trace(fn: Callable[..., Any], *samples: torch.Tensor) -> OpGraph:
    return retrace(module(fn, len(samples)), samples)


def ops(graph: OpGraph) -> list[str]:
    """Names of the operators without overload, getitem left out."""
    calls = [n for n in graph.module.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    return [n.target._schema.name.split("::")[1] for n in calls]


def run(graph: OpGraph, *inputs: torch.Tensor) -> tuple[Any, ...]:
    """Runs node by node and checks that every value has the layout that its node states, and that only
    trailing `copy_` nodes write."""
    values: dict[fx.Node, Any] = {}
    rest = iter(inputs)
    trailing = False
    for node in graph.module.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return args[0]
        if node.op == "placeholder":
            values[node] = next(rest)
            continue
        if node.op == "get_attr":
            values[node] = getattr(graph.module, node.target)
        else:
            if node.target is aten.copy_.default:
                trailing = True
                assert node.args[0].op == "placeholder"
            elif node.target is not operator.getitem:
                assert not node.target._schema.is_mutable
                assert not trailing or node.target._schema.returns[0].alias_info is not None or node.target is aten.clone.default
            values[node] = node.target(*args, **kwargs)
        check(values[node], node.meta["spec"], node)
        assert isinstance(node.meta["ordered"], bool) and isinstance(node.meta["line"], str)
    raise AssertionError("no output")


def check(value: Any, spec: Any, node: fx.Node) -> None:
    if isinstance(value, torch.Tensor):
        have = Spec.of(value)
        assert (have.size, have.dtype, have.device) == (spec.size, spec.dtype, spec.device), node.format_node()
        assert have.stride == spec.stride, (have, spec, node.format_node())
        placed = any(a.op == "placeholder" for a in node.all_input_nodes) or node.op == "placeholder"
        assert placed or have.offset == spec.offset, (have, spec, node.format_node())
    elif isinstance(value, (tuple, list)):
        for v, s in zip(value, spec, strict=True):
            check(v, s, node)


def same(a: Any, b: Any) -> None:
    """Bitwise equality, NaN and signed zeros included, of nested results."""
    if isinstance(b, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, b.dtype, a.shape, b.shape)
        assert a.stride() == b.stride(), (a.stride(), b.stride())
        assert torch.equal(a.isnan(), b.isnan()) if b.is_floating_point() else True
        x, y = (a.nan_to_num(), b.nan_to_num()) if b.is_floating_point() else (a, b)
        assert torch.equal(x, y), (a, b)
        if b.is_floating_point():
            assert torch.equal(torch.signbit(a), torch.signbit(b)) or b.isnan().any()
    elif isinstance(b, (tuple, list)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b


def clone(t: torch.Tensor) -> torch.Tensor:
    """A copy with the same layout, storage offset included."""
    return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage().clone(), t.storage_offset(), t.shape, t.stride())


def agrees(fn: Callable[..., Any], *samples: torch.Tensor) -> OpGraph:
    """Retraces, and compares results and inputs after the call with eager; the samples must stay untouched."""
    before = [clone(s) for s in samples]
    versions = [s._version for s in samples]
    graph = trace(fn, *samples)
    assert [s._version for s in samples] == versions
    same(samples, before)
    ours, eager = [clone(s) for s in samples], [clone(s) for s in samples]
    got = run(graph, *ours)
    with torch.no_grad():
        want = fn(*eager)
    same(got, tuple(want) if isinstance(want, (tuple, list)) else (want,))
    same(ours, eager)
    for outs, ins in ((got, ours), (want if isinstance(want, (tuple, list)) else (want,), eager)):
        shared = [[o.untyped_storage()._cdata == i.untyped_storage()._cdata for i in ins] for o in outs]
        if outs is got:
            first = shared
        else:
            assert shared == first
    return graph
