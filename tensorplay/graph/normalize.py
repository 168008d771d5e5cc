"""Normalization: one spelling for what can be spelled in several ways (section 4.2).

In: a settled graph.  Out: scalar constants of commutative operators stand on the right, identities of table 4.1 are
gone, in-place operators on values that nothing else sees are written without `_`; one note for each change.
Always: values, types, layouts, aliases and gradients as before. Each rewrite happens only where every condition of
its table holds; a node whose sample value is unknown stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ..stax.loops.nodes import Spec
from .choices import Choices
from .edit import replace
from .layout import Unknown, computed
from .memory import Facts, Memory, facts, fresh
from .rules import COMMUTATIVE, EXACT, INPLACE, Identity, identity, subject

Condition = Callable[[fx.Node, fx.Node, Memory, Choices], bool]


def normalize(graph: fx.Graph, choices: Choices) -> list[str]:
    memory = Memory(graph)
    notes: list[str] = []
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in COMMUTATIVE and _constant_left(node):
            node.args = node.args[::-1]
            notes.append(f"{node}: {node.args[1]!r} stands on the right")
        rule = identity(node)
        if rule is not None and allowed(rule, choices) and holds(IDENTITY, node, subject(node), memory, choices):
            x = subject(node)
            notes.append(f"{node} = {rule.left.replace('x', str(x))} is {x}")
            replace(node, x, memory)
        elif writes_in_place(node) and holds(IN_PLACE, node, node.args[0], memory, choices):  # type: ignore[arg-type]
            notes.append(f"{node}: {node.target} is {INPLACE[node.target]}")  # type: ignore[index]
            _out_of_place(node, memory)
    return notes


def writes_in_place(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in INPLACE and isinstance(node.args[0], fx.Node)


def allowed(rule: Identity, choices: Choices) -> bool:
    return rule.exactness == EXACT or not choices.strict


def holds(conditions: dict[str, Condition], node: fx.Node, x: fx.Node, memory: Memory, choices: Choices) -> bool:
    return all(condition(node, x, memory, choices) for condition in conditions.values())


def _constant_left(node: fx.Node) -> bool:
    if len(node.args) != 2 or not isinstance(node.args[0], (bool, int, float, complex)):
        return False
    return isinstance(node.args[1], fx.Node) and isinstance(node.args[1].meta.get("spec"), Spec)


# ---- identities: node == x ------------------------------------------------------------------------------------------


def _sampled(node: fx.Node, x: fx.Node, memory: Memory, choices: Choices) -> bool:
    return isinstance(node.meta.get("spec"), Spec) and isinstance(x.meta.get("spec"), Spec) and not facts(node).effect


def _same_dtype(node: fx.Node, x: fx.Node, memory: Memory, choices: Choices) -> bool:
    a, b = node.meta["spec"], x.meta["spec"]
    return a.dtype == b.dtype and not a.dtype.is_complex  # complex values carry a conjugate bit that no metadata shows


def _same_layout(node: fx.Node, x: fx.Node, memory: Memory, choices: Choices) -> bool:
    a, b = node.meta["spec"], x.meta["spec"]
    return (a.size, a.stride, a.offset, a.device) == (b.size, b.stride, b.offset, b.device)


def _never_written(node: fx.Node, x: fx.Node, memory: Memory, choices: Choices) -> bool:
    """The node's own memory is not written at all, nor is that of x after it was read."""
    first = node if len(node.args) == 2 else node.args[0]
    own = memory.own(node) | (memory.own(first) if first is not node else frozenset())
    return not memory.written(own) and not memory.written(facts(x).lies, memory.position[first])


def _apart(node: fx.Node, x: fx.Node, memory: Memory, choices: Choices) -> bool:
    """An output that was a tensor of its own does not become an input, or a part of another output."""
    if not memory.own(node) & memory.escaping:
        return True
    return not facts(x).lies & (memory.inputs | memory.escaping)


def _on_tape(node: fx.Node, x: fx.Node, memory: Memory, choices: Choices) -> bool:
    """A value made without gradients does not become one with them."""
    return not (choices.training and memory.modes_switched())


IDENTITY: dict[str, Condition] = {
    "sample": _sampled,
    "type": _same_dtype,
    "shape and layout": _same_layout,
    "writes": _never_written,
    "alias": _apart,
    "gradient": _on_tape,
}


# ---- in-place operators: node writes x ------------------------------------------------------------------------------


def _only_user(node: fx.Node, x: fx.Node, memory: Memory, choices: Choices) -> bool:
    return len(x.users) == 1


def _no_input(node: fx.Node, x: fx.Node, memory: Memory, choices: Choices) -> bool:
    return not facts(x).lies & memory.inputs


def _no_view(node: fx.Node, x: fx.Node, memory: Memory, choices: Choices) -> bool:
    """x was made as a tensor of its own, and nothing that looks into its memory is read after the write."""
    if facts(x).lies & memory.taken(x) or facts(node).writes - facts(x).lies:
        return False
    at = memory.position[node]
    others = [h for s in facts(x).lies for h in memory.holders[s] if h is not x and not h._erased]
    return all(memory.position[h] >= at or all(memory.position[u] < at for u in h.users) for h in others)


def _same_result(node: fx.Node, x: fx.Node, memory: Memory, choices: Choices) -> bool:
    """The functional twin gives the same type and layout, where the in-place operator keeps those of x."""
    if any(not isinstance(a.meta.get("spec"), Spec) for a in (node, *node.all_input_nodes)):
        return False
    spec = x.meta["spec"]
    name: Any = INPLACE[node.target]  # type: ignore[index]
    try:
        twin = computed(name, name, node.args, node.kwargs)
    except (RuntimeError, TypeError, Unknown):  # it has no such form, or eager raises here as well
        return False
    return (twin.size, twin.stride, twin.dtype, 0) == (spec.size, spec.stride, spec.dtype, spec.offset)


def _no_tape(node: fx.Node, x: fx.Node, memory: Memory, choices: Choices) -> bool:
    """Where gradients flow, autograd checks what was written."""
    return not choices.training


def _plain_mode(node: fx.Node, x: fx.Node, memory: Memory, choices: Choices) -> bool:
    """Autocast changes the type of a functional operator, not of an in-place one."""
    return not choices.autocast and not memory.mode[node]


IN_PLACE: dict[str, Condition] = {
    "user": _only_user,
    "input": _no_input,
    "view": _no_view,
    "result": _same_result,
    "gradient": _no_tape,
    "mode": _plain_mode,
}


def _out_of_place(node: fx.Node, memory: Memory) -> None:
    """The node computes a new value; what looked into the old memory behind it looks into the new."""
    x: Any = node.args[0]
    old, new = facts(x).lies, fresh().lies
    node.target = INPLACE[node.target]  # type: ignore[index]
    node.meta["facts"] = Facts(new)
    for s in old:
        memory.writers[s] = [p for p in memory.writers.get(s, ()) if p != memory.position[node]]
        memory.holders[s] = [h for h in memory.holders[s] if h is not node]
    for s in new:
        memory.holders[s] = [node]
    memory.rename(old, new, after=memory.position[node])
