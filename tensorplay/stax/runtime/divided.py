"""A program whose last nodes run on torch, because they need data.

In: the program of the graph's first part, and the rest.  Out: a callable as any program.
Always: the rest is counted and named as a fallback, by the part that stands for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..loops.nodes import Extern, Loops
from ..schedule.plan import Memory, Plan

REASON = "has a result that only the data tell; it and what reads it run on torch"


class Divided:
    """parts: those of the first program, and a plan of one call that stands for the rest."""

    def __init__(self, first: Any, rest: fx.GraphModule, stands_for: Any) -> None:
        self.first = first
        self.rest: Callable[..., Any] = rest
        self.parts = (*getattr(first, "parts", (first,)), stands_for)
        self.ops, self.host, self.seconds = first.ops, first.host, first.seconds

    def __call__(self, *inputs: torch.Tensor) -> Any:
        return self.rest(*inputs, *self.first(*inputs))

    def __repr__(self) -> str:
        return f"<Divided: {self.first!r}, then torch>"


def one_call(target: torch._ops.OpOverload, node: str, line: str) -> Plan:
    """A plan that says what runs on torch, where and why."""
    call = Extern((), target, (), (), library=False, reason=REASON, origins=(node,))
    return Plan(Loops((), (call,), (), {}, {node: line}), (call,), Memory())
