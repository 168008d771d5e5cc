"""Python numbers that a program reads from tensors, through the retrace.

In: nodes of the captured graph whose values are Python numbers.  Out: operator-graph nodes `tensorplay.number`.
Always: the retrace runs with stand-ins, numbers that nothing else in the program has; an operator that gets one shows
which number it takes. What computes with one, and hands on another, differs between two runs with other stand-ins,
and such a program is refused.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ...capture.numbers import RAISING
from ...errors import UnsupportedError
from ..loops.nodes import Spec
from ..ops.numbers import DTYPES, NUMBER, NUMBERS, Expression, most, written
from .opgraph import OpGraph

RANGES = ((1.25, 1.75), (-1.75, -1.25))  # of the stand-ins of each run: no operator on values asks for less


def has_numbers(graph: fx.GraphModule) -> bool:
    """Whether nodes of a captured graph are Python numbers."""
    return any("number" in node.meta for node in graph.graph.nodes)


class Numbers:
    """The numbers of one run of a recorder."""

    def __init__(self, recorder: Any, trial: int) -> None:
        self.recorder = recorder
        self.draw = random.Random(trial)
        self.range = RANGES[trial]
        self.reads: dict[Expression, fx.Node] = {}
        self.known: dict[tuple[type, Any], Expression] = {}
        self.nodes: dict[Expression, fx.Node] = {}

    def read(self, t: Tensor, kind: type) -> Any:
        """The stand-in for `t.item()`; the value of the tensor at this point of the program is kept."""
        with self.recorder:
            t = t.clone().reshape(())
        found = Expression(None, (), kind)
        self.reads[found] = self.recorder.node(t)
        return self._stand_in(found)

    def operate(self, op: Callable, args: tuple, kind: type) -> Any:
        """The stand-in for an operator of Python on numbers."""
        value = self._stand_in(Expression(op, tuple(self.known.get((type(a), a), a) for a in args), kind))
        if op in RAISING:
            with self.recorder:
                self.node(value).args[0].meta["ordered"] = True
        return value

    def _stand_in(self, x: Expression) -> Any:
        while True:
            value: Any = self.draw.uniform(*self.range) if x.kind is float else self.draw.randrange(40, 120)
            if (x.kind, value) not in self.known:
                self.known[x.kind, value] = x
                return value

    def node(self, value: Any) -> fx.Node | None:
        """The node of the number that a literal of the program stands for."""
        x = self.known.get((type(value), value))
        if x is None:
            return None
        node = self.nodes.get(x)
        if node is None:
            graph, line = self.recorder.graph, self.recorder.line
            reads = list(dict.fromkeys(_reads(x)))
            dtype = DTYPES[x.kind]
            values = graph.create_node("call_function", NUMBERS, ("", [self.reads[r] for r in reads], dtype, []), name="numbers")
            values.meta.update(spec=Spec((1,), (1,), dtype, torch.device("cpu")), line=line, ordered=False, wanted=x, reads=reads)
            node = self.nodes[x] = graph.create_node("call_function", NUMBER, (values, 0), name="number")
            node.meta.update(spec=None, line=line, ordered=False, number=x.kind)
        return node


def _reads(x: Expression) -> list[Expression]:
    found, stack = [], [x]
    seen: set[Expression] = set()
    while stack:
        at = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        if at.op is None:
            found.append(at)
        stack += [a for a in at.args if isinstance(a, Expression)]
    return found


def gather(graph: fx.Graph) -> None:
    """All numbers that need none of each other are computed in one step: the graph is sorted anew for that."""
    groups: dict[tuple[int, torch.dtype], list[fx.Node]] = {}
    for node, depth in _depths(graph).items():
        if node.target is NUMBERS:
            groups.setdefault((depth, node.args[2]), []).append(node)
    merged: dict[fx.Node, fx.Node] = {}
    order = [n for n in graph.nodes if n.meta.get("ordered")]
    for (_, dtype), nodes in groups.items():
        slots: dict[fx.Node, int] = {}
        names: dict[Expression, str] = {}
        for node in nodes:
            for read, source in zip(node.meta["reads"], node.args[1], strict=True):
                names[read] = f"r{slots.setdefault(source, len(slots))}"
        wanted = [node.meta["wanted"] for node in nodes]
        limits = [min((_limit(user) for number in node.users for user in number.users), default=math.inf) for node in nodes]
        with graph.inserting_before(nodes[-1]):
            made = graph.create_node("call_function", NUMBERS, (written(wanted, names), list(slots), dtype, limits), name="numbers")
        made.meta.update(nodes[-1].meta, spec=Spec((len(nodes),), (1,), dtype, torch.device("cpu")))
        made.meta["ordered"] = any(node.meta.get("ordered") for node in nodes)
        for k, node in enumerate(nodes):
            merged[node] = made
            for user in list(node.users):
                user.args = (made, k)
            graph.erase_node(node)
    if groups:
        _sort(graph, list(dict.fromkeys([merged.get(n, n) for n in order])))


def _depths(graph: fx.Graph) -> dict[fx.Node, int]:
    """For each node how many steps that compute numbers it stands behind, by what it reads and by the order that ordered
    nodes keep. Numbers of one depth and dtype need none of each other, and no ordered node stands between those."""
    depth: dict[fx.Node, int] = {}
    last: fx.Node | None = None  # among the ordered nodes
    for node in graph.nodes:
        number = node.target is NUMBERS
        depth[node] = max((depth[a] for a in node.all_input_nodes), default=0) + number
        if node.meta.get("ordered"):
            if last is not None:
                apart = number and (last.target is not NUMBERS or last.args[2] is not node.args[2])
                depth[node] = max(depth[node], depth[last] + apart)
            last = node
    return depth


def _limit(user: fx.Node) -> float:
    """What a number may be at most for an operator that takes it: more than its result can hold, and eager complains."""
    spec = user.meta.get("spec")
    return most(spec.dtype) if isinstance(spec, Spec) and spec.dtype is not torch.bool else math.inf


def _sort(graph: fx.Graph, order: list[fx.Node]) -> None:
    """Every node behind what it reads, those of `order` in that order, else in the order that there was."""
    before = dict(zip(order[1:], order))
    placed: set[fx.Node] = set()
    waiting: set[fx.Node] = set()
    for start in list(graph.nodes):
        stack = [start]
        while stack:
            node = stack[-1]
            if node in placed:
                stack.pop()
                continue
            needed = [*node.all_input_nodes, *([before[node]] if node in before else [])]
            missing = [n for n in needed if n not in placed]
            if missing and node in waiting:
                raise UnsupportedError(f"numbers that need each other, at {node.meta.get('line', node.name)}")
            waiting.add(node)
            stack += missing
            if not missing:
                stack.pop()
                placed.add(node)
                if node.op not in ("placeholder", "output"):
                    graph.output_node().prepend(node)
    graph.lint()


def compare(first: OpGraph, second: OpGraph) -> None:
    """Refuses a program whose operators got other literals with other stand-ins."""
    constants = [dict(g.module.named_buffers()) | {k: v for k, v in vars(g.module).items() if isinstance(v, Tensor)} for g in (first, second)]
    equal = str(first) == str(second) and constants[0].keys() == constants[1].keys()
    if not equal or not all(torch.equal(t, constants[1][name]) for name, t in constants[0].items()):
        raise UnsupportedError("computes with a number that `item` read, in a way that its operators do not show")
