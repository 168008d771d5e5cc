"""Random programs called in random order: every call of the compiled function does what eager does.

Programs are sequences of steps with branches on data, shapes, scalars, flags and identity, in-place writes, writes
through views, closures, lifted tensors and module state; arguments are ordinary and special values, strided,
expanded, aliased and overlapping.
"""

import math
import random
import warnings

import pytest
import torch
from torch import nn

import tensorplay as tp
from tensorplay.capture.isolate import isolate
from tensorplay.testing import eq

SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-40, 3e38, math.inf, -math.inf, math.nan, 2.5]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -2.0, 0.5, 3.0]))
        self.p = 2.0
        self.register_buffer("b", torch.ones(4))

    def forward(self, x):
        return x * self.w + self.b if self.training else x * self.p


class World:
    """What a program can see beside its arguments."""

    def __init__(self):
        self.net, self.k, self.items, self.t = Net(), 2.0, [1.0, 2.0], torch.tensor([1.0, 2.0, 3.0, 4.0])

    def change(self, r):
        what = r.randrange(7)
        if what == 0:
            self.k = r.choice([2.0, 3, True, 0.0, -0.0])
        elif what == 1:
            self.items[r.randrange(len(self.items))] = r.choice([1.0, 4.0])
        elif what == 2:
            self.t = r.choice([torch.tensor([2.0, 2.0, 3.0, 4.0]), torch.ones(1), self.net.b])
        elif what == 3:
            self.net.train(r.random() < 0.5)
        elif what == 4:
            self.net.p = r.choice([2.0, 5.0])
        elif what == 5:
            self.t.add_(1)
        elif what == 6:
            with torch.no_grad():
                self.net.w.mul_(-1)


def steps(world):
    def branch(x, y, s):
        return (x + 1, y) if x.sum() > 0 else (x, y - 1)

    def write(x, y, s):
        x.add_(1)
        return x, y

    def write_view(x, y, s):
        x[0] = y[0]
        return x, y

    def write_other(x, y, s):
        y.mul_(2)
        return x + y, y

    def shape(x, y, s):
        return (x * x.shape[0], y) if x.dim() == 1 else (x.sum(0), y)

    def layout(x, y, s):
        return (x * 2, y) if x.is_contiguous() else (x * 3, y)

    def scalar(x, y, s):
        return (x * s, y) if s is not None else (x, y)

    def same(x, y, s):
        return (x - y, y) if x is y else (x + y, y)

    def item(x, y, s):
        v = x.flatten()[0].item()
        return (x + 1, y) if v != v else (x, y + min(v, 3.0))

    def count(x, y, s):
        return x * int((y > 0).sum()), y

    def closure(x, y, s):
        return x * world.k + sum(world.items), y

    def lifted(x, y, s):
        return x + world.t, y

    def module(x, y, s):
        return world.net(x), y

    def swap(x, y, s):
        return y, x

    def dtype(x, y, s):
        return (x.float(), y) if x.dtype == torch.float64 else (x, y)

    def grad(x, y, s):
        return (x * 1.5, y) if torch.is_grad_enabled() else (x, y)

    return [v for k, v in locals().items() if k != "world"]


def values(r, n):
    return torch.tensor([r.choice(SPECIAL) if r.random() < 0.3 else r.uniform(-3, 3) for _ in range(n)])


def tensor(r):
    kind = r.randrange(7)
    if kind == 0:
        return values(r, 8)[::2]
    if kind == 1:
        return values(r, 16).view(4, 4).t()
    if kind == 2:
        return values(r, 4).double()
    if kind == 3:
        return values(r, 16).view(4, 4)
    return values(r, 4)


def arguments(r):
    x, kind = tensor(r), r.randrange(6)
    y = x if kind == 0 else x[:] if kind == 1 else x.detach() if kind == 2 else tensor(r)
    if kind == 3:
        base = values(r, 6)
        x, y = base[:4], base[2:]
    return [x, y], r.choice([None, 2, 2.0, True, 0.0, -0.0, math.nan])


def outcome(f, tensors, s):
    try:
        return f(*tensors, s)
    except RuntimeError as error:
        return type(error)


def programs(seed, count, calls, **options):
    r = random.Random(seed)
    for _ in range(count):
        world = World()
        kinds = [r.random() for _ in range(3)]
        chosen = r.sample(steps(world), r.randrange(1, 5))

        def f(x, y, s, chosen=tuple(chosen)):
            for step in chosen:
                x, y = step(x, y, s)
            return x, y

        cf = tp.compile(f, recompile_limit=40, **options)
        for _ in range(calls):
            if r.random() < 0.2:
                world.change(r)
            tensors, s = arguments(random.Random(r.choice(kinds)))  # few kinds of calls, so that many of them hit
            if r.random() < 0.3:
                tensors[0].neg_()
            mine, theirs = tensors, twins(tensors)
            seen = (world.t, world.net.w.data, world.net.b)
            with torch.set_grad_enabled(r.random() < 0.3):
                before = [t.clone() for t in seen]
                expected = outcome(f, theirs, s)
                after = [t.clone() for t in seen]
                for t, old in zip(seen, before):
                    t.copy_(old)
                got = outcome(cf, mine, s)
            names = [step.__name__ for step in chosen]
            same = got is expected if isinstance(expected, type) or isinstance(got, type) else eq(got, expected)
            assert same, (names, tensors, s, got, expected)
            assert eq(mine, theirs) and eq(seen, tuple(after)), (names, mine, theirs)
            if not isinstance(got, type):
                assert [a.requires_grad for a in got] == [a.requires_grad for a in expected], names
                assert [a.stride() for a in got] == [a.stride() for a in expected], names
        yield cf


def twins(tensors):
    """Copies that share memory, and are one object, where the originals are."""
    if tensors[0] is tensors[1]:
        return list(isolate(tensors[:1])) * 2
    return list(isolate(tensors))


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_at_graph_level(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tp.FallbackWarning)
        counts = [cf.counters for cf in programs(seed, 25, 12, backend="eager")]
    assert sum(c["hits"] for c in counts) > 40 and sum(c["compilations"] for c in counts) > 100


def test_random_programs_at_operator_level():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tp.FallbackWarning)
        assert sum(cf.compilations for cf in programs(100, 12, 10, backend="aot_eager")) > 40
