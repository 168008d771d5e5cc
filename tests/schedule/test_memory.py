"""Lifetimes, reuse and the order of steps (rows 7.07 to 7.09, 4.32)."""

from __future__ import annotations

from tensorplay.stax.expr import integer
from tensorplay.stax.schedule.schedule import schedule

from .build import TARGET, Builder, at, op, samples


def test_7_08_one_allocation():
    b = Builder()
    x = b.input(64)
    y = b.pointwise((64,), lambda i: op("mul", at(x, i), 2.0))
    z = b.pointwise((64,), lambda i: op("add", at(y, i), 1.0))
    plan = b.plan(z)
    assert plan.memory.fresh == ("buf1",) and plan.memory.arena == {} and plan.memory.owned == ()


def test_4_32_a_kernel_writes_over_its_dying_operand():
    b = Builder()
    x = b.input(32, 32)
    a = b.mm(x, x)
    y = b.pointwise((32, 32), lambda i, j: op("maximum", at(a, i, j), 0.0))
    plan = b.plan(b.mm(y, x))
    assert plan.memory.arena == {"buf0": 0, "buf1": 0} and plan.memory.arena_bytes == 4096
    b = Builder()
    x = b.input(32, 32)
    a = b.mm(x, x)
    y = b.pointwise((32, 32), lambda i, j: op("maximum", at(a, i, j), at(a, j, i)))
    plan = b.plan(b.mm(y, x))
    assert plan.memory.arena_bytes == 8192  # another point still reads the old element


def test_7_09_blocks_are_used_again():
    b = Builder()
    x = b.input(32, 32)
    y = x
    for _ in range(12):
        y = b.mm(y, x)
    plan = b.plan(y)
    assert plan.memory.arena_bytes == 2 * 4096


def test_holes_join_and_the_last_block_grows():
    b = Builder()
    x, w = b.input(16, 16), b.input(16, 64)
    a = b.mm(x, x)
    c = b.mm(a, x)
    d = b.mm(c, w)
    e = b.mm(b.input(64, 16), d)
    plan = b.plan(e)
    assert plan.memory.arena_bytes <= 1024 + 4096 + 1024


def test_7_07_large_temporaries_one_after_another():
    b = Builder()
    x, v = b.input(64, 64), b.input(64, 1)
    large = [b.mm(x, x) for _ in range(6)]  # all made first
    small = [b.mm(t, v) for t in large]
    out = b.pointwise((64,), lambda i: op("add", op("add", *(at(s, i, integer(0)) for s in small[:2])), at(small[5], i, integer(0))))
    rest = [b.pointwise((64,), lambda i, s=s: op("neg", at(s, i, integer(0)))) for s in small[2:5]]
    plan = b.plan(out, *rest)
    assert plan.memory.arena_bytes < 2 * 64 * 64 * 4  # the program's own order needs six
    assert plan.memory.arena_bytes <= 1.05 * (64 * 64 * 4 + 6 * 256)


def test_inputs_survive():
    b = Builder()
    x = b.input(8, 8)
    y = b.pointwise((8, 8), lambda i, j: op("neg", at(x, i, j)))
    loops = b.loops(b.mm(y, x))
    plan = schedule(loops, TARGET)
    assert set(plan.memory.arena) == {"buf0"} and len(samples(loops)) == 1
