"""`read(show(ir)) == ir`, linear text, and text that a person can read."""

from __future__ import annotations

import ast
import math
from dataclasses import replace

import pytest
import torch

from tensorplay.stax import expr as ex
from tensorplay.stax.expr import const, load, make, var
from tensorplay.stax.loops.nodes import Compute, Extern, Loops, Pointwise, Reduction, Ref, Scan
from tensorplay.stax.loops.text import read, show, show_expr

from .programs import B1, F32, F64, I64, Programs, buffer, whole

I0, I1, R0 = var("i0", 64), var("i1", 128), var("r0", 128)


def example() -> Loops:
    """Example 1.1: row sums of relu(x + w) * 2."""
    x, w, out = buffer("x", F32, (64, 128)), buffer("w", F32, (64, 128)), buffer("buf0", F32, (64,))
    both = make("add", (load("x", x.at((I0, R0)), F32), load("w", w.at((I0, R0)), F32)), F32)
    body = make("mul", (make("maximum", (both, const(0.0, F32)), F32), const(2.0, F32)), F32)
    node = Compute((out,), (I0,), Reduction("sum", (I0,), (R0,), body), ("add", "relu", "mul", "sum"))
    return Loops((x, w), (node,), (whole(out),))


def same(a: Loops, b: Loops) -> bool:
    shapes = [{k: (t.dtype, t.shape, t.stride()) for k, t in x.constants.items()} for x in (a, b)]
    return replace(a, constants={}) == replace(b, constants={}) and shapes[0] == shapes[1]


def test_example_reads_as_python():
    assert show(example()) == (
        "def loops(x: f32[64, 128], w: f32[64, 128]):\n"
        "    buf0: f32[64]\n"
        "    for i0 in grid(64):  # add, relu, mul, sum\n"
        "        for r0 in over(128):\n"
        "            buf0[i0] = sum(maximum(x[128*i0 + r0] + w[128*i0 + r0], 0.0) * 2.0)\n"
        "    return buf0\n"
    )
    assert same(read(show(example())), example())


@pytest.mark.parametrize("block", range(10))
def test_round_trip_of_random_programs(block):
    for seed in range(block * 40, block * 40 + 40):
        loops = Programs(seed).loops()
        text = show(loops)
        ast.parse(text)
        assert same(read(text), loops), text
        assert show(read(text)) == text


def body_of(expr, *variables):
    out = buffer("o", expr.dtype, tuple(v.args[1] for v in variables))
    inputs = (buffer("x", F32, (64, 128)), buffer("y", I64, (128,)), buffer("z", B1, (128,)))
    return Loops(inputs, (Compute((out,), (out.at(variables),), Pointwise(variables, expr)),), (whole(out),))


X, Y, Z = load("x", ex.linear((I0, I1), (128, 1)), F32), load("y", I1, I64), load("z", I1, B1)
CASES = [
    const(math.nan, F32), const(-math.inf, F64), const(-0.0, F32), const(True, B1), const(-5, I64),
    make("neg", (const(5.0, F32),), F32), make("neg", (make("neg", (X,), F32),), F32),
    make("sub", (X, make("sub", (X, const(-1.0, F32)), F32)), F32), make("div", (const(1.0, F32), X), F32),
    make("add", (const(1.0, F32), const(2.0, F32)), F32), make("lshift", (Y, const(3, I64)), I64),
    make("lshift", (const(1, I64), Y), I64), make("lshift", (Y, const(3, torch.int32)), I64),
    make("where", (const(True, B1), X, const(0.0, F32)), F32), make("where", (Z, const(1.0, F32), X), F32),
    make("logical_and", (make("logical_and", (Z, Z), B1), make("logical_or", (Z, make("logical_not", (Z,), B1)), B1)), B1),
    make("eq", (make("lt", (X, const(0.0, F32)), B1), make("lt", (const(0.0, F32), X), B1)), B1),
    make("logical_not", (make("eq", (Z, make("logical_not", (Z,), B1)), B1),), B1),
    make("bitwise_and", (make("bitwise_or", (Y, Y), I64), make("bitwise_not", (Y,), I64)), I64),
    make("remainder", (Y, make("div_floor", (Y, const(2, I64)), I64)), I64),
    ex.cast(ex.value(ex.floordiv(ex.add(ex.mul(I0, 7), I1, 3), 5)), F32), make("value", (ex.integer(3),), I64),
    load("x", ex.add(ex.mul(ex.floordiv(I1, 3), -1), 100), F32), load("x", ex.index(Y, 64), F32),
    load("x", ex.add(ex.mul(ex.index(Y, 64), 128), ex.mod(ex.add(I0, ex.mul(I1, -1), 200), 7)), F32),
    ex.masked(make("lt", (ex.value(I0), const(3, I64)), B1), X, const(-math.inf, F32)),
    ex.masked(const(True, B1), Z, const(False, B1)), ex.cast(ex.cast(X, torch.bfloat16), F32),
]  # fmt: skip


@pytest.mark.parametrize("expr", CASES, ids=lambda e: e.op)
def test_round_trip_of_expressions(expr):
    loops = body_of(expr, I0, I1)
    assert read(show(loops)) == loops, show(loops)
    assert show_expr(expr)


def test_round_trip_of_calls_views_and_devices():
    gpu = torch.device("cuda", 1)
    x = replace(buffer("x", torch.complex64, (2, 3), (1, 2)), device=gpu)
    y, z = buffer("y", F32, ()), buffer("z", F32, (2, 0, 3))
    aten = torch.ops.aten
    args = (Ref("x", (3,), (2,), 4), [Ref("y", (), ()), None], (1, -2.5, math.inf), torch.float16, torch.strided, "a # b",
            torch.contiguous_format, True, 1j, torch.device("cpu"), (1,))  # fmt: skip
    nodes = (
        Extern((y, None, z), aten.native_dropout.default, args, (("p", -1), ("x", whole(z))), False, "no row", True, ("a",)),
        Extern((), aten.mm.default, ()),
        Extern((None,), aten.mm.default, ()),
    )
    loops = Loops((x,), nodes, (None, Ref("x", (2, 3), (3, 1)), 5, -1.5, True), {}, {"a": "m.py:1"})
    assert read(show(loops)) == loops, show(loops)


def test_empty_graph_scans_and_points_without_variables():
    assert read(show(Loops((), (), ()))) == Loops((), (), ())
    out = buffer("o", F32, ())
    point = Compute((out,), (ex.integer(0),), Pointwise((), const(1.0, F32)))
    r = Compute((buffer("p", F32, ()),), (ex.integer(0),), Reduction("sum", (), (), load("o", ex.integer(0), F32)))
    x = buffer("x", F32, (64, 128))
    s = Compute((buffer("q", F32, (64, 128)),), (x.at((I0, I1)),), Scan("sum", (I0, I1), 1, X))
    loops = Loops((x,), (point, r, s), (whole(out),))
    assert read(show(loops)) == loops, show(loops)


def test_text_is_linear_and_names_what_is_shared():
    x = X
    for _ in range(2000):
        x = make("add", (x, x), F32)
    loops = body_of(x, I0, I1)
    text = show(loops)
    assert len(text) < 100 * 2000
    assert read(text) == loops
    y = X
    for _ in range(2000):
        y = make("exp", (make("add", (y, const(1.0, F32)), F32),), F32)
    assert read(show(body_of(y, I0, I1))) == body_of(y, I0, I1)
    shared = make("mul", (X, X), F32)
    assert show_expr(make("add", (shared, X), F32)) == "t0 = x[128*i0 + i1]; t0 * t0 + t0"


def test_other_text_is_refused():
    for text in ("x = 1", "def loops(x: f32[3]):\n    while x: pass\n", "def loops():\n    return opaque('a')\n"):
        with pytest.raises(SyntaxError):
            read(text)
