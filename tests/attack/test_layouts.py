"""Values that depend on how memory is laid out: `as_strided` of computed values, numbers drawn into views."""

import pytest
import torch
import torch.nn.functional as F

import tensorplay as tp

INPUTS = {
    "rows": lambda: torch.arange(24.0).reshape(4, 6),
    "transposed": lambda: torch.arange(24.0).reshape(6, 4).t(),
    "gaps": lambda: torch.arange(96.0).reshape(8, 12)[::2, 1::2],
    "expanded": lambda: torch.arange(6.0).expand(4, 6),
    "behind an offset": lambda: torch.arange(30.0)[5:29].view(4, 6),
}
COMPUTED = {
    "copied": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "transposed and copied": lambda x: x.t().clone(),
    "rows of a product": lambda x: (x * 2)[1:],
    "columns of a product": lambda x: (x * 2)[:, ::2],
    "rows of a transposed copy": lambda x: x.t().contiguous()[1:],
    "rows of a concatenation": lambda x: torch.cat([x, x])[1:],
    "an expanded row": lambda x: (x[0] * 2).expand(4, 6),
}


@pytest.mark.filterwarnings("ignore::tensorplay.FallbackWarning")
@pytest.mark.parametrize("kind", INPUTS)
def test_as_strided_reads_the_memory_that_eager_has(kind):
    for name, made in COMPUTED.items():
        for place in (((2, 2), (1, 1), 1), ((3,), (2,)), ((2, 2), (3, 1))):
            x = INPUTS[kind]()

            def f(x, made=made, place=place):
                return torch.as_strided(made(x), *place) + 1

            try:
                want = f(x)
            except RuntimeError:  # beyond the memory
                continue
            assert torch.equal(tp.compile(f)(x), want), (name, place)


DRAWS = {
    "normal_": lambda x: x.normal_(),
    "bernoulli_": lambda x: x.bernoulli_(0.5),
    "uniform_": lambda x: x.uniform_(),
    "random_": lambda x: x.random_(0, 9),
    "dropout": lambda x: F.dropout(x + 1, 0.5),
    "rows": lambda x: x[1:].normal_(),
    "made inside": lambda x: torch.empty(4, 40)[:, :20].normal_(),
}


@pytest.mark.parametrize("kind", [k for k in INPUTS if k != "expanded"])
def test_numbers_drawn_into_views_are_eagers(kind):
    for name, f in DRAWS.items():
        compiled, found = tp.compile(f, strict_native=True), []
        for g in (f, compiled):
            torch.manual_seed(3)
            x = INPUTS[kind]()
            found.append((g(x), x, torch.get_rng_state()))
        assert all(map(torch.equal, *found)), name


def test_dropout_in_another_memory_order_saves_a_mask_of_bytes():
    x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    compiled, found = tp.compile(lambda x: F.dropout(x.exp(), 0.5)), []
    for g in (lambda x: F.dropout(x.exp(), 0.5), compiled):
        torch.manual_seed(3)
        y = g(x)
        found.append((y.detach(), *torch.autograd.grad(y.sum(), x)))
    assert torch.allclose(found[0][0], found[1][0]) and torch.allclose(found[0][1], found[1][1])
    assert torch.equal(found[0][0] == 0, found[1][0] == 0)
    assert x.numel() in [s.nbytes for s in tp.explain(compiled).training.saved]


@pytest.mark.filterwarnings("ignore::tensorplay.FallbackWarning")
@pytest.mark.parametrize("kind", INPUTS)
def test_bits_of_any_layout(kind):
    """Torch copies where the view would be one of its own call: a copy is row-major, also where the view overlaps."""
    x = INPUTS[kind]()
    for f in (lambda x: x.view(torch.int32) + 1, lambda x: (x.view(torch.int32) >> 3).view(torch.float32).sum(), lambda x: x.view(torch.int32).sort(0)[0]):
        got, want = tp.compile(f)(x), f(x)
        assert torch.equal(got, want) and got.stride() == want.stride()


@pytest.mark.parametrize("kind", [k for k in INPUTS if k != "expanded"])
def test_a_chain_in_place_of_an_operator_has_its_layout(kind):
    x = INPUTS[kind]() / 8
    for f in (torch.exp2, torch.square, lambda x: torch.lerp(x, x.t().contiguous().t(), 0.7), torch.relu, F.mish, F.softshrink, F.selu, lambda x: 2.0**x, F.logsigmoid):
        got, want = tp.compile(f, strict_native=True)(x), f(x)
        assert got.stride() == want.stride() and torch.allclose(got, want)


def test_a_write_to_elements_that_share_memory_says_so():
    def f(x):
        x[0] = 5.0
        return x * 2

    for made in (lambda: torch.zeros(1).expand(4), lambda: torch.as_strided(torch.arange(20.0), (4, 6), (1, 1))):
        with pytest.warns(tp.FallbackWarning, match="whose elements share memory"):
            assert torch.equal(tp.compile(f)(made()), f(made()))


@pytest.mark.parametrize("exponent", [torch.int64, torch.int32, torch.float32, torch.float64])
def test_ldexp_scales_without_an_infinite_power(exponent):
    x = torch.tensor([0.0, 2.0**-1000, 1.0, 3.0], dtype=torch.float64)[:, None].repeat(1, 5)
    y = torch.tensor([0, -1, 200, 1100, -1074], dtype=exponent)
    assert torch.equal(tp.compile(torch.ldexp, strict_native=True)(x, y).nan_to_num(7.0), torch.ldexp(x, y).nan_to_num(7.0))
