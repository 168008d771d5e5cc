"""The front end: six passes over a captured graph, in rounds, to a fixed point (section 4.1).

In: a captured graph and choices.  Out: `Front`, the rewritten copy and what each pass did; the captured graph stays.
Always: every change of the graph lowers the measure of proposition 4.1, so that the rounds end; a rule that breaks
this raises instead of looping.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from ..errors import TensorPlayError
from ..source import Sourced
from .choices import Choices
from .composites import decompose, weight
from .cse import cse
from .dce import dce
from .fold import fold
from .memory import settle
from .normalize import normalize, writes_in_place
from .regions import mark_regions, regions
from .rules import COMMUTATIVE

Pass = Callable[[fx.Graph, Choices], list[str]]
FRONT_END: tuple[Pass, ...] = (normalize, fold, decompose, cse, dce, mark_regions)
NAMES: dict[Pass, str] = {
    normalize: "NormalizeOperators",
    fold: "ConstFold",
    decompose: "DecomposePass",
    cse: "CSEPass",
    dce: "DCEPass",
    mark_regions: "PointwiseFusionHint",
}
ROUNDS = 16


@dataclass(frozen=True)
class Step:
    """One pass that changed the graph: what it says, the text before and after (where asked for), its time."""

    round: int
    name: str
    notes: tuple[str, ...]
    seconds: float
    before: str = ""
    after: str = ""

    def __str__(self) -> str:
        return f"[round {self.round}] {self.name}: {'; '.join(self.notes)}"


@dataclass(frozen=True)
class Front:
    """The rewritten graph, and the steps that led to it."""

    graph: fx.GraphModule
    steps: tuple[Step, ...] = ()
    rounds: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return "\n".join([*map(str, self.steps), f"[round {self.rounds}] no change"])


def measure(graph: fx.Graph, choices: Choices) -> tuple[int, int, int, int]:
    """Composites by depth, in-place operators, nodes, constants on the left: what the passes lower, in this order."""
    nodes = inplace = left = 0
    for node in graph.nodes:
        nodes += 1
        inplace += writes_in_place(node)
        if node.op == "call_function" and node.target in COMMUTATIVE and len(node.args) == 2:
            left += not isinstance(node.args[0], fx.Node) and isinstance(node.args[1], fx.Node)
    return weight(graph, choices), inplace, nodes, left


def run_passes(
    module: fx.GraphModule, passes: tuple[Pass, ...] = FRONT_END, choices: Choices | None = None, texts: bool = False
) -> Front:
    """Runs the passes until a whole round changes nothing. `texts`: the steps hold the graph before and after."""
    choices = Choices.of(None) if choices is None else choices
    start = time.perf_counter()
    graph = copied(module.graph)
    settle(graph)
    steps: list[Step] = []
    value = measure(graph, choices)
    for round in range(1, ROUNDS + 1):
        quiet = True
        for each in passes:
            before = text(graph) if texts else ""
            began = time.perf_counter()
            notes = each(graph, choices)
            if not notes:
                continue
            quiet = False
            name = NAMES.get(each, each.__name__)
            lower = measure(graph, choices)
            if not (lower < value or (each is mark_regions and lower == value)):
                raise TensorPlayError(
                    f"pass {name} changed the graph without lowering its measure: {value} became {lower}"
                )
            value = lower
            steps.append(
                Step(round, name, tuple(notes), time.perf_counter() - began, before, text(graph) if texts else "")
            )
        if quiet:
            return Front(Sourced(module, graph), tuple(steps), round, time.perf_counter() - start)
    raise TensorPlayError(f"the front-end passes found no fixed point in {ROUNDS} rounds; the last change: {steps[-1]}")


def text(graph: fx.Graph) -> str:
    """The graph, and the regions that its nodes are marked with."""
    members: dict[int, list[str]] = {}
    for name, _, number in regions(graph):
        if number is not None:
            members.setdefault(number, []).append(name)
    return "\n".join([str(graph), *[f"    # region {k}: {', '.join(names)}" for k, names in members.items()]])


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy with its own metadata."""
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = new.node_copy(node, copies.__getitem__)
    return new
