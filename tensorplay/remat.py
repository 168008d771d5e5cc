"""Recomputation of chains with few checkpoints: the binomial schedule (section 5, row 5.10).

In: the length of a chain and the number of states that may be kept.  Out: a `Schedule`, its steps in order.
Always: the number of forward steps is the least possible for that many slots (the exact optimum of the recurrence,
which the binomial formula gives in closed form); at most `slots` states are kept at any time, the first one included.

For general graphs the least storage is PSPACE-hard to find; nothing here claims it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

__all__ = ["Schedule", "binomial", "least_forwards", "reverse"]


@dataclass(frozen=True)
class Schedule:
    """steps: ('keep', i) keeps state i; ('forward', i, j) advances from the kept state i to state j without keeping
    what lies between; ('backward', i) takes step i from state i and reverses it; ('drop', i) frees state i."""

    n: int
    slots: int
    steps: tuple[tuple, ...]

    @property
    def forwards(self) -> int:
        """Forward steps that run in all, those inside of backward steps apart."""
        return sum(step[2] - step[1] for step in self.steps if step[0] == "forward")

    @property
    def peak(self) -> int:
        """The most states kept at one time."""
        kept = peak = 0
        for step in self.steps:
            kept += {"keep": 1, "drop": -1}.get(step[0], 0)
            peak = max(peak, kept)
        return peak

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, step)) for step in self.steps)


def binomial(n: int, slots: int) -> Schedule:
    """The schedule with least forward steps that reverses a chain of n steps with `slots` kept states."""
    if n < 1 or slots < 1:
        raise ValueError("a chain has at least one step, and its first state needs a slot")
    steps: list[tuple] = [("keep", 0)]
    pending: list[tuple[int, int, int] | tuple] = [("drop", 0), (0, n, slots)]
    while pending:
        item = pending.pop()
        if isinstance(item[0], str):
            steps.append(item)
            continue
        first, end, free = item
        length = end - first
        if length == 1:
            steps.append(("backward", first))
        elif free == 1:  # nothing more can be kept: every state anew from the first
            for i in range(end - 1, first, -1):
                steps += [("forward", first, i), ("backward", i)]
            steps.append(("backward", first))
        else:
            middle = first + _split(length, free)
            steps += [("forward", first, middle), ("keep", middle)]
            pending += [(first, middle, free), ("drop", middle), (middle, end, free - 1)]
    return Schedule(n, slots, tuple(steps))


def least_forwards(n: int, slots: int) -> int:
    """The optimum in closed form: r n - C(slots + r, slots + 1), r the least number with n <= C(slots + r, slots)."""
    r = 0
    while math.comb(slots + r, slots) < n:
        r += 1
    return r * n - math.comb(slots + r, slots + 1)


def _split(length: int, slots: int) -> int:
    """Where the next state is kept; of equal choices the first."""
    return min(range(1, length), key=lambda m: m + _cost(m, slots) + _cost(length - m, slots - 1))


@cache
def _cost(length: int, slots: int) -> int:
    """Forward steps for a chain whose first state is kept, by the closed form that the recurrence satisfies."""
    if length <= 1:
        return 0
    if slots == 1:
        return length * (length - 1) // 2
    return least_forwards(length, slots)


def reverse(functions: Sequence[Callable[[Tensor], Tensor]], x: Tensor, gradient: Tensor, slots: int) -> Tensor:
    """The gradient of x through the chain f_n(... f_1(x)), given the gradient of its end, with `slots` kept states.

    Gradients of leaves that the functions use accumulate as in an ordinary backward. The functions draw nothing.
    """
    kept: dict[int, Tensor] = {}
    at = x.detach()
    for step in binomial(len(functions), slots).steps:
        match step:
            case ("keep", i):
                kept[i] = at
            case ("drop", i):
                del kept[i]
            case ("forward", i, j):
                at = _advance(functions[i:j], kept[i])
            case ("backward", i):
                gradient = _reverse(functions[i], kept.get(i, at), gradient)
    return gradient


def _advance(functions: Sequence[Callable[[Tensor], Tensor]], state: Tensor) -> Tensor:
    with torch.no_grad():
        for f in functions:
            state = f(state)
    return state


def _reverse(f: Callable[[Tensor], Tensor], state: Tensor, gradient: Tensor) -> Tensor:
    with torch.enable_grad():
        state = state.detach().requires_grad_()
        torch.autograd.backward(f(state), gradient)
    assert state.grad is not None
    return state.grad
