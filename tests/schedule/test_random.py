"""Random loops: the plan computes what the loops compute, and keeps what plans promise (A-30 at this level)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tensorplay.stax.expr import add, affine, cast, const, floordiv, in_range, integer, load, masked, mod
from tensorplay.stax.loops.nodes import Buffer
from tensorplay.stax.schedule import schedule
from tensorplay.stax.schedule.plan import Plan

from .build import F32, Builder, at, op

R, C = 6, 8


def read(rng: random.Random, b: Buffer, i, j):
    """A load of `b` at some point that depends on the row i < R and the column j < C."""
    if b.size == (R, C):
        kind = rng.randrange(8)
        flat = affine(0, [(i, C), (j, 1)])
        if kind == 0:  # as (C, R), turned
            return at(b, floordiv(flat, C), mod(flat, C))
        if kind == 1:  # every element, in another order
            turned = affine(0, [(j, R), (i, 1)])
            return at(b, floordiv(turned, C), mod(turned, C))
        if kind == 2:  # a shifted window
            inside = in_range(add(j, -2), 0, C)
            return masked(inside, load(b.name, affine(-2, [(i, b.stride[0]), (j, b.stride[1])]), F32), const(0.0, F32))
        return at(b, i, j)
    if b.size == (R,):
        return at(b, i)
    if b.size == (C,):
        return at(b, j)
    if b.size == (R * C,):
        return at(b, affine(0, [(i, C), (j, 1)]))
    if b.size == (2, 3, 2, 4):
        return at(b, floordiv(i, 3), mod(i, 3), floordiv(j, 4), mod(j, 4))
    return at(b)


def bounded(x):
    return op("clamp_min", op("clamp_max", x, 8.0), -8.0)


def mixed(rng: random.Random, pool: list[Buffer], i, j):
    x = read(rng, rng.choice(pool[-6:]), i, j)
    for _ in range(rng.randrange(3)):
        y = read(rng, rng.choice(pool), i, j)
        x = op(rng.choice(("add", "sub", "maximum", "minimum")), x, y)
    return bounded(x)


def program(seed: int, **how: Any) -> Plan:
    rng = random.Random(seed)
    b = Builder()
    pool = [b.input(R, C), b.input(R, C, stride=(1, R)), b.input(R), b.input(C)]
    inputs = list(pool)
    overwritten: set[str] = set()
    for _ in range(rng.randrange(3, 14)):
        kind = rng.randrange(16)
        readable = [x for x in pool if x.name not in overwritten]
        if kind < 6:
            stride = rng.choice((None, None, (1, R)))
            out = b.pointwise((R, C), lambda i, j, p=readable: mixed(rng, p, i, j), stride=stride)
        elif kind == 6:
            out = b.pointwise(
                (R * C,), lambda n, p=readable: mixed(rng, p, floordiv(n, C), mod(n, C))
            )
        elif kind == 7:
            out = b.pointwise(
                (2, 3, 2, 4),
                lambda *v, p=readable: mixed(rng, p, affine(0, [(v[0], 3), (v[1], 1)]), affine(0, [(v[2], 4), (v[3], 1)])),
            )
        elif kind == 8:
            narrow = [x for x in readable if x.size in ((R,), ())]
            if not narrow:
                continue
            out = b.pointwise((R,), lambda i, p=narrow: mixed(rng, p, i, integer(0)))
        elif kind < 11:
            name = rng.choice(("sum", "amax", "amin"))
            out = b.reduction(name, (R,), (C,), lambda i, r, p=readable: mixed(rng, p, i, r))
        elif kind == 11:
            out = b.reduction("amax", (C,), (R,), lambda j, r, p=readable: mixed(rng, p, r, j))
        elif kind == 12:
            out = b.reduction("amin", (), (R, C), lambda r, q, p=readable: mixed(rng, p, r, q))
        elif kind == 13:
            k = b.reduction("argmax", (R,), (C,), lambda i, r, p=readable: mixed(rng, p, i, r))
            out = b.pointwise((R,), lambda i, k=k: cast(at(k, i), F32))
        elif kind == 14 and rng.randrange(2):
            target = rng.choice(inputs)
            if target.name in overwritten:
                continue
            if target.size == (R, C):
                b.pointwise((R, C), lambda i, j, p=readable: mixed(rng, p, i, j), into=target)
            elif target.size == (R,):
                narrow = [x for x in readable if x.size in ((R,), ())] or [target]
                b.pointwise((R,), lambda i, p=narrow: mixed(rng, p, i, integer(0)), into=target)
            else:
                continue
            overwritten.add(target.name)
            continue
        elif kind == 14:
            out = b.scan("sum", (R, C), rng.randrange(2), lambda i, j, p=readable: mixed(rng, p, i, j))
        else:
            short = next((x for x in readable if x.size == (C,)), None)
            flat = next((x for x in readable if x.size == (R, C) and x.stride == (C, 1)), None)
            if flat is None or short is None:
                continue
            square = b.pointwise((C, C), lambda i, j, s=short: bounded(op("add", at(s, i), at(s, j))))
            out = b.mm(flat, square)
            out = b.pointwise((R, C), lambda i, j, out=out: bounded(at(out, i, j)))
        pool.append(out)
    made = [x for x in pool if x not in inputs]
    outputs = rng.sample(made, min(len(made), rng.randrange(1, 4)))
    return b.plan(*outputs, **how)


@pytest.mark.parametrize("block", range(8))
def test_random_programs(block):
    for seed in range(block * 40, block * 40 + 40):
        program(seed)


@pytest.mark.parametrize("block", range(4))
def test_some_intermediates_stand_apart(block, monkeypatch):
    monkeypatch.setattr(schedule, "parted", lambda planned, consumed: planned(lambda name, last: (last + block) % 4 > 0))
    plans = [program(seed, consumed=()) for seed in range(block * 80, block * 80 + 80)]
    assert sum(len(p.memory.apart) for p in plans) > 30 and any(p.memory.over for p in plans)


def test_enough_is_fused():
    plans = [program(seed) for seed in range(60)]
    nodes = sum(len(k.nodes) for p in plans for k in p.kernels)
    assert nodes > 1.5 * sum(len(p.kernels) for p in plans)


