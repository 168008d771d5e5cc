"""A whole training step inside one compiled function: forward, backward, the optimizer, and the loss as a number."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn, optim

import tensorplay as tp
from tensorplay.capture import tracer
from tensorplay.testing import N


def trained(kind, compiled, count=10):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))
    optimizer = kind(model.parameters(), torch.tensor(0.01))
    schedule = optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 8)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    run = tp.compile(step) if compiled else step
    losses = []
    for _ in range(count):
        losses.append(run(torch.randn(5, 6)))
        schedule.step()
    return losses, list(model.parameters()), run


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW, optim.NAdam])
def test_one_version_for_all_steps(kind):
    with warnings.catch_warnings():  # the first step makes state
        warnings.simplefilter("ignore")
        losses, parameters, run = trained(kind, True)
    expected, others, _ = trained(kind, False)
    assert all(type(x) is float for x in losses)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert all(torch.allclose(a, b, 1e-5, 1e-7) for a, b in zip(parameters, others))
    assert N(run) == 1 + (kind is optim.SGD)  # SGD makes no state, so that its first call, without gradients to clear, is one
    assert not any(v.gates for v in run.versions)


def test_capture_starts_again_a_few_times_however_many_parameters_are_written(monkeypatch):
    runs = []
    once = tracer._once
    monkeypatch.setattr(tracer, "_once", lambda *args: runs.append(1) or once(*args))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(optim.AdamW, True, 2)
    assert len(runs) < 12


def test_a_write_that_spoils_a_backward_raises_as_in_eager():
    def f(x, w):
        y = (x * w).sum()
        with torch.no_grad():
            x.add_(1)
        return torch.autograd.grad(y, w)[0]

    w = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        f(torch.ones(3), w)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        tp.compile(f)(torch.ones(3), w)
