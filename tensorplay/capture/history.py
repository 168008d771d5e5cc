"""The autograd graph: what the traced function may know of it (whether a value has a node, and which values share one), and
a walk over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def node_of(refuse: Callable[[], None]) -> Any:
    """Stands for the node of a traced value: it is compared by identity; any other use of it or of its type is refused."""

    class Closed(type):
        def __getattribute__(cls, name: str) -> Any:
            refuse()

        def __repr__(cls) -> str:
            refuse()
            return ""

    class Node(metaclass=Closed):
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            refuse()

        def __repr__(self) -> str:
            refuse()
            return ""

    return Node()


def nodes_of(root: Tensor, passed: set[Any] | None = None) -> Iterator[Any]:
    """The nodes of a tensor's graph, each before those behind it; those in `passed`, which it fills, are left out."""
    passed = set() if passed is None else passed
    stack = [root.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in passed:
            continue
        passed.add(node)
        yield node
        stack.extend(behind for behind, _ in reversed(node.next_functions))
