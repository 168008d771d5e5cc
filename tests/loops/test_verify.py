"""The verifier accepts what the suite produces and names what is broken."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tensorplay.stax import expr as ex
from tensorplay.stax.expr import INDEX, const, load, make, var
from tensorplay.stax.loops.nodes import Compute, Extern, Loops, Pointwise, Reduction, Ref
from tensorplay.stax.loops.verify import IRError, verify

from ..work import work
from .programs import F32, I64, Programs, buffer, whole
from .test_text import example

I0, I1 = var("i0", 4), var("i1", 6)
X, Y = buffer("x", F32, (4, 6)), buffer("y", I64, (4,))
LOAD, INT = load("x", X.at((I0, I1)), F32), load("y", I0, I64)


def loops(body, at=None, out=None, variables=(I0, I1), before=(), after=(), outputs=None):
    out = out or buffer("o", body.dtype, tuple(v.args[1] for v in variables))
    node = Compute((out,), (at if at is not None else out.at(variables),), Pointwise(variables, body))
    return Loops((X, Y), (*before, node, *after), (whole(out),) if outputs is None else outputs)


def test_random_programs_and_the_example_pass():
    assert verify(example()).nodes
    for seed in range(200):
        program = Programs(seed).loops()
        assert verify(program) is program


COPY = Compute((buffer("o", F32, (4, 6)),), (X.at((I0, I1)),), Pointwise((I0, I1), LOAD))
BACK = Compute((X,), (X.at((I0, I1)),), Pointwise((I0, I1), make("neg", (LOAD,), F32)))
BROKEN = {
    "defined twice": loops(LOAD, before=(COPY,)),
    "before it is defined": loops(load("o", ex.integer(0), F32)),
    "holds torch.float32": loops(load("x", I0, torch.float64)),
    "free in i1": loops(LOAD, variables=(I0,)),
    "free in i2": loops(LOAD, at=var("i2", 24)),
    r"reads \[0, 24\] of 24": loops(load("x", ex.add(ex.mul(I0, 6), I1, var("i2", 2)), F32),
                                    variables=(I0, I1, var("i2", 2))),
    "each element once": loops(LOAD, at=I1),
    "do not fill": loops(LOAD, out=buffer("o", F32, (4, 5)), at=X.at((I0, I1))),
    "operands of": loops(make("add", (LOAD, INT), F32)),
    "gives torch.bool": loops(make("lt", (LOAD, LOAD), F32)),
    "operands, not": loops(make("add", (LOAD,), F32)),
    "no operator": loops(make("frobnicate", (LOAD,), F32)),
    "float16": loops(make("exp", (ex.cast(LOAD, torch.float16),), torch.float16)),
    "condition": loops(make("where", (INT, LOAD, LOAD), F32)),
    "other dtypes": loops(make("masked", (LOAD, LOAD, LOAD), F32)),
    "literal": loops(make("add", (make("const", (1,), F32), LOAD), F32)),
    "not an integer value": loops(load("x", make("index", (LOAD, 24), INDEX), F32)),
    "is an index": loops(I0),
    "after it was written back": loops(LOAD, before=(BACK,)),
    "written back twice": loops(LOAD, after=(BACK, replace(BACK, loop=Pointwise((I0, I1), const(0.0, F32))))),
    "another layout": loops(LOAD, after=(replace(BACK, outputs=(buffer("x", F32, (4, 6), (1, 4)),)),)),
    "leaves its buffer": loops(LOAD, outputs=(Ref("x", (4,), (6,), 6),)),
    "is not defined": loops(LOAD, outputs=(Ref("z", (4,), (6,), 6),)),
    "no identifier": loops(LOAD, out=buffer("a-b", F32, (4, 6))),
    "welford of": Loops((Y,), (Compute((buffer("m", I64, ()), buffer("v", I64, ())), (ex.integer(0),) * 2,
                                       Reduction("welford", (), (I0,), INT)),), ()),
    "no reduction": Loops((X, Y), (Compute((buffer("m", I64, ()),), (ex.integer(0),), Reduction("mean", (), (I0,), INT)),), ()),
    "share a name": Loops((X, X), (), ()),
    "is read before": Loops((), (Extern((X,), torch.ops.aten.neg.default, (whole(Y),)),), ()),
}  # fmt: skip


@pytest.mark.parametrize("message", BROKEN)
def test_broken_loops_are_named(message):
    with pytest.raises(IRError, match=message):
        verify(BROKEN[message])


def test_ranges_are_decided_exactly_where_they_matter():
    # the range of i0 - i0//2*2 alone is wider than its values
    odd = ex.affine(0, [(I0, 1), (ex.floordiv(I0, 2), -2)])
    assert verify(loops(load("x", ex.add(odd, 22), F32)))
    guarded = ex.masked(ex.in_range(ex.add(I0, -1), 0, 4), load("x", ex.add(I0, -1), F32), const(0.0, F32))
    assert verify(loops(guarded))
    tiled = ex.add(ex.mul(ex.mod(ex.add(ex.mul(I0, 6), I1), 3), 8), ex.floordiv(ex.add(ex.mul(I0, 6), I1), 3))
    assert verify(loops(LOAD, at=tiled))
    empty = buffer("e", F32, (0, 6))
    at = ex.add(ex.mul(ex.index(INT, 0), 6), I1)
    node = Compute((buffer("o", F32, (4, 6)),), (X.at((I0, I1)),), Pointwise((I0, I1), load("e", at, F32)))
    assert verify(Loops((Y, empty), (node,), ()))


def test_verifying_is_linear():
    def chain(n):
        body = LOAD
        for _ in range(n):
            body = make("add", (make("exp", (body,), F32), LOAD), F32)
        return loops(body)

    assert work(verify, chain(4000)) < 5 * work(verify, chain(1000))
