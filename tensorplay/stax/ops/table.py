"""The table of operators: every row of this folder, and the base B of definition 4.2."""

from __future__ import annotations

import torch

from . import backward, creation, indexing, library, norms, pointwise, reductions, views  # noqa: F401  (they declare the rows)
from .row import ROWS, Library, Refuse, Row, find

__all__ = ["ROWS", "Library", "Refuse", "Row", "find", "has_row"]


def has_row(overload: torch._ops.OpOverload) -> bool:
    """Whether the operator belongs to the base B: it has a lowering of its own or is a library call."""
    return find(overload) is not None
