"""Table 4.2: which composites become chains, and that a chain has the operator's values and gradients."""

import math

import pytest
import torch
from torch.nn import functional as F

import tensorplay as tp
from tensorplay.graph.choices import OPTIONAL, Choices
from tensorplay.graph.composites import KEPT, ROWS
from tensorplay.graph.passes import run_passes
from tensorplay.testing import FRONT, eq, near, targets

from .programs import captured, observed, same

EXTREMES = [-math.inf, -3.4e38, -100.0, *[k / 4 for k in range(-12, 13)], -1e-8, -0.0, 1e-8, 1e-40, 100.0, 3.4e38, math.inf, math.nan]
S = torch.tensor(EXTREMES * 3)
T, U = S.roll(7), S.roll(13)
DECOMPOSED = {
    "selu": (F.selu, S), "relu6": (F.relu6, S), "mish": (F.mish, S), "tanhshrink": (F.tanhshrink, S),
    "hardshrink": (F.hardshrink, S), "softshrink": (F.softshrink, S), "clamp": (lambda x: torch.clamp(x, -1, 2), S),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.7), S, T), "addcmul": (lambda *a: torch.addcmul(*a, value=2.5), S, T, U),
    "addcdiv": (lambda *a: torch.addcdiv(*a, value=2.5), S, T, U), "logit": (lambda x: torch.logit(x, 1e-6), S),
    "exp2": (torch.exp2, S), "square": (torch.square, S), "deg2rad": (torch.deg2rad, S), "rad2deg": (torch.rad2deg, S),
}  # fmt: skip
KEEP = {
    "silu": F.silu, "gelu": F.gelu, "elu": F.elu, "leaky_relu": F.leaky_relu, "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid, "threshold": lambda x: F.threshold(x, 0.1, 20), "softplus": F.softplus,
    "log1p": torch.log1p, "expm1": torch.expm1, "log10": torch.log10, "sinh": torch.sinh, "cosh": torch.cosh,
    "asinh": torch.asinh, "acosh": torch.acosh, "atanh": torch.atanh,
}  # fmt: skip


def test_the_tables_are_complete():
    assert KEEP.keys() == KEPT and DECOMPOSED.keys() | set(OPTIONAL) == ROWS.keys()


@pytest.mark.parametrize("name", DECOMPOSED)
def test_decomposed(name):
    f, *args = DECOMPOSED[name]
    cf = tp.compile(lambda *a: f(*a) * 2, strict_native=True)
    assert near(cf(*args), f(*args) * 2, 1e-5)
    assert name not in targets(FRONT(cf))


@pytest.mark.parametrize("name", KEEP)
def test_kept(name):
    x = S[~S.isinf()] if name == "gelu" else S  # eager's gelu(inf) is NaN in its vector loop and inf behind it
    cf = tp.compile(lambda x: KEEP[name](x) * 2, strict_native=True)
    assert near(cf(x), KEEP[name](x) * 2, 1e-5)
    assert sum(t.lstrip("_") == name for t in targets(FRONT(cf))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", DECOMPOSED)
def test_the_rule_on_tensors(name, dtype):
    f, *args = DECOMPOSED[name]
    args = [a.to(dtype) for a in args]
    graph = captured(f, *args)
    got, want = observed(run_passes(graph).graph, args), observed(f, args)
    assert near(got[0][0], want[0][0], 1e-5) and got[1:] == want[1:]


ARGUMENTS = {
    "no bound": lambda x: torch.clamp(x, None, 1), "lower": lambda x: x.clamp(min=-1), "crossed": lambda x: x.clamp(2, 1),
    "zero": lambda x: x.clamp(0.0), "negative zero": lambda x: x.clamp(-0.0, -0.0), "clip": lambda x: x.clip(-1, 1),
    "nan": lambda x: x.clamp(math.nan), "tensor": lambda x: x.clamp(x.roll(1), x.roll(2)), "huge": lambda x: x.clamp(max=3e38),
    "infinite": lambda x: x.clamp(-math.inf, math.inf), "hardshrink": lambda x: F.hardshrink(x, 0.0),
    "hardshrink negative": lambda x: F.hardshrink(x, -1.0), "softshrink": lambda x: F.softshrink(x, 0.0),
    "lerp": lambda x: torch.lerp(x, x.roll(3), 0.25), "lerp far": lambda x: torch.lerp(x, x.roll(3), 2),
    "lerp tensor": lambda x: torch.lerp(x.clamp(-100, 100), x.clamp(-100, 100).roll(3), torch.linspace(-1, 2, x.numel(), dtype=x.dtype)),
    "lerp to itself": lambda x: torch.lerp(x, x, 0.3), "logit": lambda x: torch.logit(x), "logit zero": lambda x: x.logit(0.0),
    "logit half": lambda x: torch.logit(x, 0.5), "special": lambda x: torch.special.exp2(x), "int": lambda x: x.nan_to_num(3).clamp(-9, 9).int().square(),
    "int clamp": lambda x: (x.nan_to_num(3).clamp(-9, 9) * 100).int().clamp(-50, 2**31 - 1), "int bound": lambda x: torch.arange(5).clamp(max=2**62) * 1 + x[:5],
    "addcmul": lambda x: torch.addcmul(x, x, x), "keyword": lambda x: torch.square(input=x), "empty": lambda x: F.selu(x[:0]),
    "0-d": lambda x: F.relu6(x[5]), "transposed": lambda x: F.relu6(x.view(3, -1).t()), "strided": lambda x: F.mish(x[::2]),
    "expanded": lambda x: F.selu(x[:1].expand(4, 1)), "broadcast": lambda x: torch.addcmul(x[:3], x[:6].view(2, 3), x[1]),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name):
    f = ARGUMENTS[name]
    got, want = observed(run_passes(captured(f, S)).graph, (S,)), observed(f, (S,))
    if isinstance(want[0], type):
        assert got == want
    else:
        assert near(got[0][0], want[0][0], 1e-5) and got[1:] == want[1:]


def test_bits_are_eager_s_where_the_row_says_so():
    for name in ("relu6", "tanhshrink", "hardshrink", "clamp", "exp2", "square", "deg2rad", "rad2deg"):
        f, *args = DECOMPOSED[name]
        assert ROWS[name].exact and same(observed(run_passes(captured(f, *args)).graph, args), observed(f, args)), name


@pytest.mark.parametrize("name", DECOMPOSED)
def test_gradients_are_the_composite_s_own(name):
    f, *args = DECOMPOSED[name]
    args = [a.clone().requires_grad_() for a in args]
    graph = captured(f, *args)
    front = run_passes(graph, choices=Choices(training=True)).graph
    assert targets(front) == targets(graph)
    want = torch.autograd.grad(f(*args).sum(), args)
    assert eq(torch.autograd.grad(front(*args)[0].sum(), args), want)


@pytest.mark.parametrize("name", OPTIONAL)
def test_optional(name):
    x = torch.randn(4, 6, 5)
    programs = {
        "softmax": lambda x: torch.softmax(x, -1) * 2,
        "log_softmax": lambda x: F.log_softmax(x, 1) * 2,
        "group_norm": lambda x: F.group_norm(x, 3, torch.arange(6.0), torch.ones(6)) * 2,
    }
    f = programs[name]
    plain = tp.compile(f, strict_native=True)
    asked = tp.compile(f, strict_native=True, options={"decompose": (name,)})
    assert near(plain(x), f(x), 1e-5) and near(asked(x), f(x), 1e-5)
    assert name in targets(FRONT(plain)) and name not in targets(FRONT(asked))


def test_softmax_of_rows_with_infinities():
    x = torch.tensor([[-math.inf, 0.0, 1.0], [math.inf, 0.0, 1.0], [-math.inf] * 3, [math.nan, 0.0, 1.0], [1e38, -1e38, 0.0]])
    for f in (lambda x: torch.softmax(x, -1), lambda x: torch.log_softmax(x, -1), lambda x: x.softmax(0, torch.float64)):
        front = run_passes(captured(f, x), choices=Choices(optional=("softmax", "log_softmax"))).graph
        assert "softmax" not in "".join(targets(front)[1:-1])
        assert near(front(x)[0], f(x), 1e-6)


def test_strict_numerics_keep_what_loses_digits():
    graph = captured(lambda x: F.selu(x) + F.relu6(x), S)
    assert "selu" in targets(run_passes(graph, choices=Choices(strict=True)).graph)
    assert "relu6" not in targets(run_passes(graph, choices=Choices(strict=True)).graph)


def test_half_types_and_autocast_keep_composites():
    graph = captured(lambda x: F.selu(x) * 2, S.bfloat16())
    assert "selu" in targets(run_passes(graph).graph)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "selu" in targets(run_passes(captured(lambda x: F.selu(x) * 2, S)).graph)


def test_what_users_write_stays():
    graph = captured(lambda x: torch.log(1 + x), torch.tensor([1e-10]))
    assert targets(run_passes(graph).graph) == ["x", "add", "log", "output"]
    cf = tp.compile(torch.log1p, strict_native=True)
    assert abs(cf(torch.tensor([1e-10])).item() / 1e-10 - 1) < 2**-22


def test_an_unknown_choice_is_an_error_at_once():
    with pytest.raises(ValueError, match="softmax, log_softmax, group_norm"):
        tp.compile(lambda x: x, options={"decompose": ("selu",)})
    with pytest.raises(ValueError, match="numerics"):
        tp.compile(lambda x: x, options={"numerics": "fast"})
