"""Data gates: the points at which the trace turned data into a Python value (definition 3.2).

In: the captured graph while it is still whole, and the gates in order.  Out: the replay graph, the backward slice of
the gates (algorithm 3.1); `value_of` turns its outputs into the values to compare.
Always: the replay writes nothing of the caller's and draws no random numbers; the writes that a gate saw are in it,
on copies, and those that came after it do not show in its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..source import sourced
from . import ambient
from .captured import Gate
from .isolate import isolate

CONVERT: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "int": int,
    "float": float,
    "index": lambda t: t.__index__(),
    "complex": complex,
    "item": lambda t: t.item(),
    "tolist": lambda t: t.tolist(),
    "shape": lambda t: tuple(t.shape),
}


def value_of(kind: str, output: Any) -> Any:
    """The Python value of a gate from what its node computes; other kinds compute the value itself."""
    convert = CONVERT.get(kind)
    return output if convert is None else convert(output)


@dataclass(frozen=True)
class Trait:
    """What a node did when it was recorded. touches: storages of its arguments and results; writes: those that it
    changed; random: whether it drew; lies: storages of its results."""

    touches: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    random: bool = False
    lies: frozenset[int] = frozenset()


_NONE = Trait()


@dataclass(frozen=True)
class Taken:
    """A gate as it was met: the node whose value became `value`, and the last node recorded before it."""

    kind: str
    node: fx.Node
    value: Any
    line: str
    after: fx.Node | None


class Random(Exception):
    """A gate depends on random numbers, which a replay must not draw."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.line = line


def replay_graph(
    graph: fx.Graph, root: torch.nn.Module, taken: Sequence[Taken], traits: dict[fx.Node, Trait]
) -> tuple[fx.GraphModule, tuple[Gate, ...]]:
    """The slice as a module of its own. Placeholders as in `graph`; outputs are the gates' nodes in order."""
    position = {node: k for k, node in enumerate(graph.nodes)}
    last = max(position[gate.after] if gate.after is not None else -1 for gate in taken)
    needed = _slice(graph, [gate.node for gate in taken], traits, position, last)
    last_write: dict[int, int] = {}
    for node in needed:
        for key in traits.get(node, _NONE).writes:
            last_write[key] = max(position[node], last_write.get(key, -1))
    drawn = min((position[n] for n in needed if traits.get(n, _NONE).random), default=len(position))
    for gate in taken:
        if drawn <= position[gate.node]:
            raise Random(gate.line)
    modes = [n for n in graph.nodes if n.op == "call_function" and n.target in ambient.SETTERS and position[n] <= last]
    if any(n.target is not torch._C._set_grad_enabled for n in modes) or any(n.target is torch.autograd.grad for n in needed):
        needed.update(modes)

    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for node in placeholders:
        copies[node] = new.node_copy(node, lambda n: copies[n])
    exposed = [n for n in placeholders if traits.get(n, _NONE).touches & last_write.keys()]
    if exposed:
        isolated = new.call_function(isolate, (tuple(copies[n] for n in exposed),))
        for k, node in enumerate(exposed):
            copies[node] = new.call_function(_item, (isolated, k))
    ends: dict[fx.Node | None, list[int]] = {}
    for k, gate in enumerate(taken):
        ends.setdefault(gate.after, []).append(k)
    outputs: list[fx.Node] = [None] * len(taken)  # type: ignore[list-item]

    def close(gates: Sequence[int]) -> None:
        for k in gates:
            node = taken[k].node
            value = copies[node]
            touched = traits.get(node, _NONE).touches
            if taken[k].kind != "shape" and "number" not in node.meta and any(last_write.get(key, -1) > position[node] for key in touched):
                value = new.call_function(torch.clone, (value,))
            outputs[k] = value

    close(ends.get(None, ()))
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and node in needed:
            copies[node] = new.node_copy(node, lambda n: copies[n])
        if node in ends:
            close(ends[node])
    new.output(tuple(outputs))
    gates = tuple(Gate(g.kind, outputs[k].name, g.value, g.line) for k, g in enumerate(taken))
    return sourced(root, new, "Replay"), gates


def _item(values: tuple, k: int) -> Any:
    return values[k]


def _slice(
    graph: fx.Graph, gates: list[fx.Node], traits: dict[fx.Node, Trait], position: dict[fx.Node, int], last: int
) -> set[fx.Node]:
    """Ancestors of the gates, and the writers of every storage that they touch, up to the last gate."""
    writers: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if position[node] <= last:
            for key in traits.get(node, _NONE).writes:
                writers.setdefault(key, []).append(node)
    needed: set[fx.Node] = set()
    pending = list(gates)
    while pending:
        node = pending.pop()
        if node in needed:
            continue
        needed.add(node)
        pending.extend(node.all_input_nodes)
        for key in traits.get(node, _NONE).touches:
            pending.extend(writers.pop(key, ()))
    return needed
