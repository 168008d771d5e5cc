"""Which loops share a kernel (rows 7.01 to 7.05, 7.11)."""

from __future__ import annotations

import torch

from tensorplay.stax.expr import affine, floordiv, index, integer, load, mod
from tensorplay.stax.loops.nodes import Extern, Loops
from tensorplay.stax.schedule.schedule import schedule

from ..work import work
from .build import TARGET, Builder, at, op


def softmax(b: Builder, x, rows: int, columns: int):
    m = b.reduction("amax", (rows,), (columns,), lambda i, r: at(x, i, r))
    s = b.reduction("sum", (rows,), (columns,), lambda i, r: op("exp", op("sub", at(x, i, r), at(m, i))))
    return b.pointwise(
        (rows, columns), lambda i, j: op("div", op("exp", op("sub", at(x, i, j), at(m, i))), at(s, i))
    )


def test_7_01_dead_nodes_make_no_kernel():
    b = Builder()
    x = b.input(8, 16)
    b.pointwise((8, 16), lambda i, j: op("exp", at(x, i, j)))
    y = b.pointwise((8, 16), lambda i, j: op("mul", at(x, i, j), 2.0))
    plan = b.plan(y)
    assert len(plan.kernels) == 1 and len(plan.kernels[0].nodes) == 1
    assert "buf0" not in plan.loops.buffers


def test_1_03_example_1_1_meets_its_lower_bound():
    b = Builder()
    x, w = b.input(64, 128), b.input(64, 128)
    s = b.reduction(
        "sum", (64,), (128,), lambda i, r: op("mul", op("maximum", op("add", at(x, i, r), at(w, i, r)), 0.0), 2.0)
    )
    plan = b.plan(s)
    (k,) = plan.kernels
    assert k.model_bytes == plan.lower_bound == 2 * 64 * 128 * 4 + 64 * 4
    assert k.flops == 4 * 64 * 128
    assert 0.49 < k.flops / k.model_bytes < 0.51


def test_1_04_elements_that_are_not_needed_do_not_count():
    b = Builder()
    x = b.input(1000, 1000)
    y = b.pointwise((1000,), lambda i: op("mul", at(x, integer(0), i), 2.0))
    plan = b.plan(y)
    assert plan.kernels[0].read_bytes == 4000 and plan.lower_bound == 8000


def test_a_31_pointwise_and_reduction_of_one_value():
    b = Builder()
    x = b.input(32, 64)
    a = b.pointwise((32, 64), lambda i, j: op("add", at(x, i, j), 1.0))
    y = b.pointwise((32, 64), lambda i, j: op("mul", at(a, i, j), 2.0))
    s = b.reduction("sum", (32,), (64,), lambda i, r: at(a, i, r))
    plan = b.plan(y, s)
    (k,) = plan.kernels
    assert k.local == {"buf0"} and [v.args[1] for v in k.dims + k.rdims] == [32, 64]
    assert k.model_bytes == plan.lower_bound


def test_7_04_independent_readers_of_one_input():
    b = Builder()
    x = b.input(4, 8, 16)
    s = b.pointwise((4, 8, 16), lambda *i: op("sin", at(x, *i)))
    c = b.pointwise((4, 8, 16), lambda *i: op("cos", at(x, *i)))
    (k,) = b.plan(s, c).kernels
    assert k.read_bytes == 2048 and [v.args[1] for v in k.dims] == [512]  # 6.08: one flat loop


def test_7_05_softmax_is_one_kernel():
    b = Builder()
    x = b.input(64, 128)
    y = softmax(b, x, 64, 128)
    plan = b.plan(y)
    (k,) = plan.kernels
    assert k.local == {"buf0", "buf1"} and k.model_bytes == plan.lower_bound == 2 * 64 * 128 * 4


def test_6_14_long_rows_are_walked_again():
    b = Builder()
    x = b.input(2, 1_000_000)
    y = softmax(b, x, 2, 1_000_000)
    plan = schedule(b.loops(y), TARGET)
    moved = sum(k.model_bytes for k in plan.kernels)
    assert 3.9 * 8e6 < moved < 4.1 * 8e6 and moved > plan.lower_bound
    b = Builder()
    x = b.input(64, 1_000_000)
    plan = schedule(b.loops(softmax(b, x, 64, 1_000_000)), TARGET)
    assert sum(k.read_bytes for k in plan.kernels) >= 3 * 64 * 4e6


def test_layer_norm_with_its_residual_is_one_kernel():
    b = Builder()
    x, res, w = b.input(2, 64, 96), b.input(2, 64, 96), b.input(96)
    h = b.pointwise((2, 64, 96), lambda i, j, k: op("add", at(x, i, j, k), at(res, i, j, k)))
    mean, m2 = b.reduction("welford", (2, 64), (96,), lambda i, j, r: at(h, i, j, r))
    rstd = b.pointwise((2, 64), lambda i, j: op("rsqrt", op("add", op("div", at(m2, i, j), 96.0), 1e-5)))
    y = b.pointwise(
        (128, 96),
        lambda n, k: op(
            "mul",
            op("mul", op("sub", at(h, floordiv(n, 64), mod(n, 64), k), _at_flat(mean, n)), _at_flat(rstd, n)),
            at(w, k),
        ),
    )
    z = b.mm(y, b.input(96, 96))
    plan = b.plan(z, h)
    (k,) = plan.kernels
    assert [v.args[1] for v in k.dims + k.rdims] == [128, 96]
    assert len(plan.steps) == 2 and plan.refused[0].reason == "library call aten.mm.default is a barrier"


def _at_flat(buffer, n):
    return load(buffer.name, n, buffer.dtype)


def test_7_02_a_path_through_a_library_call_is_no_kernel():
    b = Builder()
    x, w = b.input(16, 16), b.input(16, 16)
    a = b.pointwise((16, 16), lambda i, j: op("add", at(x, i, j), 1.0))
    m = b.mm(a, w)
    y = b.pointwise((16, 16), lambda i, j: op("add", at(a, i, j), at(m, i, j)))
    plan = b.plan(y)
    assert [type(s) is Extern for s in plan.steps] == [False, True, False]
    assert any("a path leads through aten.mm" in r.reason for r in plan.refused)
    assert all(r.reason and r.first in ("k0", "buf1", "k1") for r in plan.refused)


def test_7_11_a_transposed_reader_turns_its_producer():
    b = Builder()
    x, z = b.input(48, 32), b.input(32, 48)
    y = b.pointwise((48, 32), lambda i, j: op("exp", at(x, i, j)))
    out = b.pointwise((32, 48), lambda i, j: op("add", at(y, j, i), at(z, i, j)))
    (k,) = b.plan(out).kernels
    assert k.local == {"buf0"}


def test_reshapes_are_refined():
    b = Builder()
    x = b.input(2, 128, 384)
    y = b.pointwise((2, 128, 384), lambda *i: op("exp", at(x, *i)))
    heads = b.pointwise(
        (2, 6, 128, 64), lambda b_, h, s, d: op("mul", _load(y, b_, s, h, d), 2.0)
    )
    flat = b.pointwise((2 * 128 * 384,), lambda n: op("neg", _at_flat(y, n)))
    (k,) = b.plan(heads, flat, y).kernels
    assert [v.args[1] for v in k.dims] in ([2, 128, 6, 64], [2, 6, 128, 64])


def _load(y, b, s, h, d):
    return load(y.name, affine(0, [(b, 128 * 384), (s, 384), (h, 64), (d, 1)]), y.dtype)


def test_reductions_over_other_dimensions_stay_apart():
    b = Builder()
    x = b.input(32, 32)
    r = b.reduction("sum", (32,), (32,), lambda i, r: at(x, i, r))
    c = b.reduction("sum", (32,), (32,), lambda i, r: at(x, r, i))
    plan = b.plan(r, c)
    assert len(plan.kernels) == 2
    assert plan.refused[0].reason == "they reduce over different dimensions" and plan.refused[0].saved_bytes == 4096


def test_column_sum_and_centering():
    b = Builder()
    x = b.input(32, 40)
    s = b.reduction("sum", (40,), (32,), lambda i, r: at(x, r, i))
    y = b.pointwise((32, 40), lambda i, j: op("sub", at(x, i, j), at(s, j)))
    (k,) = b.plan(y).kernels
    assert [v.args[1] for v in k.dims + k.rdims] == [40, 32]


def test_full_sum_and_what_follows():
    b = Builder()
    x = b.input(32, 40)
    s = b.reduction("sum", (), (32, 40), lambda r, q: at(x, r, q))
    m = b.pointwise((), lambda: op("div", at(s), 1280.0))
    (k,) = b.plan(m).kernels
    assert k.dims == () and [v.args[1] for v in k.rdims] == [1280]


def test_argmax_keeps_its_count():
    b = Builder()
    x = b.input(6, 5, 4)
    t = b.reduction("argmax", (4,), (6, 5), lambda i, r, q: at(x, r, q, i))
    u = b.reduction("argmax", (4,), (5, 6), lambda i, q, r: at(x, r, q, i))
    s = b.reduction("sum", (4,), (5, 6), lambda i, q, r: at(x, r, q, i))
    plan = b.plan(t, u, s)
    assert len(plan.kernels) == 2


def test_scan_and_empty_and_single_stand_alone():
    b = Builder()
    x, e, o = b.input(4, 8), b.input(0, 8), b.input(8, 1)
    y = b.pointwise((4, 8), lambda i, j: op("exp", at(x, i, j)))
    s = b.scan("sum", (4, 8), 1, lambda i, j: at(y, i, j))
    z = b.pointwise((0, 8), lambda i, j: op("exp", at(e, i, j)))
    q = b.reduction("sum", (0,), (8,), lambda i, r: at(e, i, r))
    p = b.reduction("sum", (8,), (0,), lambda i, r: at(e, r, i))
    t = b.reduction("sum", (8,), (1,), lambda i, r: at(o, i, r))
    plan = b.plan(s, z, q, p, t)
    assert len(plan.kernels) == 6


def test_write_back_in_place():
    b = Builder()
    p, g = b.input(64), b.input(64)
    m = b.pointwise((64,), lambda i: op("mul", at(g, i), 0.5))
    b.pointwise((64,), lambda i: op("sub", at(p, i), at(m, i)), into=p)
    (k,) = b.plan(m).kernels
    assert k.nodes[-1].writes == ("arg0",) and k.write_bytes == 512 and k.read_bytes == 512


def test_write_back_behind_other_readers():
    b = Builder()
    p = b.input(8, 8)
    q = b.pointwise((8, 8), lambda i, j: op("mul", at(p, j, i), at(p, i, j)))
    b.pointwise((8, 8), lambda i, j: op("add", at(p, i, j), 1.0), into=p)
    plan = b.plan(q)
    assert [k.nodes[0].name for k in plan.kernels] == ["buf0", "arg0"]
    b = Builder()
    p = b.input(8, 8)
    b.pointwise((8, 8), lambda i, j: op("mul", at(p, j, i), 0.5), into=p)
    plan = b.plan()
    assert len(plan.kernels) == 2  # through a block of its own


def test_a_failing_check_finds_inputs_untouched():
    b = Builder()
    p, ids, t = b.input(8), b.input(8, dtype=torch.int64), b.input(16)
    b.pointwise((8,), lambda i: op("add", at(p, i), 1.0), into=p)
    y = b.pointwise((8,), lambda i: op("neg", load(t.name, index(at(ids, i), 16), t.dtype)))
    plan = schedule(b.loops(y), TARGET)
    assert [k.nodes[0].name for k in plan.kernels] == ["buf1", "arg0"]
    b = Builder()
    p, ids = b.input(8), b.input(8, dtype=torch.int64)
    b.pointwise((8,), lambda i: load(p.name, index(at(ids, i), 8), p.dtype), into=p)
    assert [k.writes for k in schedule(b.loops(), TARGET).kernels] == [("arg0_new",), ("arg0",)]


def test_refusals_name_every_pair():
    b = Builder()
    x = b.input(16, 16)
    a = b.mm(x, x)
    r = b.pointwise((16, 16), lambda i, j: op("maximum", at(a, i, j), 0.0))
    c = b.mm(r, x)
    plan = b.plan(c)
    reasons = {(r.first, r.second): r.reason for r in plan.refused}
    assert reasons["buf0", "k0"] == reasons["k0", "buf2"] == "library call aten.mm.default is a barrier"
    assert plan.memory.fresh == ("buf2",) and set(plan.memory.arena) == {"buf0", "buf1"}
    assert plan.memory.arena["buf0"] == plan.memory.arena["buf1"]  # in place


def test_chain_of_2000_nodes_is_linear():
    def chain(n: int) -> Loops:
        b = Builder()
        x = b.input(64, 64)
        for k in range(n):
            x = b.pointwise((64, 64), lambda i, j, x=x, k=k: op("add", at(x, i, j), float(k)))
        return b.loops(x)

    few, many = chain(500), chain(2000)
    assert work(schedule, many, TARGET) < 6 * work(schedule, few, TARGET)
    assert len(schedule(many, TARGET).kernels) <= 6
