"""Binomial checkpointing of chains: exact optimum, states kept, equal gradients."""

from functools import cache

import pytest
import torch
from torch import nn

from tensorplay.remat import binomial, least_forwards, reverse


@cache
def optimum(n: int, slots: int) -> int:
    """The recurrence itself."""
    if n <= 1:
        return 0
    if slots == 1:
        return n * (n - 1) // 2
    return min(m + optimum(m, slots) + optimum(n - m, slots - 1) for m in range(1, n))


def replay(schedule) -> tuple[list[int], int]:
    """The order in which steps are reversed and the most states kept; states are only used where they are."""
    kept: set[int] = set()
    reversed_, at, peak = [], 0, 0
    for step in schedule.steps:
        match step:
            case ("keep", i):
                assert at == i
                kept.add(i)
                peak = max(peak, len(kept))
            case ("drop", i):
                kept.remove(i)
            case ("forward", i, j):
                assert i in kept and j > i
                at = j
            case ("backward", i):
                assert i in kept or at == i
                reversed_.append(i)
    assert not kept
    return reversed_, peak


def test_schedules_are_optimal():
    for n in range(1, 41):
        for slots in range(1, 9):
            schedule = binomial(n, slots)
            order, peak = replay(schedule)
            assert order == list(reversed(range(n))) and peak == schedule.peak <= slots
            assert schedule.forwards == optimum(n, slots) == least_forwards(n, slots)


def test_a_hundred_steps_with_seven_slots():
    schedule = binomial(100, 7)
    assert schedule.forwards == least_forwards(100, 7) == optimum(100, 7) and schedule.peak <= 7
    assert binomial(1000, 10).forwards == least_forwards(1000, 10)
    with pytest.raises(ValueError, match="slot"):
        binomial(3, 0)


def test_gradients_are_equal():
    torch.manual_seed(0)
    chain = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(13)]
    x, g = torch.randn(2, 6, requires_grad=True), torch.randn(2, 6)
    y = x
    for f in chain:
        y = f(y)
    y.backward(g)
    want = [x.grad, *(p.grad.clone() for f in chain for p in f.parameters())]
    for f in chain:
        f.zero_grad()
    got = reverse(chain, x, g, slots=3)
    assert all(torch.equal(a, b) for a, b in zip([got, *(p.grad for f in chain for p in f.parameters())], want, strict=True))
