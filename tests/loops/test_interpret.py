"""The interpreter is the meaning: it agrees with eager, and transformations do not change what it computes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tensorplay.stax import expr as ex
from tensorplay.stax.expr import const, load, make, rewrite, substitute, var
from tensorplay.stax.loops.interpret import interpret
from tensorplay.stax.loops.nodes import Compute, Extern, Loops, Pointwise, Reduction, Ref, Scan, row_major
from tensorplay.stax.loops.text import read, show

from .programs import B1, F32, F64, I64, SPECIAL, Programs, buffer, kind, tensor, whole
from .test_text import example

I0, I1 = var("i0", 4), var("i1", 6)


def equal_bits(a, b):
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a.isnan(), b.isnan()) and torch.equal(
        torch.where(a.isnan(), torch.zeros_like(a), a), torch.where(b.isnan(), torch.zeros_like(b), b)
    ) and torch.equal(torch.signbit(a) & ~a.isnan(), torch.signbit(b) & ~b.isnan())  # fmt: skip


def inputs_of(loops):
    return [tensor(b, k) for k, b in enumerate(loops.inputs)]


def test_example_equals_eager():
    x, w = torch.randn(64, 128), torch.randn(64, 128)
    (out,) = interpret(example(), [x, w])
    torch.testing.assert_close(out, ((x + w).relu() * 2).sum(1))
    x[3, 5] = math.nan
    (out,) = interpret(example(), [x, w])
    assert out.isnan().nonzero().tolist() == [[3]]


def inlined(loops: Loops) -> Loops:
    """Every load of a pointwise buffer replaced by the body that made it (the substitution lemma)."""
    made, nodes = {}, []
    for node in loops.nodes:
        if isinstance(node, Compute):

            def change(n, made=made):
                if n.op == "load" and n.name in made:
                    point = made[n.name](n.args[1])
                    return None if point is None else point
                return None

            body = rewrite(node.loop.body, change)
            node = replace(node, loop=replace(node.loop, body=body))
            if isinstance(node.loop, Pointwise):
                made[node.name] = lambda at, node=node: (
                    ex.cast(node.loop.body, node.outputs[0].dtype) if at is node.at[0] else moved(node, at)
                )
        nodes.append(node)
    return replace(loops, nodes=tuple(nodes))


def moved(node: Compute, at):
    """The body at the point stored at offset `at`, for row-major buffers."""
    b = node.outputs[0]
    if b.stride != row_major(b.size) or at.low < 0 or at.high >= b.span:
        return None
    point = [ex.mod(ex.floordiv(at, s), n) for n, s in zip(b.size, b.stride, strict=True)]
    return ex.cast(substitute(node.loop.body, dict(zip(node.vars, point, strict=True))), b.dtype)


def without_unread(loops: Loops) -> Loops:
    needed = {o.buffer for o in loops.outputs if isinstance(o, Ref)}
    nodes = []
    for node in reversed(loops.nodes):
        if needed & set(node.writes):
            nodes.append(node)
            needed |= set(node.reads)
    return replace(loops, nodes=tuple(reversed(nodes)))


def realized(loops: Loops) -> Loops:
    """Every shared value operand of a pointwise body stored in a buffer of its own."""
    nodes = []
    for node in loops.nodes:
        if isinstance(node, Compute) and isinstance(node.loop, Pointwise) and not has_masked(node.loop.body):
            operands = [c for c in node.loop.body.children if not c.is_index and c.op != "const"]
            if operands and operands[0].dtype in (F32, F64, I64, B1):
                new = buffer(f"{node.name}_part", operands[0].dtype, tuple(v.args[1] for v in node.vars))
                at = new.at(node.vars)
                nodes.append(Compute((new,), (at,), Pointwise(node.vars, operands[0])))
                body = rewrite(node.loop.body, lambda n: None, given={operands[0]: load(new.name, at, new.dtype)})
                node = replace(node, loop=replace(node.loop, body=body))
        nodes.append(node)
    return replace(loops, nodes=tuple(nodes))


def has_masked(body):
    return any(n.op in ("masked", "index") for n in ex.postorder(body))


@pytest.mark.parametrize("change", [inlined, without_unread, realized, lambda x: read(show(x), x.constants)])
@pytest.mark.parametrize("block", range(4))
def test_transformations_keep_bits(block, change):
    """A-30: random programs, before and after inlining, elimination, realization and a trip through text."""
    changed = 0
    for seed in range(block * 50, block * 50 + 50):
        loops = Programs(seed).loops()
        after = change(loops)
        changed += after != loops
        inputs = inputs_of(loops)
        for a, b in zip(interpret(loops, inputs), interpret(after, inputs), strict=True):
            assert equal_bits(a, b), f"{seed}\n{show(loops)}\n{show(after)}"
    assert changed or change.__name__ == "<lambda>"


@pytest.mark.parametrize("name", ["sum", "prod", "amax", "amin", "argmax", "argmin", "max_index", "min_index", "welford"])
@pytest.mark.parametrize("dtype", [F32, F64, I64, torch.int8, B1])
def test_reductions_equal_eager(name, dtype):
    if (name in ("sum", "prod", "welford") and dtype == B1) or (name == "welford" and kind(dtype) != "f"):
        return
    x = tensor(buffer("x", dtype, (4, 6)), 3)
    width = 2 if name in ("welford", "max_index", "min_index") else 1
    outs = [buffer(f"o{k}", torch.int64 if "arg" in name or (k and "index" in name) else dtype, (4,)) for k in range(width)]
    body = load("x", ex.add(ex.mul(I0, 6), I1), dtype)
    node = Compute(tuple(outs), (I0,) * width, Reduction(name, (I0,), (I1,), body))
    got = interpret(Loops((buffer("x", dtype, (4, 6)),), (node,), tuple(map(whole, outs))), [x])
    if name == "welford":
        rows = x.double()
        torch.testing.assert_close(got[0], rows.mean(1).to(dtype), equal_nan=True)
        torch.testing.assert_close(got[1], (rows.var(1, correction=0) * 6).to(dtype), equal_nan=True)
    elif name.endswith("_index"):
        want = x.max(1) if "max" in name else x.min(1)
        assert equal_bits(got[0], want.values) and equal_bits(got[1], want.indices)
    elif "arg" in name:
        assert equal_bits(got[0], getattr(x.byte() if dtype == B1 else x, name)(1))
    else:
        torch.testing.assert_close(got[0], getattr(x, name)(1).to(dtype), equal_nan=True)


def test_empty_ranges_give_identities():
    r, i = var("r0", 0), var("i0", 2)
    for dtype, name, want in [(F32, "sum", 0.0), (F32, "prod", 1.0), (F32, "amax", -math.inf), (F32, "amin", math.inf),
                              (I64, "amax", -(2**63)), (B1, "any", False), (B1, "all", True), (F32, "welford", 0.0)]:  # fmt: skip
        outs = tuple(buffer(f"o{k}", dtype, (2,)) for k in range(2 if name == "welford" else 1))
        loop = Reduction(name, (i,), (r,), load("x", r, dtype))
        got = interpret(
            Loops((buffer("x", dtype, (0,)),), (Compute(outs, (i,) * len(outs), loop),), tuple(map(whole, outs))),
            [torch.empty(0, dtype=dtype)],
        )
        assert [g.tolist() for g in got] == [[want, want]] * len(outs)


@pytest.mark.parametrize("name", ["sum", "prod", "logaddexp", "max_index", "min_index"])
def test_scans_equal_eager(name):
    x = torch.randn(4, 6)
    x[1, 2] = math.nan
    outs = (buffer("o", F32, (4, 6)), buffer("p", I64, (4, 6)))[: 2 if "index" in name else 1]
    at = outs[0].at((I0, I1))
    node = Compute(outs, (at,) * len(outs), Scan(name, (I0, I1), 1, load("x", at, F32)))
    got = interpret(Loops((buffer("x", F32, (4, 6)),), (node,), tuple(map(whole, outs))), [x])
    eager = {"sum": torch.cumsum, "prod": torch.cumprod, "logaddexp": torch.logcumsumexp, "max_index": torch.cummax,
             "min_index": torch.cummin}[name](x, 1)  # fmt: skip
    for g, w in zip(got, (eager,) if isinstance(eager, torch.Tensor) else eager, strict=True):
        assert equal_bits(g, w)


def gather(size, cond=None):
    j, x, out = buffer("j", I64, (3,)), buffer("x", F32, (5,)), buffer("o", F32, (3,))
    i = var("i0", 3)
    picked = load("x", ex.index(load("j", i, I64), size), F32)
    body = picked if cond is None else ex.masked(cond(i), picked, const(-1.0, F32))
    return Loops((j, x), (Compute((out,), (i,), Pointwise((i,), body)),), (whole(out),))


def test_an_index_is_checked_exactly_where_it_is_used():
    x = torch.arange(5.0)
    assert interpret(gather(5), [torch.tensor([4, 0, 1]), x])[0].tolist() == [4, 0, 1]
    for bad in (5, -1):
        with pytest.raises(IndexError):
            interpret(gather(5), [torch.tensor([0, bad, 1]), x])
    first = gather(5, lambda i: make("lt", (ex.value(i), const(1, I64)), B1))
    assert interpret(first, [torch.tensor([2, 99, -7]), x])[0].tolist() == [2, -1, -1]
    with pytest.raises(IndexError):
        interpret(first, [torch.tensor([99, 0, 0]), x])


def test_division_by_zero_is_eagers_error_unless_masked():
    i, out = var("i0", 3), buffer("o", I64, (3,))
    a, b = load("a", i, I64), load("b", i, I64)
    ratio = make("div_floor", (a, b), I64)
    nonzero = make("ne", (b, const(0, I64)), B1)
    for body, fails in ((ratio, True), (ex.masked(nonzero, ratio, const(0, I64)), False)):
        loops = Loops((buffer("a", I64, (3,)), buffer("b", I64, (3,))), (Compute((out,), (i,), Pointwise((i,), body)),), (whole(out),))
        args = [torch.tensor([7, 8, -9]), torch.tensor([2, 0, 2])]
        if fails:
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                interpret(loops, args)
        else:
            assert interpret(loops, args)[0].tolist() == [3, 0, -5]


def test_outputs_alias_inputs_and_inputs_are_written_last():
    x = buffer("x", F32, (4, 6))
    at = x.at((I0, I1))
    one = make("add", (load("x", at, F32), const(1.0, F32)), F32)
    bad = Compute((buffer("o", F32, (3,)),), (var("i0", 3),), gather(5).nodes[0].loop)
    back = Compute((x,), (at,), Pointwise((I0, I1), one))
    t = torch.randn(8, 6)[::2].requires_grad_()
    before = t.detach().clone()
    loops = Loops((replace(x, stride=(12, 1)),), (replace(back, outputs=(replace(x, stride=(12, 1)),), at=(ex.add(ex.mul(I0, 12), I1),),
                  loop=Pointwise((I0, I1), make("add", (load("x", ex.add(ex.mul(I0, 12), I1), F32), const(1.0, F32)), F32))),),
                  (Ref("x", (4, 6), (12, 1)), Ref("x", (6,), (1,), 12)))  # fmt: skip
    got = interpret(loops, [t])
    assert got[0] is t and torch.equal(t, before + 1)
    assert got[1].data_ptr() == t[1].data_ptr() and torch.equal(got[1], t[1])
    failing = Loops((x, buffer("j", I64, (3,)), buffer("y", F32, (5,))), (back, replace(bad, loop=Pointwise(
        bad.vars, load("y", ex.index(load("j", bad.vars[0], I64), 5), F32)))), ())  # fmt: skip
    y = torch.zeros(4, 6)
    with pytest.raises(IndexError):
        interpret(failing, [y, torch.tensor([9, 9, 9]), torch.zeros(5)])
    assert torch.equal(y, torch.zeros(4, 6))


def test_library_calls_take_views_and_give_the_declared_layout():
    x = buffer("x", F32, (4, 6))
    out, wide = buffer("o", F32, (6, 6), (1, 6)), buffer("v", F32, (3,))
    call = Extern((out,), torch.ops.aten.mm.default, (Ref("x", (6, 4), (1, 6)), whole(x)))
    both = Extern((wide, None), torch.ops.aten.sort.default, (Ref("x", (3,), (1,), 1),))
    seen = {}
    t = torch.randn(4, 6)
    got = interpret(Loops((x,), (call, both), (whole(out), whole(wide))), [t], lambda n, v: seen.setdefault(n, v.clone()))
    assert torch.equal(got[0], t.t() @ t) and got[0].stride() == (1, 6)
    assert torch.equal(got[1], t[0, 1:4].sort().values) and list(seen) == ["o", "v"]


def test_deep_bodies_and_special_values():
    x = torch.tensor(SPECIAL)
    i, out = var("i0", len(SPECIAL)), buffer("o", F32, (len(SPECIAL),))
    body = load("x", i, F32)
    want = x
    for _ in range(2000):
        body = make("maximum", (make("mul", (body, const(1.0, F32)), F32), const(-1e30, F32)), F32)
        want = torch.maximum(want * 1.0, torch.tensor(-1e30))
    (got,) = interpret(Loops((buffer("x", F32, x.shape),), (Compute((out,), (i,), Pointwise((i,), body)),), (whole(out),)), [x])
    assert equal_bits(got, want)
