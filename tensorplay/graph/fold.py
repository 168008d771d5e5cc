"""Constant folding of Python scalars (section 4.3).

In: a graph.  Out: arithmetic, comparison and indexing of literals is replaced by its value; one note for each.
Always: tensors are never folded, since the result would be stored in the program; what raises is left to raise.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from .choices import Choices

FOLDED = frozenset((
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
    operator.neg, operator.pos, operator.abs, operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
    operator.getitem,
))  # fmt: skip
_SCALARS = (bool, int, float, complex)
_BITS = 64  # larger integers stay, so that a fold never takes long


def fold(graph: fx.Graph, choices: Choices) -> list[str]:
    notes = []
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in FOLDED or node.kwargs or not all(map(_constant, node.args)):
            continue
        try:
            value = node.target(*node.args)  # type: ignore[operator]
        except (ArithmeticError, TypeError, ValueError, LookupError):
            continue
        if type(value) not in _SCALARS:
            continue
        notes.append(f"{node} is {value!r}")
        _put(value, node)
        graph.erase_node(node)
    return notes


def _put(value: Any, node: fx.Node) -> None:
    """Every user of the node has the value as a literal."""
    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda n: value if n is node else n)


def _constant(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(type(v) in _SCALARS for v in value)
    return type(value) in _SCALARS and not (type(value) is int and value.bit_length() > _BITS)
