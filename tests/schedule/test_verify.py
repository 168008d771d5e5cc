"""Plans of random programs hold their rules and mean what the loops mean; broken plans are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tensorplay.stax.codegen.target import Target
from tensorplay.stax.expr import const, load, make, var
from tensorplay.stax.loops.interpret import interpret, interpret_plan
from tensorplay.stax.loops.nodes import Compute, Extern, Loops, Pointwise
from tensorplay.stax.loops.verify import IRError
from tensorplay.stax.schedule.plan import Memory, Plan
from tensorplay.stax.schedule.schedule import schedule
from tensorplay.stax.schedule.text import show
from tensorplay.stax.schedule.verify import verify_plan
from tests.loops.programs import F32, Programs, buffer, tensor, whole
from tests.loops.test_interpret import equal_bits

CPU = Target()


@pytest.mark.parametrize("block", range(5))
def test_random_plans_hold_their_rules_and_keep_bits(block):
    for seed in range(block * 40, block * 40 + 40):
        loops = Programs(seed).loops(6)
        plan = verify_plan(schedule(loops, CPU))
        inputs = [tensor(b, k) for k, b in enumerate(loops.inputs)]
        for a, b in zip(interpret(loops, inputs), interpret_plan(plan, inputs), strict=True):
            assert equal_bits(a, b), f"{seed}\n{show(plan)}"


def chain() -> Plan:
    """x -> (exp) a -> mm b -> (neg) c -> mm d -> (abs) out: three kernels, two library calls."""
    size = (4, 4)
    i, j = var("i0", 4), var("i1", 4)

    def point(name, source, op):
        b = buffer(name, F32, size)
        at = b.at((i, j))
        return Compute((b,), (at,), Pointwise((i, j), make(op, (load(source, at, F32),), F32)), (op,))

    def mm(name, source):
        ref = whole(buffer(source, F32, size))
        return Extern((buffer(name, F32, size),), torch.ops.aten.mm.default, (ref, ref), origins=(name,))

    nodes = (point("a", "x", "exp"), mm("b", "a"), point("c", "b", "neg"), mm("d", "c"), point("out", "d", "abs"))
    return schedule(Loops((buffer("x", F32, size),), nodes, (whole(buffer("out", F32, size)),)), CPU)


def test_the_text_names_kernels_calls_memory_and_costs():
    text = show(chain())
    for part in ("# 3 kernels, 2 library calls", "b = aten.mm.default(a, a)  # b", "# k0: x0 < 16", "reads 64 B",
                 "# returned: out", "# arena of", "c[x0] = -b[x0]"):  # fmt: skip
        assert part in text, text


def broken(change):
    plan = chain()
    kernels = [s for s in plan.steps if not isinstance(s, Extern)]
    return change(plan, kernels)


def moved(plan, **arena):
    return replace(plan, memory=replace(plan.memory, arena={**plan.memory.arena, **arena}))


BROKEN = {
    "before it is made": lambda p, k: replace(p, steps=p.steps[::-1]),
    "less than the loops": lambda p, k: replace(p, steps=p.steps[:-1]),
    "makes no": lambda p, k: replace(p, steps=(replace(k[0], local=frozenset({"b"})), *p.steps[1:])),
    "reads a before": lambda p, k: replace(p, steps=(replace(k[0], local=frozenset({"a"})), *p.steps[1:])),
    "has 0 places": lambda p, k: replace(p, memory=Memory()),
    "lies in the arena": lambda p, k: replace(p, memory=replace(p.memory, fresh=(), arena={**p.memory.arena, "out": 0})),
    "leaves the arena": lambda p, k: moved(p, **{n: 3 for n in p.memory.arena}),
    "runs over other variables": lambda p, k: replace(p, steps=(replace(k[0], dims=(var("x0", 8), var("x1", 2))), *p.steps[1:])),
    "takes over b": lambda p, k: replace(p, memory=Memory(fresh=("out",), apart=("a", "b", "c", "d"), over={"d": "b"})),
    "the memory of one": lambda p, k: replace(p, memory=Memory(fresh=("out",), apart=("a", "b", "c", "d"), over={"c": "b", "d": "b"})),
    "overlap": lambda p, k: moved(replace(p, memory=replace(p.memory, arena_bytes=4096, owned=())),
                                  **dict.fromkeys(("a", "b", "c", "d"), 0)),
}  # fmt: skip


@pytest.mark.parametrize("message", BROKEN)
def test_broken_plans_are_named(message):
    assert verify_plan(chain())
    with pytest.raises(IRError, match=message):
        verify_plan(broken(BROKEN[message]))


def test_a_value_is_met_where_it_was_stored():
    i = var("x0", 4)
    b, c, x = buffer("b", F32, (4,)), buffer("c", F32, (4,)), buffer("x", F32, (4,))
    first = Compute((b,), (i,), Pointwise((i,), load("x", i, F32)))
    at = const(0.0, F32)
    second = Compute((c,), (i,), Pointwise((i,), make("add", (load("b", var("x1", 1), F32), at), F32)))
    good = replace(second, loop=Pointwise((i,), make("add", (load("b", i, F32), at), F32)))
    plan = schedule(Loops((x,), (first, good), (whole(b), whole(c))), CPU)
    assert len(plan.kernels) == 1 and verify_plan(plan)
    k = plan.kernels[0]
    elsewhere = replace(k.nodes[1], loop=Pointwise(k.dims, load("b", make("mod", (k.dims[0], 2), "index"), F32)))
    with pytest.raises(IRError, match="stored elsewhere"):
        verify_plan(replace(plan, steps=(replace(k, nodes=(k.nodes[0], elsewhere)),)))
