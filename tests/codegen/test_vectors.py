"""The vector layer on every tier: rounding to bfloat16 bit by bit, the hot functions in ulp, streams asked for ahead."""

import numpy
import pytest
import torch

import tensorplay as tp
from tensorplay.testing import K, tiers


def on(tier, f):
    return tp.compile(f, strict_native=True, options={"cpu_isa": tier})


def floats(step):
    """Every `step`-th bit pattern of float32."""
    return torch.arange(-(2**31), 2**31, step, dtype=torch.int64).to(torch.int32).view(torch.float32)


def same(got, want, integer):
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan) and torch.equal(got.view(integer)[~nan], want.view(integer)[~nan])


@pytest.mark.parametrize("tier", tiers())
def test_rounding_to_bfloat16_is_to_nearest_even(tier):
    round_off = on(tier, lambda x: (x * 1.0).to(torch.bfloat16))
    x = floats(6337)
    same(round_off(x), x.to(torch.bfloat16), torch.int16)
    upper = torch.arange(65536, dtype=torch.int64).repeat_interleave(7) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF]).repeat(65536)
    x = (upper | lower).to(torch.int32).view(torch.float32)  # each value of bfloat16, with each kind of rest
    same(round_off(x), x.to(torch.bfloat16), torch.int16)
    half = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    same(on(tier, lambda x: x.float())(half), half.float(), torch.int32)


@pytest.mark.parametrize("tier", tiers())
@pytest.mark.parametrize("name, bound", [("exp", 1.25), ("erf", 1.25), ("tanh", 1.5)])
def test_hot_functions_stay_within_their_ulps(tier, name, bound):
    x = torch.cat([floats(50021), torch.linspace(-12, 12, 200_001), torch.tensor([0.0, -0.0, 4.0, -4.0, 3.9999998, 88.7, 88.8, -103.9, -104.1])])
    function = getattr(torch, name)
    got, want = on(tier, function)(x), function(x.double())
    finite = want.float().isfinite()
    assert torch.equal(got.isnan(), x.isnan()) and torch.equal(got[~finite & ~x.isnan()], want.float()[~finite & ~x.isnan()])
    unit = torch.from_numpy(numpy.spacing(want.float().abs().numpy())).double()
    worst = ((got.double() - want).abs() / unit)[finite].max().item()
    assert worst <= bound, worst
    assert torch.equal(got.signbit()[got == 0], want.signbit()[got == 0])


NARROW = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("tier", tiers())
def test_conversions_between_elements_of_every_width(tier):
    """On as many lanes as 4-byte elements have, and as 8-byte elements have; integers wrap."""
    for dtypes in (NARROW, (*NARROW, torch.int64, torch.float64)):
        for source in dtypes:
            whole = torch.arange(-131, 200)
            x = (whole.clamp(-127, 127) if source.is_floating_point else whole * 12_345_677).to(source)

            def f(x, dtypes=dtypes):
                return [x.to(d) for d in dtypes if not x.is_floating_point() or d is not torch.uint8]

            for got, want in zip(on(tier, f)(x), f(x), strict=True):
                assert got.dtype is want.dtype and torch.equal(got, want), (source, want.dtype)


@pytest.mark.parametrize("tier", tiers())
def test_what_is_stored_and_read_again_is_rounded_once(tier):
    def f(x, y):
        z = (x * 1.1 + y).to(torch.bfloat16)
        return z, z.float() * 3, (z * y).to(torch.bfloat16)

    args = floats(50021), floats(50021).flip(0).nan_to_num(1.0, 2.0, -2.0)
    for got, want in zip(on(tier, f)(*args), f(*args), strict=True):
        same(got, want, torch.int32 if want.dtype is torch.float32 else torch.int16)


@pytest.mark.parametrize("tier", tiers())
def test_extremes_keep_nan_and_the_sign_that_eager_keeps(tier):
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e-45, 3e38])
    a, b = (t.flatten() for t in torch.meshgrid(special, special, indexing="ij"))
    for f in (torch.maximum, torch.minimum, torch.fmax, torch.fmin, lambda x, y: x.clamp_min(0.5) + y.clamp_max(-0.5), lambda x, y: x.relu() * y):
        torch.testing.assert_close(on(tier, f)(a, b), f(a, b), rtol=0, atol=0, equal_nan=True)
    c = on(tier, torch.relu)(a)
    assert torch.equal(c.signbit(), torch.relu(a).signbit() & ~a.isnan() | (a.isnan() & c.signbit()))


def test_only_what_streams_from_memory_is_asked_for_ahead():
    def f(x, y):
        return torch.relu(x) * y

    large, small = tp.compile(f, strict_native=True), tp.compile(f, strict_native=True)
    x = torch.randn(3000, 1001)
    for c, args in ((large, (x, x.flip(0))), (small, (x[:10], x[:10].flip(0)))):
        torch.testing.assert_close(c(*args), f(*args))
    text = K(large)[0].source
    assert text.count(" prefetch(") == 2 and text.count("prefetch_out(out0") == 1
    assert "prefetch" not in K(small)[0].source


@pytest.mark.parametrize("tier", tiers())
@pytest.mark.parametrize("size", [(1 << 20,), ((1 << 20) + 37,), (1024, 1000), (1031, 1003)])
def test_batches_of_narrow_elements_compute_what_single_vectors_do(tier, size):
    """Loads, then values, then stores: of arrays that are written in place, of masks, indices and kept rows as well."""

    def points(x, y, keep, i, row):
        x.mul_(0.5)
        return torch.where(keep, x, y) * 2, (x > y), row[i % 8] + y, x.float() - torch.arange(x.shape[-1])

    def rows(x, y):
        return x.softmax(-1), (y - y.float().mean(-1, keepdim=True)).half()

    x, y = torch.randn(size).bfloat16(), torch.randn(size).bfloat16()
    keep, i = torch.rand(size) < 0.5, torch.randint(0, 99, (size[-1],))
    for f, args in ((points, (x, y, keep, i, torch.randn(8).bfloat16())), (rows, (x, y))):
        compiled, mine, eager = on(tier, f), [a.clone() for a in args], [a.clone() for a in args]
        for got, want in zip((*compiled(*mine), *mine), (*f(*eager), *eager), strict=True):
            torch.testing.assert_close(got, want)
        assert any("_batch" in k.source for k in K(compiled))
