"""Pointwise operators: one line an operator.

    define(operator, formula, result)

The formula's parameters without a default are the operator's promoted operands (`Scalar`s in the compute dtype of
the promoted dtype; Python numbers as they were given), those with a default its other arguments. `result`:

    SAME   computed in the promoted dtype of the operands
    FLOAT  the same, but integers and bool are computed in the default floating dtype
    TRUTH  computed in the promoted dtype, and bool comes out

The nominal dtype of the result is the one that eager recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..expr import cast
from . import scalar as s
from .lowered import Lowered, Read, compute, convert, promote, to
from .row import Library, Operator, Refuse, declare
from .scalar import Scalar, where

aten = torch.ops.aten
SAME, FLOAT, TRUTH = "same", "float", "truth"

# their rows take numbers that are read from tensors
VARYING = frozenset(
    getattr(aten, name)
    for name in """add sub rsub mul div pow addcmul addcdiv lerp clamp clamp_min clamp_max masked_fill where eq ne lt le gt ge
    fill full full_like new_full scalar_tensor remainder fmod floor_divide copysign""".split()
)


def define(operator: Operator | tuple[Operator, ...], formula: Callable[..., Scalar], result: str = SAME) -> None:
    """Declares a pointwise operator by its formula."""
    code = formula.__code__
    arity = code.co_argcount - len(formula.__defaults__ or ())
    operators = operator if isinstance(operator, tuple) else (operator,)

    @declare("pointwise", *operators)
    def lower(cx: Any, *args: Any, **kwargs: Any) -> Lowered:
        if len(args) < arity:
            args = (*args, *(kwargs.pop(name) for name in code.co_varnames[len(args) : arity]))
        return apply(cx, formula, args[:arity], result, args[arity:], kwargs)


def apply(
    cx: Any,
    formula: Callable[..., Any],
    operands: tuple[Any, ...],
    result: str = SAME,
    rest: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Lowered:
    """The formula applied to broadcast and promoted operands, under the size and dtype of the current node."""
    spec = cx.spec
    common = promote(operands)
    if result == FLOAT and not common.is_floating_point:
        common = torch.get_default_dtype()
    if common.is_complex:
        raise Refuse("complex arithmetic")
    size, dtype = spec.size, compute(common)
    xs = []
    for x in operands:
        if isinstance(x, Read):
            xs.append(_read(x, dtype))
        elif isinstance(x, Lowered):
            xs.append(Scalar(convert(cx.expanded(x, size).body, x.dtype, common)))
        else:
            xs.append(x)
    rest = tuple([_read(x, dtype) if isinstance(x, Read) else x for x in rest])
    kwargs = {k: _read(x, dtype) if isinstance(x, Read) else x for k, x in (kwargs or {}).items()}
    y = formula(*xs, *rest, **kwargs)
    body = y.expr if type(y) is Scalar else s.literal(y, dtype)
    return Lowered(size, spec.dtype, body if body.dtype == compute(spec.dtype) else cast(body, compute(spec.dtype)))


def _read(x: Read, dtype: torch.dtype) -> Scalar:
    if dtype == torch.bool or (x.dtype.is_floating_point and not dtype.is_floating_point):
        raise Refuse(f"a number of {x.dtype} as {dtype}")
    return Scalar(cast(x.body, dtype))


def floats(formula: Callable[..., Any]) -> Callable[..., Any]:
    """The formula on floating scalars, the identity on integers."""
    return lambda x: formula(x) if x.floating else x


def truth(x: Any) -> Any:
    """x != 0."""
    if not isinstance(x, Scalar):
        return bool(x)
    return x if x.dtype == torch.bool else s.ne(x, 0)


# ---- arithmetic ----------------------------------------------------------------------------------------------------


def _add(x, y, alpha=1):
    if any(isinstance(v, Scalar) and v.dtype == torch.bool for v in (x, y)):
        return x | (y if alpha else False)
    if alpha == 1:
        return s.add(x, y)
    kind = x if isinstance(x, Scalar) else y
    return s.fma(y, alpha, x) if kind.floating else s.add(x, s.mul(s.scalar(y, kind.dtype), alpha))


def _sub(x, y, alpha=1):
    return s.sub(x, y) if alpha == 1 else _add(x, y, -alpha)


def _pow(x, y):
    kind = x if isinstance(x, Scalar) else y
    if not kind.floating:
        return _integer_pow(x, y)
    if isinstance(y, Scalar):
        return s.exp2(y) if not isinstance(x, Scalar) and x == 2 else s.pow_(x, y)
    if y == 0:
        return s.scalar(1.0, x.dtype)
    if y in _POWERS:
        return _POWERS[y](x)
    return s.pow_(x, float(y))


_POWERS = {
    1: lambda x: x,
    2: lambda x: x * x,
    3: lambda x: x * x * x,
    0.5: s.sqrt,
    -0.5: s.rsqrt,
    -1: lambda x: 1 / x,
    -2: lambda x: 1 / (x * x),
}


def _integer_pow(x, y):
    kind = x if isinstance(x, Scalar) else y
    if kind.dtype == torch.bool or (not isinstance(y, Scalar) and (not isinstance(y, int) or y < 0)):
        raise Library("integer power")
    if isinstance(y, Scalar) or y > 64:
        return s.int_pow(x, y)
    out = s.scalar(1, x.dtype)
    square, bits = x, y
    while bits:
        if bits & 1:
            out = square if bits == y and y & 1 and out.expr.op == "const" else out * square
        bits >>= 1
        if bits:
            square = square * square
    return out


def _div(x, y, rounding_mode=None):
    kind = x if isinstance(x, Scalar) else y
    if rounding_mode is None:
        return s.div(x, y)
    if not kind.floating:
        if kind.dtype == torch.bool:
            raise Refuse("integer division of bool")
        return s.div_floor(x, y) if rounding_mode == "floor" else s.div_trunc(x, y)
    return s.trunc(s.div(x, y)) if rounding_mode == "trunc" else _floor_div(x, y)


def _floor_div(a, b):
    """Python's float floor division."""
    b = s.scalar(b, a.dtype) if isinstance(a, Scalar) else b
    a = s.scalar(a, b.dtype)
    mod = s.fmod(a, b)
    quotient = (a - mod) / b
    quotient = where(s.ne(mod, 0) & ((b < 0) ^ (mod < 0)), quotient - 1, quotient)
    floored = s.floor(quotient)
    floored = where(quotient - floored > 0.5, floored + 1, floored)
    return where(s.eq(b, 0), a / b, where(s.eq(quotient, 0), s.copysign(0, a / b), floored))


def _reduced(op):
    """Division of two bools or numbers has no dtype of its own."""

    def formula(x, y):
        kind = x if isinstance(x, Scalar) else y
        if kind.dtype == torch.bool:
            raise Refuse("remainder of bool")
        return op(x, y)

    return formula


define(aten.add, _add)
define(aten.sub, _sub)
define(aten.rsub, lambda x, y, alpha=1: _sub(y, x, alpha))
define(aten.mul, lambda x, y: s.mul(x, y))
define((aten.div.Tensor, aten.div.Scalar), lambda x, y: s.div(x, y), FLOAT)


@declare("pointwise", aten.div.Tensor_mode, aten.div.Scalar_mode)
def _div_mode(cx: Any, x: Any, y: Any, *, rounding_mode: str | None) -> Lowered:
    half = cx.spec.dtype if cx.spec.dtype != compute(cx.spec.dtype) else None
    if half is not None and rounding_mode == "trunc":  # eager rounds the quotient to the half type first
        return apply(cx, lambda a, b: s.trunc(s.div(a, b).to(half).to(torch.float32)), (x, y))
    return apply(cx, lambda a, b: _div(a, b, rounding_mode), (x, y), FLOAT if rounding_mode is None else SAME)


define(aten.floor_divide, lambda x, y: _div(x, y, "floor"))
define(aten.remainder, _reduced(s.remainder))
define(aten.fmod, _reduced(s.fmod))
define((aten.pow.Tensor_Tensor, aten.pow.Scalar), _pow)


@declare("pointwise", aten.pow.Tensor_Scalar)
def _pow_number(cx: Any, x: Lowered, y: Any) -> Lowered:
    if cx.spec.dtype == torch.float16 and y in (0.5, -0.5):  # eager has no square root here: pow(-inf, 0.5) is inf
        return apply(cx, lambda a: s.pow_(a, y), (x,))
    if isinstance(y, Read) and cx.spec.dtype.is_floating_point and cx.spec.dtype != torch.float16:
        roots = lambda a, b: where(s.eq(b, 0.5), s.sqrt(a), where(s.eq(b, -0.5), s.rsqrt(a), s.pow_(a, b)))  # noqa: E731
        return apply(cx, roots, (x, y))
    return apply(cx, _pow, (x, y))


define(aten.neg, lambda x: -x)
define(aten.abs, lambda x: abs(x))
define(aten.reciprocal, lambda x: 1 / x, FLOAT)
define(aten.addcmul, lambda x, a, b, value=1: s.fma(a * value, b, x) if x.floating else x + a * value * b)
define(aten.addcdiv, lambda x, a, b, value=1: x + (a / b if value == 1 else value * a / b))
define(aten.maximum, lambda x, y: s.maximum(x, y))
define(aten.minimum, lambda x, y: s.minimum(x, y))
define(aten.max.other, lambda x, y: s.maximum(x, y))
define(aten.min.other, lambda x, y: s.minimum(x, y))
define(aten.fmax, lambda x, y: s.fmax(x, y) if x.floating else s.maximum(x, y))
define(aten.fmin, lambda x, y: s.fmin(x, y) if x.floating else s.minimum(x, y))
define(aten.hypot, lambda x, y: s.hypot(x, y), FLOAT)
define(aten.atan2, lambda x, y: s.atan2(x, y), FLOAT)
define(aten.copysign, lambda x, y: s.copysign(x, y), FLOAT)
define(aten.gcd.default, lambda x, y: s.gcd(x, y))
define(aten.lcm.default, lambda x, y: s.lcm(x, y))


def _lerp(a, b, w):
    small = s.absolute(w) < 0.5 if isinstance(w, Scalar) else abs(w) < 0.5
    if isinstance(small, bool):
        return s.fma(b - a, w, a) if small else s.fma(b - a, w - 1, b)
    return s.fma(b - a, where(small, w, w - 1), where(small, a, b))


define((aten.lerp.Tensor, aten.lerp.Scalar), _lerp)


@declare("pointwise", aten.nextafter)
def _nextafter(cx: Any, x: Lowered, y: Lowered) -> Lowered:
    if cx.spec.dtype != compute(cx.spec.dtype):
        raise Library("nextafter of a half type")
    return apply(cx, s.nextafter, (x, y))


# ---- comparison, logic, bits -----------------------------------------------------------------------------------------

define(aten.eq, lambda x, y: s.eq(x, y), TRUTH)
define(aten.ne, lambda x, y: s.ne(x, y), TRUTH)
define(aten.lt, lambda x, y: s.lt(x, y), TRUTH)
define(aten.le, lambda x, y: s.le(x, y), TRUTH)
define(aten.gt, lambda x, y: s.gt(x, y), TRUTH)
define(aten.ge, lambda x, y: s.ge(x, y), TRUTH)
define(aten.logical_and, lambda x, y: s.logical_and(truth(x), truth(y)), TRUTH)
define(aten.logical_or, lambda x, y: s.logical_or(truth(x), truth(y)), TRUTH)
define(aten.logical_xor, lambda x, y: s.logical_xor(truth(x), truth(y)), TRUTH)
define(aten.logical_not, lambda x: ~truth(x), TRUTH)
define(aten.bitwise_and, lambda x, y: s.bitwise_and(x, y))
define(aten.bitwise_or, lambda x, y: s.bitwise_or(x, y))
define(aten.bitwise_xor, lambda x, y: s.bitwise_xor(x, y))
define(aten.bitwise_not, lambda x: ~x)
define((aten.bitwise_left_shift, aten.__lshift__), lambda x, y: s.lshift(x, y))
define((aten.bitwise_right_shift, aten.__rshift__), lambda x, y: s.rshift(x, y))
define(aten.isnan, lambda x: s.isnan(x) if x.floating else False, TRUTH)
define(aten.isinf, lambda x: s.isinf(x) if x.floating else False, TRUTH)
define(aten.isfinite, lambda x: abs(x) < math.inf if x.floating else True, TRUTH)
define(aten.isposinf, lambda x: s.eq(x, math.inf) if x.floating else False, TRUTH)
define(aten.isneginf, lambda x: s.eq(x, -math.inf) if x.floating else False, TRUTH)
define(aten.signbit, lambda x: s.signbit(x) if x.floating else False if x.dtype == torch.bool else x < 0, TRUTH)


def _sign(x):
    if x.dtype == torch.bool:
        return x
    return where(x > 0, 1, where(x < 0, s.scalar(-1, x.dtype), s.scalar(0, x.dtype))) if x.dtype != torch.uint8 else where(x > 0, s.scalar(1, x.dtype), 0)


define((aten.sign, aten.sgn), _sign)
define(aten.heaviside, lambda x, y: where(s.eq(x, 0), y, (x > 0).to(x.dtype)))


@declare("pointwise", aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def _where(cx: Any, condition: Lowered, x: Any, y: Any) -> Lowered:
    test = Scalar(cx.expanded(condition, cx.spec.size).body)
    common = promote((x, y))
    x, y = (Lowered((), common, convert(v.body, v.dtype, common)) if isinstance(v, Read) else v for v in (x, y))
    return apply(cx, lambda a, b: where(truth(test), s.scalar(a, compute(common)), b), (x, y))


@declare("pointwise", aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(cx: Any, x: Lowered, mask: Lowered, value: Any) -> Lowered:
    if isinstance(value, Read):
        value = _read(value, compute(x.dtype)).to(x.dtype).to(compute(x.dtype))
    elif isinstance(value, Lowered):
        value = Scalar(cx.expanded(to(value, x.dtype), cx.spec.size).body)
    elif x.dtype == torch.bool:
        value = bool(value)
    test = truth(Scalar(cx.expanded(mask, cx.spec.size).body))
    return apply(cx, lambda a: where(test, value, a), (x,))


def _clamped(cx: Any, x: Lowered, low: Any, high: Any) -> Lowered:
    operands = tuple(v for v in (x, low, high) if v is not None)
    if any(isinstance(v, float) and math.isnan(v) for v in (low, high)):
        return apply(cx, lambda a, *_: s.scalar(math.nan, a.dtype), operands)

    def formula(a, *bounds):
        values = iter(bounds)
        if low is not None:
            v = next(values)
            a = s.maximum(a, v) if isinstance(v, Scalar) else s.clamp_min(a, v)
        if high is not None:
            v = next(values)
            a = s.minimum(a, v) if isinstance(v, Scalar) else s.clamp_max(a, v)
        return a

    return apply(cx, formula, operands)


@declare("pointwise", aten.clamp.default, aten.clamp.Tensor, aten.hardtanh.default)
def _clamp(cx: Any, x: Lowered, min: Any = None, max: Any = None, min_val: Any = -1, max_val: Any = 1) -> Lowered:
    if cx.target is aten.hardtanh.default:
        min, max = min_val if min is None else min, max_val if max is None else max
    return _clamped(cx, x, min, max)


@declare("pointwise", aten.clamp_min.default, aten.clamp_min.Tensor)
def _clamp_min(cx: Any, x: Lowered, min: Any) -> Lowered:
    return _clamped(cx, x, min, None)


@declare("pointwise", aten.clamp_max.default, aten.clamp_max.Tensor)
def _clamp_max(cx: Any, x: Lowered, max: Any) -> Lowered:
    return _clamped(cx, x, None, max)


# ---- rounding and functions of one variable --------------------------------------------------------------------------


def _round(x, decimals=0):
    if not x.floating or decimals == 0:
        return s.round_(x) if x.floating else x
    ten = 10.0 ** abs(decimals)
    return s.round_(x / ten) * ten if decimals < 0 else s.round_(x * ten) / ten


define(aten.floor, floats(s.floor))
define(aten.ceil, floats(s.ceil))
define((aten.trunc, aten.fix), floats(s.trunc))
define(aten.frac, lambda x: x - s.trunc(x))
define((aten.round.default, aten.round.decimals), _round)

for _name in (
    "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
    "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "lgamma", "sigmoid",
):  # fmt: skip
    define(getattr(aten, _name), (lambda f: lambda x: f(x))(s.function(_name)), FLOAT)

define(aten.angle, lambda x: where(s.isnan(x), x, where(x < 0, s.scalar(math.pi, x.dtype), 0)), FLOAT)
define(aten.deg2rad, lambda x: x * (math.pi / 180), FLOAT)
define(aten.rad2deg, lambda x: x * (180 / math.pi), FLOAT)
define(aten.sinc, lambda x: where(s.eq(x, 0), 1, s.sin(x * math.pi) / (x * math.pi)), FLOAT)
define(aten.special_entr, lambda x: where(s.isnan(x), x, where(x > 0, -x * s.log(x), where(s.eq(x, 0), s.scalar(0, x.dtype), -math.inf))), FLOAT)


def _logit(x, eps=None):
    if eps is not None and eps >= 0:  # eager clamps to no negative bound
        low, high = eps, 1 - eps
        x = where(x < low, low, where(x > high, high, x))
    return s.log(x / (1 - x))


def _logaddexp(x, y):
    high = s.maximum(x, y)
    return where(s.isinf(x) & s.eq(x, y), x, high + s.log1p(s.exp(-abs(x - y))))


def _logaddexp2(x, y):
    high = s.maximum(x, y)
    return where(s.isinf(x) & s.eq(x, y), x, high + s.log1p(s.exp2(-abs(x - y))) * (1 / math.log(2)))


def _xlogy(log):
    def formula(x, y):
        kind = x if isinstance(x, Scalar) else y
        x, y = s.scalar(x, kind.dtype), s.scalar(y, kind.dtype)
        return where(s.isnan(y), s.scalar(math.nan, y.dtype), where(s.eq(x, 0), s.scalar(0, x.dtype), x * log(y)))

    return formula


define(aten.logit, _logit, FLOAT)
define(aten.logaddexp, _logaddexp)
define(aten.logaddexp2, _logaddexp2)
define((aten.xlogy, aten.special_xlogy), _xlogy(s.log), FLOAT)
define(aten.special_xlog1py, _xlogy(s.log1p), FLOAT)


@declare("pointwise", aten.nan_to_num)
def _nan_to_num(cx: Any, x: Lowered, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Lowered:
    if not x.dtype.is_floating_point:
        return x
    info = torch.finfo(x.dtype)
    up, down = info.max if posinf is None else posinf, info.min if neginf is None else neginf

    def formula(a):
        return where(s.isnan(a), 0.0 if nan is None else nan, where(s.eq(a, math.inf), up, where(s.eq(a, -math.inf), down, a)))

    return apply(cx, formula, (x,))


# ---- activations -----------------------------------------------------------------------------------------------------


def _gelu(x, approximate="none"):
    if approximate == "none":
        return x * 0.5 * (1 + s.erf(x * math.sqrt(0.5)))
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1 + s.tanh(inner))


def _softplus(x, beta=1, threshold=20):
    scaled = x if beta == 1 else x * beta
    soft = s.log1p(s.exp(scaled))
    return where(scaled > threshold, x, soft if beta == 1 else soft / beta)


def _elu(x, alpha=1, scale=1, input_scale=1):
    negative = s.expm1(x if input_scale == 1 else x * input_scale)
    negative = negative if alpha * scale == 1 else negative * (alpha * scale)
    return where(x < 0, negative, x if scale == 1 else x * scale)


def _relu6(x):
    return s.clamp_max(s.clamp_min(x + 3, 0), 6)


define(aten.relu, lambda x: s.clamp_min(x, 0))
define(aten.leaky_relu, lambda x, negative_slope=0.01: where(x > 0, x, x * negative_slope))
define(aten.elu, _elu)
define(aten.celu, lambda x, alpha=1.0: _elu(x, alpha, 1, 1 / alpha))
define(aten.gelu, _gelu)
define(aten.silu, lambda x: x / (1 + s.exp(-x)))
define(aten.mish, lambda x: x * s.tanh(s.log1p(s.exp(x))))
define(aten.hardswish, lambda x: x * _relu6(x) / 6)
define(aten.hardsigmoid, lambda x: _relu6(x) / 6)
define(aten.softplus, _softplus)
define(aten.threshold, lambda x, threshold=0, value=0: where(x <= threshold, value, x))
define((aten._prelu_kernel, aten.prelu), lambda x, w: where(x > 0, x, w * x))
define(aten.hardshrink, lambda x, lambd=0.5: where((x >= -lambd) & (x <= lambd), 0, x))
define(aten.softshrink, lambda x, lambd=0.5: where(x > lambd, x - lambd, where(x < -lambd, x + lambd, where(s.isnan(x), x, 0))))


@declare("pointwise", aten.log_sigmoid_forward)
def _log_sigmoid(cx: Any, x: Lowered) -> tuple[Lowered, Lowered]:
    out, buffer = cx.specs
    a = Scalar(x.body)
    z = s.exp(-abs(a))
    second = Lowered(buffer.size, buffer.dtype, z.expr) if buffer.size == x.size else Lowered(buffer.size, buffer.dtype, s.literal(0, compute(buffer.dtype)))
    return Lowered(x.size, out.dtype, (s.minimum(a, 0) - s.log1p(z)).expr), second


# ---- losses: a pointwise formula, then a mean or a sum -----------------------------------------------------------------


def _loss(operator: Operator, formula: Callable[..., Scalar]) -> None:
    """A loss of (input, target, reduction, parameters): 0 leaves the elements, 1 is their mean, 2 their sum."""

    @declare("pointwise", operator)
    def lower(cx: Any, x: Lowered, y: Lowered, reduction: int = 1, *rest: Any, **kwargs: Any) -> Lowered:
        size = tuple(torch.broadcast_shapes(x.size, y.size))
        common = promote((x, y))
        a, b = (Scalar(convert(cx.expanded(v, size).body, v.dtype, common)) for v in (x, y))
        each = Lowered(size, cx.spec.dtype, formula(a, b, *rest, **kwargs).expr)
        if reduction == 0:
            return each
        (total,) = cx.reduce("sum", each)
        n = each.numel
        return total if reduction == 2 else Lowered((), total.dtype, (Scalar(total.body) / float(n)).expr)


def _smooth_l1(x, y, beta=1.0):
    z = abs(x - y)
    return z if beta == 0 else where(z < beta, 0.5 * z * z / beta, z - 0.5 * beta)


def _huber(x, y, delta=1.0):
    z = abs(x - y)
    return where(z <= delta, 0.5 * z * z, delta * (z - 0.5 * delta))


_loss(aten.mse_loss.default, lambda x, y: (x - y) * (x - y))
_loss(aten.smooth_l1_loss.default, _smooth_l1)
_loss(aten.huber_loss.default, _huber)
_loss(aten.soft_margin_loss.default, lambda x, y: s.log1p(s.exp(-x * y)))


def _bce(cx: Any, x: Any, y: Any, weight: Any, reduction: int, formula: Callable[..., Scalar]) -> Lowered:
    size = tuple(torch.broadcast_shapes(*(v.size for v in (x, y, weight) if v is not None)))
    a, b, w = (None if v is None else Scalar(convert(cx.expanded(v, size).body, v.dtype, x.dtype)) for v in (x, y, weight))
    each = formula(a, b)
    loss = Lowered(size, cx.spec.dtype, (each if w is None else each * w).expr)
    if reduction == 0:
        return loss
    (total,) = cx.reduce("sum", loss)
    return total if reduction == 2 else Lowered((), total.dtype, (Scalar(total.body) / float(loss.numel)).expr)


@declare("pointwise", aten.binary_cross_entropy_with_logits.default)
def _bce_with_logits(cx: Any, x: Any, y: Any, weight: Any = None, pos_weight: Any = None, reduction: int = 1) -> Lowered:
    if pos_weight is not None:
        raise Library("weights of positive labels")
    return _bce(cx, x, y, weight, reduction, lambda a, b: (1 - b) * a - (s.minimum(a, 0) - s.log1p(s.exp(-abs(a)))))


# ---- conversion and copies -------------------------------------------------------------------------------------------


@declare("pointwise", aten._to_copy)
def _to_copy(cx: Any, x: Lowered, dtype: Any = None, device: Any = None, **_: Any) -> Lowered:
    if device is not None and torch.device(device).type != cx.device_of(x):
        raise Library("copy between devices")
    return to(x, cx.spec.dtype)


@declare("pointwise", aten.clone, aten.lift_fresh_copy, aten.lift_fresh, aten.contiguous, aten.positive, aten.conj_physical, aten.real)
def _clone(cx: Any, x: Lowered, memory_format: Any = None) -> Lowered:
    return Lowered(x.size, x.dtype, x.body, x.origins)


@declare("pointwise", aten.copy.default)
def _copy(cx: Any, x: Lowered, src: Lowered, non_blocking: bool = False) -> Lowered:
    return cx.expanded(to(src, x.dtype), x.size)


@declare("pointwise", aten.fill.Scalar, aten.fill.Tensor)
def _fill(cx: Any, x: Lowered, value: Any) -> Lowered:
    if isinstance(value, Read) and not x.dtype.is_floating_point:
        raise Refuse("a number that is read from a tensor, as an integer")
    if isinstance(value, Lowered):
        return cx.expanded(to(value, x.dtype), x.size)
    return Lowered(x.size, x.dtype, s.literal(value, compute(x.dtype)))
