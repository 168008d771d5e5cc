"""tp.graph.gate: keeps a number that was computed from data out of the key (section 3.6)."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def gate(value: T) -> T:
    """The value itself. Declares that it stays a 0-dim tensor of the graph, a run-time value, and no constant.

    Only an explicit `int()`, `float()` or comparison in Python makes it part of the key again.
    """
    return value
