"""The host code and the memory plan of whole models, their kernels interpreted: the captured graph's own results."""

import copy

import pytest
import torch
from torch import nn

from tensorplay.capture.tracer import capture
from tensorplay.stax.codegen.detect import detect
from tensorplay.stax.joint.retrace import retrace
from tensorplay.stax.loops.lower import lower
from tensorplay.stax.runtime.program import Program
from tensorplay.stax.schedule.schedule import schedule

from .interpreted import interpreted


def program(fn, *args, **kwargs):
    captured = capture(fn, args, kwargs)
    ops = retrace(captured.graph, captured.samples)
    plan = schedule(lower(ops), detect())
    return captured, Program(captured.graph, ops, plan.loops, plan, *interpreted(plan))


def check(fn, *args, **kwargs):
    with torch.no_grad():
        captured, p = program(fn, *args, **kwargs)
        for _ in range(2):  # the second call finds a used arena
            mine, theirs = copy.deepcopy(captured.samples), copy.deepcopy(captured.samples)
            torch.testing.assert_close(p(*mine), captured.graph(*theirs), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    return p


class Block(nn.Module):
    def __init__(self, width=32, heads=2):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.first(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class Running(nn.Module):
    """Writes a buffer and an argument."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x, counts):
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        counts += 1
        return (x - self.mean).softmax(-1), counts


def test_transformer_block():
    p = check(Block(), torch.randn(2, 16, 32))
    assert p.plan.memory.arena_bytes and len(p.plan.externs) == 5


def test_convolutions():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    check(model.eval(), torch.randn(2, 3, 12, 12))
    check(model.eval(), torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last))


def test_written_inputs():
    check(Running(), torch.randn(4, 8), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_views_of_arguments(dtype):
    x = torch.randint(0, 3, (4, 6)).to(dtype)
    check(lambda x: (x.t(), x[1:, ::2], x, (x == x).any(0), x.reshape(2, 12)), x)
    check(lambda x: (x.t(), x[1:, ::2], x, (x == x).any(0)), x.t())


def test_empty_and_scalar():
    check(lambda x: (x * 2 + 1, x.sum()), torch.empty(0, 3))
    check(lambda x: (x * 2 + 1, x.sum()), torch.tensor(3.0))


def test_sort_and_gather():
    def fn(x):
        values, order = x.sort(-1)
        return x.gather(-1, order) - values, order, torch.topk(x, 2).indices

    check(fn, torch.randn(5, 7))


def test_results_are_the_same_objects_and_views_as_in_eager():
    def fn(x):
        y = x * 2
        views = x.detach(), x.data, x.view_as(x), x[:], x[...], x.expand(4, 8), x.reshape(4, 8), x.t().detach(), x.T.T
        return x, x.contiguous(), *views, y, y.view(4, 8), y.t(), y, *x.sort(-1), x.chunk(2)

    def flat(outputs, inputs):
        found = [t for t in outputs if isinstance(t, torch.Tensor)]
        same = [[a is b for b in (*inputs, *found)] for a in found]
        memory = [[a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for b in found] for a in found]
        return same, memory, [t._base is None for t in found], [t.stride() for t in found]

    with torch.no_grad():
        captured, p = program(fn, torch.randn(4, 8))
        inputs = captured.samples
        assert flat(p(*inputs), inputs) == flat(captured.graph(*inputs), inputs)
