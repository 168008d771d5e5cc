"""Optimizers compiled as they are: `tp.compile(optimizer.step)` makes the steps that `optimizer.step` makes."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import optim

import tensorplay as tp
from tensorplay.compiled import compiled_of
from tests.training.programs import agree, leaf, mlp, see

STATE = "the first call makes state"


def steps(compiled, make, count=3, rate=None):
    """The parameters after each step, and the optimizer's state after the last."""
    model = mlp()
    optimizer = make(list(model.parameters()))
    step, seen = compiled(optimizer.step), []
    for k in range(count):
        optimizer.zero_grad()
        model(leaf(4, 6, seed=k, grad=False)).pow(2).mean().backward()
        if rate is not None:
            rate(optimizer, k)
        step()
        seen.append(see(list(model.parameters())))
    return seen, [dict(s) for s in optimizer.state.values()]


STATELESS = {
    "sgd": lambda p: optim.SGD(p, 0.1),
    "sgd with decay": lambda p: optim.SGD(p, 0.1, weight_decay=0.01, maximize=True),
    "sgd, foreach": lambda p: optim.SGD(p, 0.1, weight_decay=0.01, maximize=True, foreach=True),
    "adagrad": lambda p: optim.Adagrad(p, 0.01),
}
STATEFUL = {
    "momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "momentum, foreach": lambda p: optim.SGD(p, 0.1, momentum=0.9, maximize=True, foreach=True),
    "adamw": lambda p: optim.AdamW(p, 0.1),
    "adamw, foreach": lambda p: optim.AdamW(p, 0.1, foreach=True),
    "adamw, amsgrad": lambda p: optim.AdamW(p, 0.1, amsgrad=True, maximize=True, weight_decay=0.1),
    "adam, foreach": lambda p: optim.Adam(p, 0.1, foreach=True, weight_decay=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "rmsprop, foreach": lambda p: optim.RMSprop(p, 0.01, momentum=0.5, centered=True, foreach=True),
    "adamax": lambda p: optim.Adamax(p, 0.01),
}


@pytest.mark.parametrize("name", STATELESS)
def test_without_state(name):
    agree(functools.partial(steps, make=STATELESS[name]))


@pytest.mark.parametrize("name", STATEFUL)
def test_state_is_made_by_the_first_step_and_used_by_the_second(name):
    (step,) = agree(functools.partial(steps, make=STATEFUL[name]), falls_back=STATE)
    assert [f.count for f in compiled_of(step).fallbacks if f.count] == [1]  # the first step; the others are compiled


def test_a_first_step_is_refused_in_strict_mode_before_it_does_anything():
    model = mlp()
    optimizer = optim.AdamW(model.parameters(), 0.1)
    model(leaf(4, 6)).sum().backward()
    before = see(list(model.parameters()))
    step = tp.compile(optimizer.step, strict_native=True)
    with pytest.raises(tp.GraphCaptureError, match=STATE):
        step()
    assert not optimizer.state and all(torch.equal(a[-1], b[-1]) for a, b in zip(see(list(model.parameters())), before))
    optimizer.step()
    step()
    assert all(s["step"] == 2 for s in optimizer.state.values()) and tp.testing.N(step) == 1


def test_a_rate_that_a_scheduler_changes_ends_in_one_clear_message():
    def schedule(optimizer, k):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.9**k

    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        (step,) = agree(functools.partial(steps, make=STATELESS["sgd"], count=12, rate=schedule), falls_back="limit")
    assert len(compiled_of(step).versions) == 8
    (reason,) = [f.reason for f in compiled_of(step).fallbacks]
    assert "['lr'] varies" in reason and "0-dim tensor" in reason
