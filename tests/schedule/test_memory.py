"""Lifetimes, reuse and the order of steps (rows 7.07 to 7.09, 4.32)."""

from __future__ import annotations

from tensorplay.stax.expr import integer
from tensorplay.stax.schedule.peak import peak
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


LARGE = 256 * 256 * 4  # bytes of a matrix


def negated(b, x):
    return b.pointwise(x.size, lambda i, j: op("neg", at(x, i, j)))


def test_the_arena_is_free_before_the_highest_step():
    """Intermediates first, then results: both at once would be six matrices."""
    b = Builder()
    x = b.input(256, 256)
    y = x
    for _ in range(6):
        y = b.mm(y, x)
    out = b.reduction("sum", (256,), (256,), lambda i, r: at(y, i, r))
    v = b.input(256, 1)
    results = [b.mm(v, b.pointwise((1, 256), lambda _, j, k=k: op("add", at(out, j), float(k)))) for k in range(4)]
    plan = b.plan(*results, consumed=())
    assert plan.memory.arena_bytes >= 2 * LARGE and peak(plan) <= 4 * LARGE + 8192
    assert peak(b.plan(*results)) >= 4 * LARGE  # what is kept between calls counts to the end, unless it is large


def test_what_is_alive_in_the_highest_step_stands_apart():
    """An arena of the largest of two steps would still be there in the other."""
    b = Builder()
    x, wide = b.input(256, 256), b.input(256, 1024)
    first = [b.mm(x, wide) for _ in range(2)]
    a = b.reduction("sum", (256,), (1024,), lambda i, r: op("mul", at(first[0], i, r), at(first[1], i, r)))
    scaled = b.pointwise((256, 256), lambda i, j: op("mul", at(a, i), at(x, i, j)))
    early, kept = b.mm(scaled, x), b.mm(scaled, wide)
    outputs = kept, b.mm(early, kept)
    plan, whole = b.plan(*outputs, consumed=()), b.plan(*outputs)
    assert plan.memory.apart and peak(plan) <= 9 * LARGE + 4096
    assert not whole.memory.apart and peak(whole) >= 16 * LARGE


def test_results_take_over_the_memory_of_dying_tensors():
    b = Builder()
    x = b.input(256, 256)
    y = negated(b, b.mm(x, x))
    plan = b.plan(y, consumed=())
    assert plan.memory.over == {"buf1": "buf0"} and plan.memory.arena_bytes == 0 and peak(plan) == LARGE
    b = Builder()
    x = b.input(256, 256)
    a = b.mm(x, x)
    y = b.pointwise((256, 256), lambda i, j: op("maximum", at(a, i, j), at(a, j, i)))
    assert not b.plan(y, consumed=()).memory.over  # another point still reads the old element
    b = Builder()
    x = b.input(256, 256)
    a = b.mm(x, x)
    y, z = negated(b, a), b.mm(a, x)
    assert "buf0" not in b.plan(y, z, consumed=()).memory.over.values()  # the product reads it
