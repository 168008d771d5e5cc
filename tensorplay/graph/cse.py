"""Common subexpressions: value numbering in one scan (section 4.5).

In: a settled graph.  Out: nodes that compute the same value are one node; one note for each that went.
Always: two reads across a write are different values; random operators, writes and unknown calls are never merged;
literals are equal by type and bits; two results that the caller gets, or that are written, stay two tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from torch import fx

from .choices import Choices
from .edit import replace
from .memory import Memory, facts


def cse(graph: fx.Graph, choices: Choices) -> list[str]:
    memory = Memory(graph)
    seen: dict[Any, fx.Node] = {}
    notes = []
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method") or facts(node).effect:
            continue
        found = seen.setdefault(key(node, memory), node)
        if found is not node and all(condition(found, node, memory) for condition in CONDITIONS.values()):
            notes.append(f"{node} is {found}")
            replace(node, found, memory)
    return notes


def key(node: fx.Node, memory: Memory) -> tuple:
    at = memory.position[node]
    epochs = tuple([memory.epoch(a, at) for a in node.all_input_nodes])
    return node.target, literal(node.args), literal(node.kwargs), epochs, node.meta.get("precise"), memory.mode[node]


def literal(value: Any) -> Any:
    """A hashable form of an argument that tells 1, 1.0 and True apart, and 0.0 and -0.0, and knows NaN again."""
    kind = type(value)
    if kind is fx.Node:
        return value
    if kind is float:
        return kind, struct.pack("d", value)
    if kind is complex:
        return kind, struct.pack("dd", value.real, value.imag)
    if kind is slice:
        return kind, literal(value.start), literal(value.stop), literal(value.step)
    if isinstance(value, (tuple, list)):
        return kind, *[literal(v) for v in value]
    if isinstance(value, dict):
        return kind, *[(k, literal(v)) for k, v in value.items()]
    try:
        hash(value)
    except TypeError:
        return kind, id(value)
    return kind, value


def _unwritten(first: fx.Node, second: fx.Node, memory: Memory) -> bool:
    """Nobody writes the memory of either, or changes the shape of a view in place."""
    if memory.written(memory.own(first) | memory.own(second)):
        return False
    return not any(facts(user).writes for user in (*first.users, *second.users))


def _apart(first: fx.Node, second: fx.Node, memory: Memory) -> bool:
    """The caller does not get one tensor where there were two."""
    if first in memory.leaving and second in memory.leaving:
        return False
    return not (memory.own(first) & memory.escaping and memory.own(second) & memory.escaping)


CONDITIONS: dict[str, Callable[[fx.Node, fx.Node, Memory], bool]] = {"writes": _unwritten, "alias": _apart}
