"""The row: what one operator means to lowering.

In: declarations from the modules of this folder, made once at import.  Out: `find(overload)`.
Always: an operator has at most one row. A row is declared for an overload, or for all overloads of a name that
neither mutate nor write to `out=`. A row that leaves particular arguments to torch's kernel raises `Library`; one that
cannot take them raises `Refuse`, and the operator becomes a fallback call there. Both say why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Operator = torch._ops.OpOverload | torch._ops.OpOverloadPacket


class Refuse(Exception):
    """A row cannot take these arguments; says why."""


class Library(Refuse):
    """torch's own kernel is the code for these arguments: a library call, as of a library row."""


@dataclass(frozen=True, slots=True)
class Row:
    """One operator: its kind, the function that lowers it, and how often it reads its first operand.

    kind: pointwise, view, index, creation, reduction, scan, norm (rows of loop IR) or library (a call of torch).
    lower: (realizer, *args, **kwargs) with the arguments of the operator's schema, tensors as `Lowered`.
    """

    kind: str
    lower: Callable[..., Any] | None
    reads: int = 1
    ordered: bool = False


ROWS: dict[Operator, Row] = {}


def declare(kind: str, *operators: Operator, reads: int = 1) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares the decorated function as the row of each operator."""

    def put(lower: Callable[..., Any]) -> Callable[..., Any]:
        row = Row(kind, lower, reads)
        for operator in operators:
            ROWS[operator] = row
        return lower

    return put


def find(overload: torch._ops.OpOverload) -> Row | None:
    """The row of an overload, or None."""
    row = ROWS.get(overload)
    if row is None:
        row = ROWS.get(overload.overloadpacket)
        if row is None or overload._schema.is_mutable:
            return None
    return row
