"""What forward saves and what backward computes again: the partition of the joint graph (section 5.4).

In: a `Joint`.  Out: `Parts`: the forward graph, which also returns what it saves, and the backward graph.
Always: random operators run once, in forward; library operators too, except in regions of `torch.utils.checkpoint`,
whose user asked for it; the saved set of `minimum` is a minimum cut in bytes read back by backward, of equal cuts the
one nearest the backward. Backward reads an input itself only where eager's does, of any other a copy, so that a later
write to it is no error. No view is saved but the tensor that it views.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...errors import UnsupportedError
from ..loops.nodes import Spec
from ..ops.table import find
from . import views
from .differentiate import WRITE, Joint, ancestors, dependent
from .flow import INFINITE, Network
from .opgraph import OpGraph, runnable

aten = torch.ops.aten


@dataclass(frozen=True)
class Saved:
    """One value that forward keeps for backward, the nodes that read it there, and why it is not computed again."""

    name: str
    nbytes: int
    readers: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.nbytes} bytes, read by {', '.join(self.readers)}; {self.reason}"


@dataclass(frozen=True)
class Parts:
    """forward: primals -> results, then saved values. backward: kept primals, saved values, tangents -> gradients.

    kept: the primals that backward reads. recomputed: names of the nodes that backward computes a second time.
    default_bytes: what saving every value that backward reads would take.
    """

    forward: OpGraph
    backward: OpGraph
    kept: tuple[int, ...]
    saved: tuple[Saved, ...]
    recomputed: tuple[str, ...]
    default_bytes: int

    @property
    def saved_bytes(self) -> int:
        return sum(s.nbytes for s in self.saved)


def nbytes(spec: Spec) -> int:
    return spec.numel * spec.dtype.itemsize


class Region:
    """The forward half of a joint graph as the choice of what to save sees it."""

    def __init__(self, joint: Joint) -> None:
        graph = joint.ops.module.graph
        self.nodes = list(graph.nodes)
        self.output: tuple[Any, ...] = self.nodes.pop().args[0]
        self.results = self.output[: joint.results]
        self.gradients = self.output[joint.results :]
        tangent = dependent(graph)
        backward = ancestors(n for n in self.gradients if n in tangent) & tangent
        self.backward = [n for n in self.nodes if n in backward]
        reads = dict.fromkeys(a for n in self.backward for a in n.all_input_nodes if a not in tangent)
        reads |= dict.fromkeys(n for n in self.gradients if n not in tangent)
        self.needed = list(reads)  # values without a tangent that nodes with one read
        closure = ancestors(self.needed)
        self.values = [n for n in self.nodes if n in closure]
        late = [n for n in self.nodes if n.meta.get("backward") and (n in backward or n in closure)]
        eager = {a for n in late for a in n.all_input_nodes if not a.meta.get("backward") and a not in tangent}
        eager |= {n for n in self.gradients if not n.meta.get("backward") and n not in tangent}
        self.eager = [n for n in self.values if n in eager]  # what the default partition saves
        self.kept = {root(n) for n in eager}
        self.written = {n.args[0] for n in self.nodes if n.target is WRITE}
        self.leaving = {root(n) for n in self.results if isinstance(n, fx.Node)}

    def savable(self, node: fx.Node) -> bool:
        """Whether forward may hand the value over as it is."""
        if node.op == "placeholder":
            return True
        if not isinstance(node.meta.get("spec"), Spec) or views.parent(node) is not None:
            return node.op == "get_attr"
        return node not in self.leaving or node in self.kept

    def free(self, node: fx.Node) -> bool:
        """Whether backward may read the input itself."""
        return node.op == "get_attr" or (node.op == "placeholder" and node in self.kept and node not in self.written)

    def cost(self, node: fx.Node) -> int:
        return 0 if self.free(node) else nbytes(node.meta["spec"])


def root(node: fx.Node) -> fx.Node:
    """The tensor whose memory a value shares."""
    while (parent := views.parent(node)) is not None:
        node = parent
    return node


def recomputable(node: fx.Node) -> bool:
    """Whether backward may run the operator again: a row of loop IR that draws nothing, or in a checkpointed region
    any row that draws nothing."""
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op != "placeholder"
    row = find(node.target)  # type: ignore[arg-type]
    drawing = row is None or row.ordered or node.meta.get("ordered")
    return not drawing and (row.kind != "library" or "checkpoint" in node.meta)  # type: ignore[union-attr]


def reason(node: fx.Node) -> str:
    """Why backward is given a value."""
    if node.op == "placeholder":
        return "an input that may be written before backward reads it"
    source = node.args[0] if node.target is operator.getitem else node
    if recomputable(source):  # type: ignore[arg-type]
        return "no fewer bytes would give it"
    row = find(source.target)  # type: ignore[union-attr,arg-type]
    return "a library call runs once" if row is not None and not row.ordered else "it draws or has no row, so it runs once"


def default(region: Region) -> list[fx.Node]:
    """Everything that backward reads, the tensor in place of its views."""
    return list(dict.fromkeys(root(n) for n in region.eager))


def minimum(region: Region, again: Callable[[fx.Node], bool] = recomputable) -> list[fx.Node]:
    """A minimum cut between what only forward can compute and what backward needs."""
    place = {n: k for k, n in enumerate(region.values)}
    source, sink = 2 * len(place), 2 * len(place) + 1
    network = Network(2 * len(place) + 2)
    for n, k in place.items():
        network.edge(2 * k, 2 * k + 1, region.cost(n) if region.savable(n) else INFINITE)
        if n.op == "placeholder" or not again(n):
            network.edge(source, 2 * k, INFINITE)
        else:
            for a in n.all_input_nodes:
                network.edge(2 * place[a] + 1, 2 * k, INFINITE)
    for n in region.needed:
        network.edge(2 * place[n] + 1, sink, INFINITE)
    if network.flow(source, sink) >= INFINITE:
        raise UnsupportedError("backward needs an input that forward writes, or a value that nothing may save")
    near = network.near(sink)
    return [n for n, k in place.items() if 2 * k not in near and 2 * k + 1 in near]


def partition(joint: Joint, choose: Callable[[Region], list[fx.Node]] = minimum) -> Parts:
    """Forward and backward of a joint graph."""
    region = Region(joint)
    chosen = {n for n in choose(region) if not region.free(n)}
    module = joint.ops.module
    again = closure(region, chosen)
    saved = [n for n in region.values if n in chosen]
    kept = [n for n in region.values if n.op == "placeholder" and n in again]
    if (bad := next((n for n in kept if not region.free(n)), None)) is not None:
        raise UnsupportedError(f"backward reads {bad.name}, which may be written before")
    primals = [n for n in region.nodes if n.op == "placeholder" and not n.name.startswith("tangents_")]
    tangents = [n for n in region.nodes if n.op == "placeholder" and n.name.startswith("tangents_")]

    writes = [n for n in region.nodes if n.target is WRITE]
    ordered = [n for n in region.nodes if n.meta.get("ordered") and not n.meta.get("backward")]
    needed = ancestors([*(n for n in region.results if isinstance(n, fx.Node)), *saved, *writes, *ordered])
    forward = _graph(module, primals, [n for n in region.nodes if n in needed], region.results, saved)
    body = _placed(region, chosen, again)
    backward = _graph(module, [*kept, *saved, *tangents], body, region.gradients, ())
    for node, given in zip(saved, list(backward.graph.nodes)[len(kept) :], strict=False):
        if node.op == "placeholder":
            given.meta["spec"] = _copied(node.meta["spec"])
    readers = {n: tuple(u.name for u in n.users if u in again or u in set(region.backward)) for n in saved}
    return Parts(
        OpGraph(forward, True),
        OpGraph(backward, True),
        tuple(primals.index(n) for n in kept),
        tuple(Saved(n.name, nbytes(n.meta["spec"]), readers[n], reason(n)) for n in saved),
        tuple(n.name for n in region.values if n in again and n.op == "call_function"),
        sum(region.cost(n) for n in default(region)),
    )


def closure(region: Region, saved: set[fx.Node]) -> set[fx.Node]:
    """What backward has to compute or to read besides the saved values."""
    found: set[fx.Node] = set()
    stack = [n for n in region.needed if n not in saved]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(a for a in node.all_input_nodes if a not in saved)
    return found


def _placed(region: Region, saved: set[fx.Node], again: set[fx.Node]) -> list[fx.Node]:
    """The nodes of backward in order, each recomputed one right before its first reader."""
    done: set[fx.Node] = set()
    order: list[fx.Node] = []
    ends = [n for n in region.gradients if n in again]
    for node in (*region.backward, *ends):
        stack = [(node, False)]
        while stack:
            at, ready = stack.pop()
            if ready:
                order.append(at)
            elif at not in done and (at in again or at is node) and at not in saved:
                done.add(at)
                stack.append((at, True))
                stack.extend((a, False) for a in reversed(at.all_input_nodes) if a in again)
    return [n for n in order if n.op != "placeholder"]


def _graph(
    module: fx.GraphModule, inputs: Iterable[fx.Node], body: Iterable[fx.Node], outputs: Iterable[Any], saved: Iterable[fx.Node]
) -> fx.GraphModule:  # fmt: skip
    """A graph of copies of the nodes; of an input that is saved it returns a copy made at the begin."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        made[node] = graph.placeholder(node.name)
        made[node].meta = dict(node.meta)
    copies = {}
    for node in saved:
        if node.op == "placeholder":
            copies[node] = graph.call_function(aten.clone.default, (made[node],))
            copies[node].meta.update(node.meta, spec=_copied(node.meta["spec"]))
    for node in body:
        if node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    kept = [copies[n] if n in copies else made[n] for n in saved]
    graph.output((*fx.map_arg(tuple(outputs), made.__getitem__), *kept))
    return runnable(module, graph)


def _copied(spec: Spec) -> Spec:
    """The layout of a clone."""
    blank = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device="meta")
    return Spec(spec.size, tuple(blank.clone().stride()), spec.dtype, spec.device)
