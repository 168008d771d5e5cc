"""A captured graph in two, where an operator's result has a shape, or is a number, that only the data tell.

In: a captured graph that could not be compiled as a whole, and tensors to run it on.
Out: the part in front of such operators, for the compiler; they and all that reads them, for torch.
Always: the rest neither writes what was made before nor draws random numbers, and nothing in the graph is there for its
effect alone: the order between the two parts does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...source import Sourced
from .mutate import random, writes
from .retrace import generators

_TAG = torch.Tag


@dataclass(frozen=True)
class Split:
    """first: the same placeholders; its output are the values at the cut.  rest: takes the placeholders and these values."""

    first: fx.GraphModule
    rest: fx.GraphModule
    target: torch._ops.OpOverload  # the first operator that needs data
    node: str
    line: str


def split(graph: fx.GraphModule, samples: Sequence[Tensor]) -> Split | None:
    """The two parts; None where they cannot be told apart, or the first would be empty."""
    nodes = list(graph.graph.nodes)
    calls = [n for n in nodes if n.op.startswith("call_")]
    if any(not n.users for n in calls):  # it is there for its effect
        return None
    probe = Probe()
    try:
        probe.run(graph, samples)
    except _Writes:
        return None
    behind: set[fx.Node] = set()
    for node in calls:
        if node in probe.needs or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    if not behind or not behind.isdisjoint(probe.drawing):
        return None
    copied = _copied(nodes, behind, probe.tensors)
    cut = [n for n in calls if n in probe.tensors and n not in copied and any(u in copied or u.op == "output" for u in n.users)]
    if not cut:
        return None
    front = [n for n in nodes if n.op != "output" and n not in behind]
    placeholders = [n for n in nodes if n.op == "placeholder"]
    first = _module(graph, front, [], tuple(cut))
    rest = _module(graph, [*placeholders, *(n for n in nodes if n in copied)], cut, graph.graph.output_node().args[0])
    at = next(n for n in calls if n in probe.needs)
    return Split(first, rest, probe.needs[at], at.name, at.meta.get("line", ""))


def _copied(nodes: Sequence[fx.Node], behind: set[fx.Node], tensors: set[fx.Node]) -> set[fx.Node]:
    """What the rest consists of: the nodes behind the cut, and those without tensors that they or the result read."""
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        read = any(u in found or u.op == "output" for u in node.users)
        if node in behind or (read and node.op not in ("placeholder", "output") and node not in tensors):
            found.add(node)
    return found


def _module(root: fx.GraphModule, nodes: Iterable[fx.Node], cut: Sequence[fx.Node], output: Any) -> fx.GraphModule:
    """Some nodes of a graph as a module; `cut` are more placeholders, after the others."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    rest = list(nodes)
    for node in (n for n in rest if n.op == "placeholder"):
        copies[node] = graph.node_copy(node)
    for node in cut:
        copies[node] = graph.placeholder(f"cut_{node.name}")
    for node in (n for n in rest if n.op != "placeholder"):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(fx.map_arg(output, copies.__getitem__))
    return Sourced(root, graph)


class _Writes(Exception):
    """An operator would write what another node made, or the caller."""


class Probe(TorchDispatchMode):
    """Runs a graph once and notes which nodes call operators that need data.

    tensors: nodes whose value is a tensor, or a tuple or list of tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.node: fx.Node | None = None
        self.needs: dict[fx.Node, torch._ops.OpOverload] = {}
        self.drawing: set[fx.Node] = set()
        self.tensors: set[fx.Node] = set()
        self.values: dict[fx.Node, Any] = {}

    def run(self, graph: fx.GraphModule, samples: Sequence[Tensor]) -> None:
        probe, inputs = self, iter(samples)

        class Watched(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                probe.node, probe.values = n, self.env
                value = next(inputs) if n.op == "placeholder" else super().run_node(n)
                several = isinstance(value, (tuple, list)) and value and all(isinstance(v, Tensor) for v in value)
                if isinstance(value, Tensor) or several:
                    probe.tensors.add(n)
                return value

        undoing = generators({t.device for t in samples})
        try:
            with torch.inference_mode(False), torch.no_grad(), self:
                Watched(graph).run(*samples)
        finally:
            self.values = {}
            for undo in undoing:
                undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        assert self.node is not None
        if _needs_data(func, args):
            self.needs.setdefault(self.node, func)
        if random(func):
            self.drawing.add(self.node)
        if written := writes(func):
            named = {a.name: v for a, v in zip(func._schema.arguments, args)} | kwargs
            known = {t.untyped_storage()._cdata for t in pytree.tree_leaves(self.values) if isinstance(t, Tensor)}
            for t in pytree.tree_leaves([named.get(name) for name in written.names]):
                if isinstance(t, Tensor) and t.untyped_storage()._cdata in known:
                    raise _Writes
        elif func._schema.is_mutable:
            raise _Writes
        return func(*args, **kwargs)


def _needs_data(func: torch._ops.OpOverload, args: tuple) -> bool:
    if func is torch.ops.aten.index.Tensor:
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    return _TAG.dynamic_output_shape in func.tags or _TAG.data_dependent_output in func.tags
