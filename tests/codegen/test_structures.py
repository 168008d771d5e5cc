"""Loop structures against the interpreter and eager: points, rows, columns, split reductions, scans; sizes, layouts,
threads and tiers."""

from __future__ import annotations

import functools
import math
import random
from itertools import pairwise

import pytest
import torch

from tensorplay.errors import UnsupportedError
from tensorplay.stax.codegen.cpp.body import Body
from tensorplay.stax.codegen.cpp.emit import emit
from tensorplay.stax.codegen.cpp.nest import function_of
from tensorplay.stax.codegen.cpp.pieces import pieces
from tensorplay.stax.codegen.detect import detect, tiers
from tensorplay.stax.expr import (
    Expr,
    add,
    affine,
    cast,
    const,
    floordiv,
    in_range,
    index,
    load,
    make,
    masked,
    mod,
    mul,
    value,
    var,
)
from tensorplay.stax.loops.interpret import interpret_plan
from tensorplay.stax.loops.nodes import Compute, Pointwise
from tensorplay.stax.loops.stretches import between, cuts

from .harness import Failed, at, buffer, dense, kernel, plan_of, pointwise, reduction, run, scan, space

F = torch.float32
BIG = 1 << 30  # model bytes that make the cost model choose threads


def same(got: torch.Tensor, want: torch.Tensor, tolerance: float = 0.0) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def check(plan, inputs, tolerance=0.0, threads=(1, 3), isas=None):
    for isa in isas or tiers():
        want = interpret_plan(plan, inputs)
        for t in threads:
            for g, w in zip(run(plan, inputs, isa, t), want, strict=True):
                same(g, w, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8])
def test_pointwise_of_every_size(dtype):
    inputs, buffers, kernels = [], [], []
    for n in (1, 2, 7, 15, 16, 17, 33, 1001, 4099):
        x = (torch.randn(n + 3) * 10).to(dtype)[3:]  # unaligned
        b = buffer(f"x{n}", x)
        i = space((n,))
        e = at(b, i)
        up = cast(e, F) if dtype in (torch.bfloat16, torch.float16) else e
        body = make("add", (make("mul", (up, up), up.dtype), const(3, up.dtype)), up.dtype)
        inputs.append(x)
        buffers.append(b)
        kernels.append(kernel(i, [pointwise(f"y{n}", (n,), body, dtype)], read_bytes=BIG if n > 4000 else 0))
    check(plan_of(buffers, kernels), inputs)


LAYOUTS = {
    "contiguous": lambda n, m: torch.randn(n, m),
    "transposed": lambda n, m: torch.randn(m, n).t(),
    "row step": lambda n, m: torch.randn(n * 2, m)[::2],
    "column step": lambda n, m: torch.randn(n, m * 3)[:, ::3],
    "expanded row": lambda n, m: torch.randn(1, m).expand(n, m),
    "expanded column": lambda n, m: torch.randn(n, 1).expand(n, m),
    "odd width": lambda n, m: torch.randn(n, m + 5)[:, 2 : m + 2],
    "scalar": lambda n, m: torch.randn(()).expand(n, m),
}


@pytest.mark.parametrize("size", [(5, 37), (64, 48), (70, 1030)])
def test_layouts_in_one_kernel_each(size):
    inputs, buffers, kernels = [], [], []
    v = space(size)
    y = torch.randn(size)
    yb = buffer("y", y)
    for k, make_layout in enumerate(LAYOUTS.values()):
        x = make_layout(*size)
        b = buffer(f"x{k}", x)
        inputs.append(x)
        buffers.append(b)
        kernels.append(kernel(v, [pointwise(f"o{k}", size, make("add", (at(b, v), at(yb, v)), F))], read_bytes=BIG))
    check(plan_of([*buffers, yb], kernels), [*inputs, y])


KINDS = ["sum", "prod", "amax", "amin", "any", "all", "argmax", "argmin", "max_index", "min_index", "welford"]


def fold(kind, b, dims, rdims, k, dtype=F):
    body = at(b, dims + rdims)
    if kind in ("any", "all"):
        body = make("gt", (body, const(0.0 if dtype.is_floating_point else 0, dtype)), torch.bool)
    results = {"argmax": (torch.int64,), "argmin": (torch.int64,), "max_index": (dtype, torch.int64), "any": (torch.bool,),
               "min_index": (dtype, torch.int64), "welford": (dtype, dtype), "all": (torch.bool,)}.get(kind, (dtype,))  # fmt: skip
    return reduction(kind, tuple(f"o{k}_{j}" for j in range(len(results))), dims, rdims, body, results)


def reductions(x, dims, rdims, strided):
    b = strided(x)
    return plan_of([b], [kernel(dims, [fold(kind, b, dims, rdims, k, x.dtype)], rdims, read_bytes=x.numel() * 4) for k, kind in enumerate(KINDS)])


@pytest.mark.parametrize("size", [(3, 5), (17, 33), (64, 1001), (2, 100003), (1, 70000)])
@pytest.mark.parametrize("special", [False, True])
def test_rows(size, special):
    x = torch.randn(size) * 0.2 + 1
    if special:
        x.view(-1)[::7] = float("nan")
        x[-1, :] = -float("inf")
    x[0, size[1] // 2] = x[0, -1] = 5.0  # a tie
    n, m = size
    plan = reductions(x, (var("x0", n),), (var("r0", m),), lambda t: buffer("x", t))
    check(plan, [x], 2e-5)


@pytest.mark.parametrize("size", [(5, 3), (33, 17), (1001, 64), (3000, 37), (100003, 2)])
@pytest.mark.parametrize("special", [False, True])
def test_columns(size, special):
    x = torch.randn(size) * 0.2 + 1
    if special:
        x.view(-1)[::7] = float("nan")
        x[:, -1] = float("inf")
    x[size[0] // 2, 0] = x[-1, 0] = 5.0
    n, m = size
    t = x.t()
    plan = reductions(t, (var("x0", m),), (var("r0", n),), lambda t: buffer("x", t))
    check(plan, [t], 2e-5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64])
def test_integer_and_double_reductions(dtype):
    x = torch.randint(-9, 9, (37, 261)).to(dtype)
    kinds = [k for k in KINDS if k != "welford" or dtype.is_floating_point]
    for y in (x, x.t()):
        b = buffer("x", y)
        dims, rdims = (var("x0", y.shape[0]),), (var("r0", y.shape[1]),)
        plan = plan_of([b], [kernel(dims, [fold(kind, b, dims, rdims, k, dtype)], rdims) for k, kind in enumerate(kinds)])
        check(plan, [y], 1e-9)


@pytest.mark.parametrize("sizes", [((6,), (8, 35)), ((8, 6), (35,)), ((4, 3, 5), (2, 7))])
def test_several_loops(sizes):
    outer, inner = sizes
    x = torch.randn(*inner, *outer).permute(*range(len(inner), len(inner) + len(outer)), *range(len(inner)))
    dims, rdims = space(outer), space(inner, "r")
    for y in (x, x.contiguous()):
        check(reductions(y, dims, rdims, lambda t: buffer("x", t)), [y], 1e-5)


def test_middle_reduction():
    x = torch.randn(6, 8, 35)
    b = buffer("x", x)
    x0, r0, r1 = var("x0", 8), var("r0", 6), var("r1", 35)
    body = load("x", b.at((r0, x0, r1)), F)
    nodes = [reduction(k, (f"{k}{j}",), (x0,), (r0, r1), body, (F,)) for j, k in enumerate(("sum", "amax"))]
    check(plan_of([b], [kernel((x0,), nodes, (r0, r1))]), [x], 1e-5)


def softmax(x, dtype=F):
    b = buffer("x", x)
    n, m = x.shape
    x0, r0 = var("x0", n), var("r0", m)
    e = at(b, (x0, r0))
    e = cast(e, F)
    top = reduction("amax", ("top",), (x0,), (r0,), e, (F,))
    p = make("exp", (make("sub", (e, load("top", x0, F)), F),), F)
    total = reduction("sum", ("total",), (x0,), (r0,), p, (F,))
    out = pointwise("y", (n, m), make("div", (p, load("total", x0, F)), F), dtype, (x0, r0))
    return plan_of([b], [kernel((x0,), [top, total, out], (r0,), ("top", "total"), x.numel() * 4)])


@pytest.mark.parametrize("size", [(3, 7), (64, 128), (37, 1000), (2, 60001), (9, 40000)])
def test_softmax_is_one_kernel(size):
    x = torch.randn(size) * 3
    plan = softmax(x)
    check(plan, [x], 1e-5)
    same(run(plan, [x])[0], x.softmax(-1), 1e-5)
    assert function_of(plan.kernels[0], detect()).body.count("exp(") <= 2  # kept, not computed again


def test_softmax_over_columns_and_in_half():
    x = torch.randn(64, 37)
    check(softmax(x.t()), [x.t()], 1e-5)
    h = (torch.randn(33, 70) * 2).bfloat16()
    check(softmax(h, torch.bfloat16), [h], 1e-2)


def test_norm_of_rows_and_columns():
    for shape in ((64, 384), (5, 37), (3, 30000)):
        for x in (torch.randn(shape), torch.randn(shape[::-1]).t()):
            n, m = shape
            b = buffer("x", x)
            x0, r0 = var("x0", n), var("r0", m)
            e = at(b, (x0, r0))
            w = reduction("welford", ("mean", "m2"), (x0,), (r0,), e, (F, F))
            variance = make("div", (load("m2", x0, F), const(float(m), F)), F)
            scale = make("rsqrt", (make("add", (variance, const(1e-5, F)), F),), F)
            rstd = Compute((dense("rstd", (n,), F),), (x0,), Pointwise((x0,), scale))
            body = make("mul", (make("sub", (e, load("mean", x0, F)), F), load("rstd", x0, F)), F)
            out = pointwise("y", (n, m), body, F, (x0, r0))
            plan = plan_of([b], [kernel((x0,), [w, rstd, out], (r0,), ("m2",), x.numel() * 4)])
            check(plan, [x], 2e-5)


KEPT = {  # values that a later pass needs again: costly, a flag, narrow integers, a load against its layout
    "exp": lambda e: make("exp", (e,), e.dtype),
    "flag": lambda e: make("gt", (make("sin", (e,), e.dtype), const(0.1, e.dtype)), torch.bool),
    "double": lambda e: make("exp", (cast(e, torch.float64),), torch.float64),
    "half": lambda e: cast(cast(make("exp", (e,), e.dtype), torch.bfloat16), F),
    "load": lambda e: e,
}


@pytest.mark.parametrize("what", KEPT)
def test_a_row_is_kept_lane_beside_lane_whatever_loop_the_lanes_run_along(what):
    """Most operands lie along one of the loops, not always the last; the reduction leaves none of the loops, or the first."""
    inputs, buffers, kernels = [], [], []
    for sizes, first, along in [((2, 3, 4, 5), 0, 1), ((5, 17, 3), 0, 0), ((5, 17, 3), 1, 1), ((33, 7), 0, 0), ((64, 16, 9), 1, 1), ((70, 33, 17), 1, 2)]:
        k, v = len(kernels), space(sizes)
        order = [d for d in range(len(sizes)) if d != along] + [along]
        back = [order.index(d) for d in range(len(sizes))]
        x, *others = (torch.randn([sizes[d] for d in order]).permute(back) for _ in range(5))
        inputs += [x.contiguous() if what == "load" else x, *others]
        b, *rest = here = [buffer(f"{name}{k}", t) for name, t in zip("bcdfg", inputs[-5:], strict=True)]
        buffers += here
        dims, rdims = v[:first], v[first:]
        e = KEPT[what](at(b, v))
        held = cast(e, F)
        body = functools.reduce(lambda s, t: make("mul", (s, at(t, v)), F), rest, held)
        total = reduction("sum", (f"total{k}",), dims, rdims, body, (F,))
        row = load(f"total{k}", total.at[0], F)
        most = reduction("amax", (f"most{k}",), dims, rdims, make("sub", (held, row), F), (F,))
        out = pointwise(f"y{k}", sizes, make("sub", (make("mul", (held, row), F), load(f"most{k}", most.at[0], F)), F), F, v)
        kernels.append(kernel(dims, [total, most, out], rdims, (f"total{k}", f"most{k}"), BIG if first else 0))
    assert sum("row0[" in function_of(k, detect()).body for k in kernels) >= (3 if what == "load" else len(kernels))
    check(plan_of(buffers, kernels), inputs, 1e-3, isas=None if what == "exp" else [None])


def test_what_is_kept_stands_lane_beside_lane():
    r, s = space((4, 5), "r")
    body = Body(r, 8, (), {})
    body.keep(value(s), "row", affine(0, [(s, 4), (r, 1)]))
    for place in (affine(0, [(r, 5), (s, 1)]), s, floordiv(r, 2)):
        with pytest.raises(UnsupportedError):
            body.keep(value(r), "row", place)


def test_long_sums_stay_accurate():
    x = torch.full((10_000_000,), 0.1)
    b = buffer("x", x)
    r0 = var("r0", len(x))
    plan = plan_of([b], [kernel((), [reduction("sum", ("y",), (), (r0,), at(b, (r0,)), (F,))], (r0,), read_bytes=4 * len(x))])
    for isa in tiers():
        for threads in (1, 2):
            got = run(plan, [x], isa, threads)[0].double()
            assert abs(got / x.double().sum() - 1) < 1e-6, isa
    ones = torch.ones(100_000, dtype=torch.bfloat16)
    b = buffer("x", ones)
    r0 = var("r0", len(ones))
    plan = plan_of([b], [kernel((), [reduction("sum", ("y",), (), (r0,), cast(at(b, (r0,)), F), (torch.bfloat16,))], (r0,))])
    assert run(plan, [ones])[0] == torch.tensor(1e5).bfloat16()


def test_empty_spaces_and_reductions():
    x = torch.empty(3, 0)
    check(reductions(x, (var("x0", 3),), (var("r0", 0),), lambda t: buffer("x", t)), [x])
    y = torch.empty(0, 5)
    b = buffer("y", y)
    v = space((0, 5))
    check(plan_of([b], [kernel(v, [pointwise("z", (0, 5), at(b, v))])]), [y])
    s = torch.tensor(3.5)
    b = buffer("s", s)
    check(plan_of([b], [kernel((), [pointwise("z", (), make("exp", (at(b, ()),), F))])]), [s], 1e-6)


def test_flattened_and_rolled_indices():
    x = torch.randn(6, 64)
    b = buffer("x", x)
    i = var("x0", 384)
    kernels = []
    for k, e in enumerate(
        (
            add(mul(mod(i, 64), 6), floordiv(i, 64)),  # transpose through a flat index
            mod(add(i, 5), 384),  # roll
            floordiv(i, 3),  # repeat
            affine(383, [(i, -1)]),  # flip
            add(mul(floordiv(i, 96), 96), mod(i, 32)),
        )
    ):
        kernels.append(kernel((i,), [pointwise(f"y{k}", (384,), load("x", e, F), F, (i,))]))
    kernels.append(kernel((i,), [pointwise("idx", (384,), value(mod(i, 7)), torch.int64, (i,))]))
    kernels.append(kernel((i,), [pointwise("idf", (384,), value(add(mul(i, 3), 1), F), F, (i,))]))
    check(plan_of([b], kernels), [x])


def test_concatenation_and_padding_touch_nothing_outside():
    n, a, c = 5, 19, 30
    x, y = torch.randn(n, a), torch.randn(n, c)
    bx, by = buffer("x", x), buffer("y", y)
    x0, x1 = space((n, a + c))
    first, second = in_range(x1, 0, a), in_range(x1, a, a + c)
    cat = masked(first, load("x", bx.at((x0, x1)), F), masked(second, load("y", by.at((x0, add(x1, -a))), F), const(0.0, F)))
    p0, p1 = space((n + 4, a + 7))
    inside = make("logical_and", (in_range(add(p0, -2), 0, n), in_range(add(p1, -3), 0, a)), torch.bool)
    shifted = make("exp", (load("x", bx.at((add(p0, -2), add(p1, -3))), F),), F)
    pad = masked(inside, shifted, const(-1.0, F))
    plan = plan_of(
        [bx, by],
        [kernel((x0, x1), [pointwise("cat", (n, a + c), cat, F, (x0, x1))]), kernel((p0, p1), [pointwise("pad", (n + 4, a + 7), pad, F, (p0, p1))])],
    )
    check(plan, [x, y], 1e-6)
    same(run(plan, [x, y])[0], torch.cat([x, y], 1))


def placed(rng: random.Random, dims) -> Expr:
    """A condition on the place along some loops."""
    if rng.random() < 0.4:
        op = rng.choice(("logical_and", "logical_or", "logical_not"))
        return make(op, tuple(placed(rng, dims) for _ in range(1 if op == "logical_not" else 2)), torch.bool)
    v = rng.choice(dims)
    where = add(mul(v, rng.choice((-3, -1, 1, 1, 2))), rng.randint(-4, 4))
    return make(rng.choice(("ge", "lt", "gt", "le", "eq", "ne")), (value(where), const(rng.randint(-5, v.args[1] + 5), torch.int64)), torch.bool)


def test_conditions_on_the_place_along_a_loop_become_loops_of_their_own():
    rng = random.Random(0)
    x = torch.randn(7, 40)
    b = buffer("x", x)
    kernels = []
    for k in range(16):
        size = (7, 40) if k % 2 else (5, 3, 24)
        dims = space(size)
        body = at(b, dims[-2:])
        for _ in range(rng.randint(1, 5)):
            scaled = make("mul", (at(b, dims[-2:]), const(rng.random(), F)), F)
            body = make(rng.choice(("masked", "where")), (placed(rng, dims), scaled, body), F)
        kernels.append(kernel(dims, [pointwise(f"y{k}", size, body)], read_bytes=BIG if k % 3 else 0))
    check(plan_of([b], kernels), [x])
    cut = [pieces(k, 8) for k in kernels]
    assert sum(map(len, cut)) > 2 * len(cut)
    for k, parts in zip(kernels, cut, strict=True):
        points = [math.prod(v.args[1] for v in p.kernel.dims) for p in parts]
        assert sum(points) == math.prod(v.args[1] for v in k.dims)
        body = k.nodes[0].loop.body
        for v, ends in cuts(body).items():
            for low, high in pairwise((0, *ends, v.args[1])):
                assert var(v.name, high - low) not in cuts(between(body, v, low, high))


def test_tensors_side_by_side_are_one_function():
    xs = [torch.randn(6, 40) for _ in range(20)]
    bs = [buffer(f"x{k}", x) for k, x in enumerate(xs)]
    x0, x1 = space((6, 800))
    body = const(0.0, F)
    for k, b in enumerate(bs):
        body = masked(in_range(x1, 40 * k, 40 * k + 40), load(b.name, b.at((x0, add(x1, -40 * k))), F), body)
    plan = plan_of(bs, [kernel((x0, x1), [pointwise("y", (6, 800), body)])])
    check(plan, xs)
    assert emit(plan, detect()).text.count("static void kernel_") == 1


def test_gather_checks_its_indices():
    table, ids = torch.randn(50, 33), torch.randint(0, 50, (4, 7))
    bt, bi = buffer("t", table), buffer("i", ids)
    v = space((4, 7, 33))
    row = index(at(bi, v[:2]), 50)
    embed = pointwise("y", (4, 7, 33), load("t", bt.at((row, v[2])), F))
    w = space((4, 7))
    lanes = pointwise("z", (4, 7), load("t", bt.at((index(at(bi, w), 50), w[1])), F))
    plan = plan_of([bt, bi], [kernel(v, [embed]), kernel(w, [lanes])])
    check(plan, [table, ids])
    ids[2, 3] = 50
    with pytest.raises(Failed, match="out of range"):
        run(plan, [table, ids])


def test_division_by_zero_is_reported():
    a, b = torch.arange(20), torch.arange(20) + 1
    ba, bb = buffer("a", a), buffer("b", b)
    i = space((20,))
    plan = plan_of([ba, bb], [kernel(i, [pointwise("y", (20,), make("div_floor", (at(ba, i), at(bb, i)), torch.int64))])])
    check(plan, [a, b])  # the tail's dead lanes hold zeros
    b[19] = 0
    with pytest.raises(Failed, match="ZeroDivision"):
        run(plan, [a, b])


@pytest.mark.parametrize("kind", ["sum", "prod", "logaddexp", "max_index", "min_index"])
def test_scans(kind):
    x = torch.randn(7, 33) * 0.3 + 1
    x[3, 5] = x[3, 9] = 4.0
    x[6, 20] = float("nan")
    b = buffer("x", x)
    v = space((7, 33))
    dtypes = (F, torch.int64) if "index" in kind else (F,)
    for axis in (0, 1):
        names = tuple(f"y{j}" for j in range(len(dtypes)))
        plan = plan_of([b], [kernel(v, [scan(kind, names, v, axis, at(b, v), dtypes)])])
        check(plan, [x], 1e-5)


def test_casts_match_eager():
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
              torch.uint8, torch.bool]  # fmt: skip
    for isa in tiers():
        inputs, buffers, kernels, want = [], [], [], []
        for a in dtypes:
            x = torch.tensor([0.0, 1.0, -1.0, 2.5, 3.5, -2.5, 100.7, 126.0, -100.7, 1e-3] * 5 + [0.1] * 7)
            if a.is_floating_point:
                x = torch.cat([x.double(), torch.tensor([65519.0, 65520.0, 1e30, -1e30, 1e-7, -0.0, 1e-40, 6e-8], dtype=torch.float64)])
                x = torch.cat([x, torch.randn(200, dtype=torch.float64)])
            x = x.to(a)
            b = buffer(f"x{a}".replace(".", "_"), x)
            inputs.append(x)
            buffers.append(b)
            for d in dtypes:
                y = x
                if a.is_floating_point and not d.is_floating_point and d != torch.bool:
                    y = torch.where(x.float().abs() < 120, x, torch.zeros((), dtype=a))
                    if d == torch.uint8:
                        y = y.abs()
                    inputs.append(y)
                    b2 = buffer(f"x{len(buffers)}", y)
                    buffers.append(b2)
                else:
                    b2 = b
                i = space((len(x),))
                kernels.append(kernel(i, [pointwise(f"y{len(want)}", (len(x),), cast(at(b2, i), d), d)]))
                want.append(y.to(d))
        for g, w in zip(run(plan_of(buffers, kernels), inputs, isa), want, strict=True):
            same(g, w)


@pytest.mark.parametrize("isa", tiers())
def test_casts_to_narrow_integers_keep_the_low_bits_as_eager(isa):
    """Of numbers beyond the type, x86 converts to 32 bits, or, for uint8, to 64, and cuts."""
    x = torch.tensor([2147483649.0, 2.0**53 + 2, 4294967301.0, 1e10 + 7, -1e10 - 7, 300.0, -129.0, 70000.0, -70000.0] * 5, dtype=torch.float64)
    for a in (torch.float64, torch.float32):
        b, i, dtypes = buffer("x", x.to(a)), space((len(x),)), (torch.int8, torch.uint8, torch.int16)
        kernels = [kernel(i, [pointwise(f"y{k}", (len(x),), cast(at(b, i), d), d)]) for k, d in enumerate(dtypes)]
        for g, d in zip(run(plan_of([b], kernels), [x.to(a)], isa), dtypes, strict=True):
            assert torch.equal(g, x.to(a).to(d)), (a, d)


def test_threads_give_the_same_bits():
    x = torch.randn(300, 777)
    for plan in (softmax(x), softmax(torch.randn(777, 300).t())):
        a, b, c = (run(plan, [x], threads=t)[0] for t in (1, 2, 4))
        assert torch.equal(a, b) and torch.equal(a, c)


def test_identical_kernels_are_one_function():
    x = torch.randn(40, 40)
    buffers = [buffer(f"x{k}", x) for k in range(3)]
    v = space((40, 40))
    from tensorplay.stax.codegen.cpp.emit import emit

    source = emit(plan_of(buffers, [kernel(v, [pointwise(f"y{b.name}", (40, 40), make("exp", (at(b, v),), F))]) for b in buffers]), detect())
    assert source.text.count("static void kernel_") == 1
    assert source.text.count("kernel_0(") == 4


def test_common_subexpressions_appear_once():
    x = torch.randn(64)
    b = buffer("x", x)
    i = space((64,))
    e = make("exp", (at(b, i),), F)
    body = make("add", (e, make("mul", (e, e), F)), F)
    text = function_of(kernel(i, [pointwise("y", (64,), body)]), detect()).body
    assert text.count("exp(") == 1 and text.count("load<N>") == 1


def test_constants_beside_vectors_stay_literals():
    x = torch.tensor([-1.0, -0.0, 0.0, 2.0, float("nan"), float("inf"), -float("inf"), 1e-42] * 5)
    b, v = buffer("x", x), space((40,))
    e = at(b, v)
    low = make("clamp_min", (e, const(0.0, F)), F)
    body = make("where", (make("gt", (e, const(1.0, F)), torch.bool), low, const(-3.0, F)), F)
    plan = plan_of([b], [kernel(v, [pointwise("y", (40,), body), pointwise("z", (40,), low), pointwise("w", (40,), body, torch.bfloat16)])])
    text = function_of(plan.kernels[0], detect()).body
    assert "0.0f)" in text and "splat" not in text
    assert "round_bf16" not in text  # the store rounds
    check(plan, [x])


def test_transposed_reads_go_through_tiles():
    for n, m in ((70, 130), (256, 192)):
        x, y = torch.randn(3, n, m), torch.randn(3, m, n).transpose(1, 2)
        for dtype in (torch.float32, torch.bfloat16, torch.bool):
            a, b = (x > 0, y > 0) if dtype == torch.bool else (x.to(dtype), y.to(dtype))
            ba, bb = buffer("a", a), buffer("b", b)
            v = space((3, n, m))
            e, f = at(ba, v), at(bb, v)
            if dtype == torch.bfloat16:
                e, f = cast(e, F), cast(f, F)
            body = make("logical_and" if dtype == torch.bool else "add", (e, f), e.dtype)
            plan = plan_of([ba, bb], [kernel(v, [pointwise("y", (3, n, m), body, dtype)], read_bytes=BIG)])
            assert "turn(" in function_of(plan.kernels[0], detect()).body
            check(plan, [a, b])


def test_nothing_of_the_caller_is_written_before_a_check_fails():
    p, table, ids = torch.zeros(40), torch.randn(50), torch.randint(0, 50, (40,))
    bp, bt, bi = buffer("p", p), buffer("t", table), buffer("i", ids)
    v = space((40,))
    body = make("add", (at(bp, v), load("t", index(at(bi, v), 50), F)), F)
    back = Compute((bp,), v, Pointwise(v, body))
    plan = plan_of([bp, bt, bi], [kernel(v, [back])], [])
    run(plan, [p, table, ids])
    same(p, table[ids])
    before = p.clone()
    ids[39] = 99
    with pytest.raises(Failed):
        run(plan, [p, table, ids])
    same(p, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("op", ["eq", "ne"])
def test_a_label_is_compared_with_places_by_value(op, dtype):
    """The lanes hold narrow places, the label any int64: what differs from a place by 2^32 is no match."""
    labels = torch.tensor([0, 5, 20, -1, 21, 2**32 + 3, -(2**32) + 3, 2**63 - 1, -(2**63)])
    b, (r, c) = buffer("t", labels), space((9, 21))
    for sides in ((at(b, (r,)), value(c)), (value(c), at(b, (r,))), (at(b, (r,)), value(affine(3, [(c, 1)])))):
        body = cast(make(op, sides, torch.bool), dtype)
        plan = plan_of([b], [kernel((r, c), [pointwise("y", (9, 21), body, dtype, (r, c))])])
        assert "same_index(" in function_of(plan.kernels[0], detect()).body
        check(plan, [labels])
