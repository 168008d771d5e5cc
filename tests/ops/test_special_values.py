"""Every pointwise row on ordinary and special values of every dtype that eager takes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tensorplay.stax.loops.nodes import Extern
from tensorplay.stax.ops.table import ROWS
from tests.ops.single import both, same

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def values(dtype: torch.dtype) -> torch.Tensor:
    """Special and ordinary values of a dtype."""
    if dtype == torch.bool:
        return torch.tensor([True, False])
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.tensor([0, 1, 2, 3, 5, 7, info.max, info.min, info.max - 1, info.min + 1, max(info.min, -1), max(info.min, -3)], dtype=dtype)
    info = torch.finfo(dtype)
    numbers = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, 7.25, -7.25, 20.5, 90.0, -90.0, 1e-3, math.inf, -math.inf, math.nan]
    numbers += [info.max, info.min, info.tiny, -info.tiny, info.tiny / 4, info.eps, math.pi]
    return torch.tensor(numbers, dtype=torch.float64).to(dtype)


def pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    v = values(dtype)
    return v.repeat_interleave(len(v)), v.repeat(len(v))


UNARY = [
    "neg", "abs", "reciprocal", "isnan", "isinf", "isposinf", "isneginf", "signbit", "sign", "sgn", "logical_not", "bitwise_not",
    "floor", "ceil", "trunc", "frac", "round", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin",
    "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "lgamma", "sigmoid",
    "deg2rad", "rad2deg", "sinc", "special_entr", "logit", "nan_to_num", "relu", "leaky_relu", "elu", "celu", "gelu", "silu",
    "mish", "hardswish", "hardsigmoid", "softplus", "hardshrink", "softshrink", "hardtanh", "log_sigmoid_forward", "clone",
    "isfinite", "angle",
]  # fmt: skip
BINARY = [
    "add", "sub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "maximum", "minimum", "fmax", "fmin", "hypot", "atan2",
    "copysign", "nextafter", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "bitwise_and",
    "bitwise_or", "bitwise_xor", "heaviside", "logaddexp", "logaddexp2", "xlogy", "special_xlog1py", "_prelu_kernel", "clamp_min", "clamp_max", "gcd", "lcm",
]  # fmt: skip
# formulas of several roundings that eager's vectorized kernels arrange in another way; all others agree to the bit
# with the interpreter, or, in half types that eager rounds once more, to one unit
LOOSE = {
    "gelu": 8, "mish": 8, "logit": 4, "silu": 4, "elu": 8, "celu": 8, "logaddexp": 8, "logaddexp2": 8, "log_sigmoid_forward": 4, "sinc": 8,
    "softplus": 8, "deg2rad": 1, "rad2deg": 1, "special_entr": 2, "xlogy": 2, "special_xlog1py": 2, "hardswish": 2, "hardsigmoid": 2, "sigmoid": 2,
}  # fmt: skip


EITHER_ZERO = {"fmax", "fmin"}  # of 0 and -0 the C library may choose
BY_PLACE = {"softshrink", "gelu"}  # eager's sign of zero depends on where the value stands, and on whether oneDNN takes the tensor


def overload(name: str, arity: int) -> object:
    packet = getattr(aten, name)
    for which in (("Tensor", "default", "Tensor_Tensor", "other") if arity == 2 else ("default",)):
        if which in packet.overloads():
            return getattr(packet, which)
    raise AssertionError(name)


def elsewhere(target: object, args: tuple) -> list[torch.Tensor]:
    """What eager gives these values where they stand otherwise: alone, among others, and not side by side."""
    alone = [target(*[a[k : k + 1] for a in args]) for k in range(len(args[0]))]
    wide = [a.repeat_interleave(64).view(-1, 64) for a in args]
    return [torch.cat(alone), target(*wide)[:, 5], target(*[a.t() for a in wide])[5]]


def verdict(target: object, args: tuple, kwargs: dict | None = None, ulps: float = 0, name: str = "") -> str:
    """'' where the loops give eager's values, or eager refuses the arguments."""
    try:
        target(*args, **(kwargs or {}))
    except (RuntimeError, TypeError, ValueError):
        return ""
    eager, ours, loops = both(target, args, kwargs)
    # a refusal falls back to torch, which is right by construction
    if any(isinstance(n, Extern) for n in loops.nodes):
        return ""
    if name in BY_PLACE:
        (found,), (mine,) = eager, ours
        for other in elsewhere(target, args):
            found = torch.where((other == mine) & (other.signbit() == mine.signbit()), other, found)
        eager = [found]
    half = any(isinstance(a, torch.Tensor) and a.dtype in (torch.bfloat16, torch.float16) for a in args)
    return "; ".join(filter(None, (same(a, b, max(ulps, 1 if half else 0), name in EITHER_ZERO) for a, b in zip(eager, ours, strict=True))))


@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    wrong = {}
    for d in DTYPES:
        v = values(d)
        if name == "gelu" and d.is_floating_point:  # eager's vectorized erf gives NaN at infinity
            v = v[~v.isinf()]
        wrong[d] = verdict(overload(name, 1), (v,), ulps=LOOSE.get(name, 0), name=name)
    assert not {d: w for d, w in wrong.items() if w}


@pytest.mark.parametrize("name", BINARY)
def test_binary(name: str) -> None:
    wrong = {}
    for d in DTYPES:
        x, y = pairs(d)
        if name in ("floor_divide", "remainder", "fmod") and not d.is_floating_point:
            x, y = x[y != 0], y[y != 0]  # eager raises; the kernels check
            least = torch.iinfo(d).min if d != torch.bool else None
            keep = ~((x == least) & (y == -1)) if least else torch.ones_like(x, dtype=torch.bool)  # undefined in eager
            x, y = x[keep], y[keep]
        if name == "lcm" and not d.is_floating_point and d != torch.bool:  # eager divides the smallest by -1: a signal
            keep = (x != torch.iinfo(d).min) & (y != torch.iinfo(d).min)
            x, y = x[keep], y[keep]
        if name == "floor_divide" and d.is_floating_point:  # torch's vectorized fmod, the atom's reference, gives NaN there
            keep = ~((x / y).abs() > 1e30)
            x, y = x[keep], y[keep]
        if name.startswith("logaddexp") and d.is_floating_point:  # the sum may cancel
            keep = (x.abs() > 1) | (x == 0)
            x, y = x[keep], y[keep]
        wrong[d] = verdict(overload(name, 2), (x, y), ulps=LOOSE.get(name, 0), name=name)
    assert not {d: w for d, w in wrong.items() if w}


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_division_modes(mode: str) -> None:
    for d in (torch.float32, torch.float64, torch.int32, torch.uint8):
        x, y = pairs(d)
        if not d.is_floating_point:
            least = torch.iinfo(d).min
            keep = (y != 0) & ~((x == least) & (y.long() == -1))
        else:
            keep = ~((x / y).abs() > 1e30)
        x, y = x[keep], y[keep]
        assert not verdict(aten.div.Tensor_mode, (x, y), {"rounding_mode": mode}), d


@pytest.mark.parametrize("name", ["add", "sub", "rsub"])
@pytest.mark.parametrize("alpha", [1, 2, -3, 0.5])
def test_alpha(name: str, alpha: float) -> None:
    for d in DTYPES:
        x, y = pairs(d)
        if d.is_floating_point:  # the interpreter's fused multiplication rounds twice
            keep = (x.abs() < 1e30) & (y.abs() < 1e30)
            x, y = x[keep], y[keep]
        assert not verdict(getattr(aten, name).Tensor, (x, y), {"alpha": alpha}, ulps=1), d


@pytest.mark.parametrize("number", [0, 1, 2, 3, -1, -2, 0.5, -0.5, 2.5, True, math.inf, math.nan, 1000])
def test_numbers_contribute_their_kind(number: float) -> None:
    names = ("add", "sub", "mul", "div", "pow", "eq", "lt", "ge", "maximum", "fmod", "remainder", "clamp_min", "bitwise_and", "copysign", "logical_or")
    wrong = {}
    for name, d in itertools.product(names, DTYPES):
        if name in ("fmod", "remainder") and number == 0:
            continue
        packet = getattr(aten, name)
        for which in ("Tensor", "Scalar", "Tensor_Scalar", "default"):
            if which in packet.overloads():
                try:
                    found = verdict(getattr(packet, which), (values(d), number))
                except TypeError:
                    continue
                if found:
                    wrong[name, which, d] = found
    assert not wrong


def test_promotion_is_eager_s() -> None:
    """The 12 by 12 matrix of operand kinds for add, mul, div and where (row 6.16)."""
    kinds = [torch.ones(3, dtype=d) for d in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool)]
    kinds += [torch.tensor(2, dtype=torch.int64), torch.tensor(2.0, dtype=torch.float64), 2, 2.5, True]
    for a, b in itertools.product(kinds, kinds):
        if not isinstance(a, torch.Tensor):
            continue
        for target in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor):
            assert not verdict(target, (a, b)), (target, a, b)
        if isinstance(b, torch.Tensor):
            assert not verdict(aten.where.self, (torch.tensor([True, False, True]), a, b)), (a, b)


def test_clamp() -> None:
    for d in DTYPES:
        v = values(d)
        for low, high in ((-1, 1), (None, 2), (0, None), (2, 1), (0.5, 3), (math.nan, 1), (-math.inf, math.inf)):
            if low is None and high is None:
                continue
            assert not verdict(aten.clamp.default, (v, low, high)), (d, low, high)
        x, y = pairs(d)
        assert not verdict(aten.clamp.Tensor, (x, y, y.flip(0))), d


def test_three_operands() -> None:
    for d in (torch.float32, torch.float64, torch.bfloat16, torch.int32):
        x, y = pairs(d)
        if d.is_floating_point:  # the interpreter's fused multiplication rounds twice
            keep = ~(x.abs() > 1e30) & ~(y.abs() > 1e30)
            x, y = x[keep], y[keep]
        z = y.flip(0)
        for value in (1, 2):
            assert not verdict(aten.addcmul.default, (x, y, z), {"value": value}, ulps=1), d
            if d.is_floating_point:
                assert not verdict(aten.addcdiv.default, (x, y, z), {"value": value}), d
        if d.is_floating_point:
            for weight in (0.25, 0.75):
                assert not verdict(aten.lerp.Scalar, (x, y, weight), ulps=2), d
            assert not verdict(aten.lerp.Tensor, (x, y, z), ulps=2), d
        for fill in (0, 2):
            assert not verdict(aten.masked_fill.Scalar, (x, y > 1, fill)), d


def test_conversion_between_all_dtypes() -> None:
    for a, b in itertools.product(DTYPES, DTYPES):
        v = values(a)
        if a.is_floating_point and not b.is_floating_point:
            v = v[v.isfinite() & (v.abs() < 100)].abs()  # beyond it the conversion is undefined
        assert not verdict(aten._to_copy.default, (v,), {"dtype": b}), (a, b)


def test_every_pointwise_row_is_tested() -> None:
    from tests.ops.test_backward_values import TESTED

    named = {
        *TESTED,
        *UNARY, *BINARY, "rsub", "addcmul", "addcdiv", "lerp", "where", "masked_fill", "clamp", "_to_copy", "max", "min", "fix",
        "bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__", "special_xlogy", "threshold", "prelu", "mse_loss",
        "smooth_l1_loss", "huber_loss", "soft_margin_loss", "lift_fresh_copy", "lift_fresh", "contiguous", "positive", "conj_physical",
        "real", "copy", "fill", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    }  # fmt: skip
    rows = {k._schema.name.split("::")[1] if hasattr(k, "_schema") else k.__name__ for k, r in ROWS.items() if r.kind == "pointwise"}
    assert rows <= named, rows - named
