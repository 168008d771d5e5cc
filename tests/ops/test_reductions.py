"""Reductions, scans and normalization against eager, on ordinary and special values."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import tensorplay as tp
from tests.ops.programs import check, computes, lowered

torch.manual_seed(0)
X = torch.randn(4, 5, 6)
SPECIAL = X.clone()
SPECIAL[0, 1, 2], SPECIAL[1, 2, 3], SPECIAL[2, 0, 0], SPECIAL[3, 3, 1] = math.nan, math.inf, -math.inf, -0.0

FLOATING = {
    "sum": lambda x: (x.sum(), x.sum(0), x.sum((0, 2), keepdim=True), x.sum(dtype=torch.float64)),
    "mean": lambda x: (x.mean(), x.mean(-1), x.mean((0, 1), keepdim=True)),
    "prod": lambda x: (x.prod(), x.prod(1), x.prod(1, keepdim=True)),
    "var": lambda x: (x.var(), x.var(1), x.std((0, 2), keepdim=True), x.var(2, correction=0), torch.var_mean(x, 1), torch.std_mean(x, 0)),
    "logsumexp": lambda x: (x.logsumexp(1), x.logsumexp((0, 2), keepdim=True)),
    "softmax": lambda x: (x.softmax(-1), x.softmax(0), F.softmin(x, 1)),
    "log_softmax": lambda x: (x.log_softmax(-1), x.log_softmax(1)),
    "norm": lambda x: (x.norm(), x.norm(dim=1), x.norm(1), x.norm(math.inf, 0), x.norm(3, 1), torch.linalg.vector_norm(x, 0)),
    "nansum": lambda x: (x.nansum(), x.nansum(1)),
    "cumsum": lambda x: (x.cumsum(0), x.cumsum(2)),
    "cumprod": lambda x: (x.cumprod(1), x.cumprod(-1)),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "layer_norm": lambda x: (F.layer_norm(x, (6,)), F.layer_norm(x, (5, 6)), F.layer_norm(x, (6,), x[0, 0], x[0, 1])),
    "rms_norm": lambda x: (F.rms_norm(x, (6,)), F.rms_norm(x, (6,), x[0, 0], 1e-3)),
    "group_norm": lambda x: F.group_norm(x.view(4, 6, 5), 3, x[0, 0], x[0, 1]),
    "batch_norm": lambda x: F.batch_norm(x, x[0, :, 0], x[0, :, 1].abs(), x[1, :, 0], x[1, :, 1]),
    "dist": lambda x: torch.dist(x, x[:1] * 2),
    "cosine": lambda x: F.cosine_similarity(x, x.flip(0), -1),
}
EXACT = {
    "amax": lambda x: (x.amax(), x.amax(1), x.amin((0, 2), keepdim=True), x.max(), x.min()),
    "max dim": lambda x: (*x.max(1), *x.min(0, keepdim=True)),
    "arg": lambda x: (x.argmax(), x.argmin(1), x.argmax(2, keepdim=True)),
    "cummax": lambda x: (*x.cummax(1), *x.cummin(0)),
    "aminmax": lambda x: (*torch.aminmax(x), *torch.aminmax(x, dim=1)),
    "any all": lambda x: (x.any(), x.all(1), (x > 0).any(0, keepdim=True), torch.any(x, (0, 1)), (x > 5).all()),
    "count": lambda x: (x.count_nonzero(), x.count_nonzero(1)),
}


@pytest.mark.parametrize("name", FLOATING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_floating(name: str, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-11, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    check(FLOATING[name], X.to(dtype), tolerance=tolerance)


@pytest.mark.parametrize("name", [n for n in FLOATING if n not in ("cosine", "logcumsumexp", "dist")])
def test_special_values(name: str) -> None:
    f = FLOATING[name]
    if name == "var":  # eager's running mean turns NaN behind an infinity, ours stays infinite
        f = lambda x: (x.var(), x.var(1), x.std((0, 2), keepdim=True), x.var(2, correction=0))  # noqa: E731
    check(f, SPECIAL, tolerance=1e-5)


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.float64):
        check(EXACT[name], (X * 3).abs().to(dtype) if dtype == torch.uint8 else (X * 3).to(dtype))
    check(EXACT[name], SPECIAL)
    check(EXACT[name], torch.zeros(4, 5, 6))


def test_integers_sum_in_int64() -> None:
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.bool):
        x = torch.ones(4, 200).to(dtype)
        check(lambda x: (x.sum(), x.sum(1), x.prod(1), x.cumsum(1)), x)


def test_half_types_accumulate_in_float32() -> None:
    from tensorplay.stax.loops.interpret import interpret

    x = torch.ones(100_000, dtype=torch.bfloat16)
    (got,) = interpret(lowered(lambda x: x.sum(), x), [x])
    assert got == torch.tensor(100_000.0).bfloat16()


def test_rows_of_minus_infinity_are_nan() -> None:
    x = X.clone()
    x[1] = -math.inf
    check(lambda x: (x.softmax(-1), x.log_softmax(-1), x.logsumexp(-1)), x, tolerance=1e-6)


def test_nothing_to_reduce() -> None:
    check(lambda x: (x.sum(1), x.prod(1), x.mean(1), x.any(1), x.all(1), x.var(1), x.softmax(1)), torch.empty(3, 0))
    check(lambda x: (x.sum(), x.mean(), x.amax(), x.argmax(), x.softmax(0), x.cumsum(0), x.log_softmax(0)), torch.tensor(3.0))


@pytest.mark.parametrize("scale", [1e20, 3e18, 1e-24, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_of_deviations_neither_overflow_nor_vanish(dtype: torch.dtype, scale: float) -> None:
    x = (torch.randn(5, 33, dtype=torch.float64) * scale).to(dtype)
    f = lambda x: (x.std(1), x.std(0), x.var(1), x.std(), *torch.std_mean(x, (0, 1), correction=0))  # noqa: E731
    got = tp.compile(f, strict_native=True)(x)
    torch.testing.assert_close(got, f(x), rtol=2e-6 if dtype is torch.float32 else 1e-2, atol=0)
    assert got[0].isfinite().all() and (got[0] > 0).all()


BEHIND = {  # a full reduction, and a pass over the same elements behind it
    "product": lambda x, c: (x * c * c[:, :1] * c[:1]).sum() * x,
    "softmax": lambda x, c: (x.log_softmax(1) * x.softmax(1)).sum() * x,
    "cross entropy": lambda x, c: F.cross_entropy(x, x.softmax(1)) * x,
    "two passes": lambda x, c: ((x - (x * c * c[:1]).mean()).exp() * c[:, :1] * c[:, :, :1]).sum() * (x - (x * c * c[:1]).mean()).exp() + x.tanh(),
    "flag": lambda x, c: torch.where(x.sin() > 0.1, c * c[:1], c * c[:, :1]).sum() * (x.sin() > 0.1),
    "norm": lambda x, c: x.exp() / torch.linalg.vector_norm(x.exp() * c * c[:1] * c[:, :1] * c[:, :, :1]),
}


@pytest.mark.parametrize("name", BEHIND)
def test_a_pass_behind_a_full_reduction_of_operands_of_other_layouts(name: str) -> None:
    """What the kernel keeps for the pass has the order of its loops, of which the lanes may run along any."""
    torch.manual_seed(1)
    compiled = tp.compile(BEHIND[name], strict_native=True, recompile_limit=16)
    for size in ((2, 3, 4, 5), (3, 17, 7, 2), (33, 3, 1, 9)):
        c = torch.randn(size)
        for x in (torch.randn(size).to(memory_format=torch.channels_last), torch.randn(size[::-1]).permute(3, 2, 1, 0), torch.randn(size)):
            torch.testing.assert_close(compiled(x, c), BEHIND[name](x, c), rtol=1e-4, atol=1e-4)


def test_var_mean_is_one_welford_reduction() -> None:
    loops = lowered(lambda x: torch.var_mean(x, 1), torch.randn(8, 100))
    assert [n.loop.kind for n in computes(loops) if n.rvars] == ["welford"]


def test_losses() -> None:
    logits, labels = torch.randn(6, 10), torch.tensor([1, 0, 9, -100, 3, 2])
    check(lambda x, t: (F.cross_entropy(x, t), F.nll_loss(x, t, reduction="none"), F.cross_entropy(x, t, reduction="sum")), logits, labels, tolerance=1e-6)
    check(lambda x, t, w: F.cross_entropy(x, t, w), logits, labels, torch.rand(10), tolerance=1e-6)
    a, b = torch.randn(4, 5), torch.rand(4, 5)
    check(
        lambda a, b: (F.mse_loss(a, b), F.l1_loss(a, b), F.smooth_l1_loss(a, b), F.huber_loss(a, b, reduction="sum"), F.binary_cross_entropy_with_logits(a, b)),
        a, b, tolerance=1e-6,
    )  # fmt: skip


@pytest.mark.parametrize("order", [2, 1, 0, 3, 0.5, -1, 2.5, math.inf, -math.inf])
def test_norm_of_one_element_is_its_magnitude(order: float) -> None:
    values = torch.tensor([3.4e38, 1e30, -1e-30, 1e-40, -0.0, math.inf, -math.inf, math.nan, -2.5])

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.linalg.vector_norm(x, order, 1), torch.linalg.vector_norm(x.t(), order, 0, keepdim=True), x[1, 0].norm(order)

    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        check(f, values.to(dtype)[:, None], tolerance=0.0)
