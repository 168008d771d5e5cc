"""Random numbers that nothing uses are drawn all the same: what comes after them depends on it."""

import pytest
import torch
import torch.nn.functional as F

import tensorplay as tp


def unused(x):
    torch.rand_like(x)
    return x * 2


def unused_dropout(x):
    y = x.abs()
    F.dropout(x, 0.5)
    return y


def unused_between_used(x):
    y = F.dropout(x, 0.5)
    torch.rand(3)
    return y, torch.rand(3)


@pytest.mark.parametrize("f", [unused, unused_dropout, unused_between_used])
@pytest.mark.parametrize("grad", [False, True])
def test_unused_draws(f, grad):
    compiled, found = tp.compile(f, strict_native=True), []
    for g in (f, compiled):
        torch.manual_seed(3)
        x = torch.ones(8, requires_grad=grad)
        y = g(x)
        first = y[0] if isinstance(y, tuple) else y
        if grad:
            first.sum().backward()
        found.append((y, x.grad, torch.get_rng_state()))
    assert tp.testing.eq(found[0][0], found[1][0])
    assert torch.equal(found[0][2], found[1][2])
    assert not grad or torch.equal(found[0][1], found[1][1])
