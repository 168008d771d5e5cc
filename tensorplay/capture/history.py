"""What the traced function may know of the autograd graph: whether a value has a node in it, and which values share one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
