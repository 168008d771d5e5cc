"""Backward operators of activations, losses and normalizations: rows like any other (section 5.1).

Formulas are those of eager's kernels, so that special values come out alike: the derivative of relu at 0 is 0, a
masked element gives 0 whatever its gradient is, NaN passes where eager lets it pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..expr import cast, masked, value
from . import scalar as s
from .lowered import Lowered, compute, numel, point, to, widened
from .norms import placed
from .pointwise import FLOAT, apply, define
from .reductions import mapped, nominal
from .row import Library, declare
from .scalar import Scalar, where
from .views import reshaped

aten = torch.ops.aten
MEAN = 1  # at::Reduction


# ---- activations -----------------------------------------------------------------------------------------------------


def _gelu(g, x, approximate="none"):
    if approximate == "none":
        cdf = 0.5 * (1 + s.erf(x * math.sqrt(0.5)))
        return g * (cdf + x * (s.exp(x * x * -0.5) * (0.5 * math.sqrt(2 / math.pi) * 1.0)))
    beta, kappa = math.sqrt(2 / math.pi), 0.044715
    square = x * x
    inner = s.tanh(beta * (x + kappa * (square * x)))
    left = 0.5 * x * (1 - inner * inner) * (beta * (1 + 3 * kappa * square))
    return g * (0.5 * (1 + inner) + left)


def _silu(g, x):
    y = 1 / (1 + s.exp(-x))
    return g * y * (1 + x * (1 - y))


def _mish(g, x):
    y = 1 / (1 + s.exp(-x))
    t = s.tanh(s.log1p(s.exp(x)))
    return g * (t + x * y * (1 - t * t))


def _elu(g, alpha, scale, input_scale, is_result, x):
    if is_result:
        negative = g * input_scale * (x + alpha * scale)
    else:
        negative = g * input_scale * (alpha * scale) * s.exp(x * input_scale)
    return where(x > 0, g * scale, negative)


def _softplus(g, x, beta=1, threshold=20):
    z = s.exp(x * beta)
    return where(x * beta > threshold, g, g * z / (z + 1))


def _hardswish(g, x):
    return where(x >= 3, g, where(x <= -3, _zero(x), g * (x / 3 + 0.5)))


def _log_sigmoid(g, x, buffer):
    z = s.exp(-abs(x))
    return g * (where(x < 0, s.scalar(1, x.dtype), 0) - where(x < 0, s.scalar(1, x.dtype), -1) * (z / (1 + z)))


def _logit(g, x, eps=None):
    low, high, outside = (0.0, 1.0, math.nan) if eps is None or eps < 0 else (eps, 1.0 - eps, 0.0)
    inner = where(s.eq(x, 0) | s.eq(x, 1), g * math.inf, g / (x * (1 - x)))
    return where((x >= low) & (x <= high), inner, s.scalar(outside, x.dtype))


def _zero(x):
    return s.scalar(0, x.dtype)


define(aten.tanh_backward, lambda g, y: g * (1 - y * y))
define(aten.sigmoid_backward, lambda g, y: g * (1 - y) * y)
define(aten.threshold_backward, lambda g, x, threshold=0: where(x <= threshold, _zero(x), g))
define(aten.gelu_backward, _gelu)
define(aten.silu_backward, _silu)
define(aten.mish_backward, _mish)
define(aten.leaky_relu_backward, lambda g, x, slope=0.01, result=False: where(x > 0, g, g * slope))
define(aten.hardtanh_backward, lambda g, x, low=-1, high=1: where((x > low) & (x < high), g, _zero(x)))
define(aten.hardsigmoid_backward, lambda g, x: where((x > -3) & (x < 3), g * 0.1666666716337204, _zero(x)))  # float32's 1/6, as eager
define(aten.hardswish_backward, _hardswish)
define(aten.softplus_backward, _softplus)
define((aten.hardshrink_backward, aten.softshrink_backward), lambda g, x, lambd=0.5: where((x > lambd) | (x < -lambd), g, _zero(x)))
define(aten.log_sigmoid_backward, _log_sigmoid)
define(aten.logit_backward, _logit)


@declare("pointwise", aten.native_dropout_backward.default)
def _dropout_backward(cx: Any, g: Lowered, mask: Lowered, scale: float) -> Lowered:
    if g.dtype.is_floating_point:
        return apply(cx, lambda a, m: a * (m * scale), (g, mask))
    return apply(cx, lambda a, m: a * (m * scale) + 0.0, (g, mask), FLOAT)  # an integer times 0 has no sign


@declare("pointwise", aten.elu_backward.default)
def _elu_backward(cx: Any, g: Lowered, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Lowered) -> Lowered:
    return apply(cx, lambda a, b: _elu(a, alpha, scale, input_scale, is_result, b), (g, x))


@declare("pointwise", aten._prelu_kernel_backward.default)
def _prelu_backward(cx: Any, g: Lowered, x: Lowered, weight: Lowered) -> tuple[Lowered, Lowered]:
    if not g.size == x.size:
        raise Library("a gradient of another size")
    w = cx.expanded(weight, x.size)
    dx = mapped(lambda a, v, u: where(v > 0, a, u * a), widened(g), widened(x), widened(w))
    dw = mapped(lambda a, v: where(v > 0, _zero(v), v * a), widened(g), widened(x))
    return nominal(dx, cx.specs[0].dtype), nominal(dw, cx.specs[1].dtype)


# ---- losses ----------------------------------------------------------------------------------------------------------


def _loss(operator: torch._ops.OpOverload, formula: Callable[..., Scalar], overflows: Sequence[torch.dtype] = ()) -> None:
    """The derivative of a loss by its input: formula(gradient, input, target, 1 or 1 / n, parameters).

    overflows: dtypes in which a step of eager's overflows that does not in the wider one of a formula.
    """

    @declare("pointwise", operator)
    def lower(cx: Any, g: Lowered, x: Lowered, y: Lowered, reduction: int, *rest: Any) -> Lowered:
        if x.dtype in overflows:
            raise Library(f"a step of eager's overflows in {x.dtype}")
        norm = 1.0 / max(x.numel, 1) if reduction == MEAN else 1.0
        return apply(cx, lambda a, b, c: formula(a, b, c, norm, *rest), (g, x, y))


def _smooth_l1(g, x, y, norm, beta=1.0):
    d = x - y
    inner = norm * d * g / beta if beta else _zero(x)
    return where(d <= -beta, -norm * g, where(d >= beta, norm * g, inner))


def _huber(g, x, y, norm, delta=1.0):
    d = x - y
    return where(d <= -delta, -norm * g * delta, where(d >= delta, norm * g * delta, norm * d * g))


def _soft_margin(g, x, y, norm):
    z = s.exp(-x * y)
    return y * z * -norm / (z + 1) * g


_loss(aten.soft_margin_loss_backward.default, _soft_margin, (torch.float16,))
_loss(aten.mse_loss_backward.default, lambda g, x, y, norm: (2 * norm) * (x - y) * g)
_loss(aten.smooth_l1_loss_backward.default, _smooth_l1)
_loss(aten.huber_loss_backward.default, _huber)


@declare("pointwise", aten.binary_cross_entropy_backward.default)
def _bce_backward(cx: Any, g: Lowered, x: Lowered, y: Lowered, weight: Any = None, reduction: int = MEAN) -> Lowered:
    def formula(a, b, c, *w):
        d = a * (b - c) / s.clamp_min((1 - b) * b, 1e-12)
        d = d * w[0] if w else d
        return d / float(max(x.numel, 1)) if reduction == MEAN else d

    return apply(cx, formula, (g, x, y) if weight is None else (g, x, y, weight))


@declare("pointwise", aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_backward(
    cx: Any, g: Lowered, x: Lowered, target: Lowered, weight: Any, reduction: int, ignore_index: int, total: Lowered
) -> Lowered:
    size, rows = x.size, target.size
    if not x.numel or len(size) != len(rows) + 1:
        raise Library("negative log likelihood of an unusual shape")
    channel = 1 if rows else 0
    dims = tuple(d for d in range(len(size)) if d != channel)
    label = Scalar(placed(Lowered(rows, torch.int64, cast(target.body, torch.int64)), size, dims).body)
    at = point(size)[channel]
    hit = s.eq(label, Scalar(value(at))) if size[channel] > 1 else s.eq(label, 0)
    used = s.logical_and(hit, s.ne(label, ignore_index))
    g = placed(g, size, dims) if reduction == 0 and rows else g
    d = -Scalar(widened(g).body)
    if reduction == MEAN:
        d = d / Scalar(widened(to(total, g.dtype)).body)
    if weight is not None:
        d = Scalar(placed(widened(to(weight, x.dtype)), size, (channel,)).body) * d
    return nominal(Lowered(size, compute(x.dtype), masked(used.expr, d.expr, s.literal(0, d.dtype))), cx.spec.dtype)


# ---- softmax and normalizations: reduce along rows, then use the results along the same rows ----------------------------


def _rows(x: Lowered, dim: int) -> tuple[Lowered, int]:
    return (x, dim % len(x.size)) if x.size else (Lowered((1,), x.dtype, x.body, x.origins), 0)


def _softmax(operator: torch._ops.OpOverload, weighted: bool, formula: Callable[..., Scalar]) -> None:
    """The derivative of a softmax: formula(gradient, result, sum along the row); `weighted`: of the gradient times the result."""

    @declare("reduction", operator, reads=2)
    def lower(cx: Any, g: Lowered, y: Lowered, dim: int, input_dtype: Any) -> Lowered:
        if not y.numel:
            raise Library("softmax of nothing")
        size, y = y.size, widened(y)
        (g, along), (y, _) = _rows(cx.kept(widened(g)), dim), _rows(cx.kept(y) if weighted else y, dim)
        (total,) = cx.reduce("sum", mapped(lambda a, b: a * b, g, y) if weighted else g, (along,), True)
        return nominal(reshaped(cx, mapped(formula, g, y, total), size), cx.spec.dtype)


_softmax(aten._softmax_backward_data.default, True, lambda g, y, total: (g - total) * y)
_softmax(aten._log_softmax_backward_data.default, False, lambda g, y, total: g - s.exp(y) * total)


def _sums(cx: Any, x: Lowered, dims: Sequence[int]) -> Lowered:
    """Sums over `dims`, kept as dimensions of 1."""
    return cx.reduce("sum", x, dims, True)[0] if dims else x


def _parameter(cx: Any, k: int, x: Lowered, dims: Sequence[int]) -> Lowered | None:
    """The gradient of a weight or bias: the sum over `dims`, in the layout of result k; None where nobody asked."""
    spec = cx.specs[k]
    return None if spec is None else nominal(reshaped(cx, _sums(cx, x, dims), spec.size), spec.dtype)


def _input(cx: Any, g: Lowered, hat: Lowered, rstd: Lowered, weight: Lowered | None, dims: Sequence[int], centred: bool) -> Lowered:
    """The gradient of what was normalized over `dims`: what is left of it without its parts along 1 and `hat`."""
    if weight is not None:
        g = cx.kept(mapped(lambda a, w: a * w, g, weight))
    n = float(numel(hat.size[d] for d in dims))
    along = _sums(cx, mapped(lambda a, h: a * h, g, hat), dims)
    if not centred:
        return mapped(lambda a, h, p, r: (a - h * (p / n)) * r, g, hat, along, rstd)
    total = _sums(cx, g, dims)
    return mapped(lambda a, h, p, t, r: (a - t / n - h * (p / n)) * r, g, hat, along, total, rstd)


@declare("norm", aten.native_layer_norm_backward.default, reads=3)
def _layer_norm_backward(
    cx: Any, g: Lowered, x: Lowered, shape: Any, mean: Lowered, rstd: Lowered, weight: Any, bias: Any, mask: Any
) -> tuple[Any, ...]:
    if not x.numel:
        raise Library("layer_norm of nothing")
    split = len(x.size) - len(shape)
    outer, inner = tuple(range(split)), tuple(range(split, len(x.size)))
    wide = compute(x.dtype)
    g = cx.kept(widened(to(g, x.dtype)))
    hat = mapped(lambda v, m, r: (v - m) * r, cx.kept(widened(x)), to(mean, wide), to(rstd, wide))
    w = None if weight is None else placed(to(weight, wide), x.size, inner)
    dx = nominal(_input(cx, g, hat, to(rstd, wide), w, inner, True), x.dtype) if mask[0] else None
    dw = _parameter(cx, 1, mapped(lambda a, h: a * h, g, hat), outer) if mask[1] else None
    return dx, dw, _parameter(cx, 2, g, outer) if mask[2] else None


@declare("norm", aten._fused_rms_norm_backward.default, reads=3)
def _rms_norm_backward(cx: Any, g: Lowered, x: Lowered, shape: Any, rstd: Lowered, weight: Any, mask: Any) -> tuple[Any, ...]:
    if not x.numel:
        raise Library("rms_norm of nothing")
    split = len(x.size) - len(shape)
    outer, inner = tuple(range(split)), tuple(range(split, len(x.size)))
    wide = compute(x.dtype)
    g = cx.kept(widened(to(g, x.dtype)))
    hat = mapped(lambda v, r: v * r, cx.kept(widened(x)), to(rstd, wide))
    w = None if weight is None else placed(to(weight, wide), x.size, inner)
    dx = nominal(_input(cx, g, hat, to(rstd, wide), w, inner, False), x.dtype) if mask[0] else None
    return dx, _parameter(cx, 1, mapped(lambda a, h: a * h, g, hat), outer) if mask[1] else None


@declare("norm", aten.native_group_norm_backward.default, reads=3)
def _group_norm_backward(
    cx: Any, g: Lowered, x: Lowered, mean: Lowered, rstd: Lowered, weight: Any, N: int, C: int, HxW: int, group: int, mask: Any
) -> tuple[Any, ...]:
    if not x.numel:
        raise Library("group_norm of nothing")
    size, wide = (N, group, C // group, HxW), compute(x.dtype)
    g = reshaped(cx, cx.kept(widened(to(g, x.dtype))), size)
    mean, rstd = (reshaped(cx, to(t, wide), (N, group, 1, 1)) for t in (mean, rstd))
    hat = mapped(lambda v, m, r: (v - m) * r, reshaped(cx, cx.kept(widened(x)), size), mean, rstd)
    w = None if weight is None else placed(reshaped(cx, to(weight, wide), (group, C // group)), size, (1, 2))
    dx = nominal(reshaped(cx, _input(cx, g, hat, rstd, w, (2, 3), True), x.size), x.dtype) if mask[0] else None
    dw = _parameter(cx, 1, mapped(lambda a, h: a * h, g, hat), (0, 3)) if mask[1] else None
    return dx, dw, _parameter(cx, 2, g, (0, 3)) if mask[2] else None


@declare("norm", aten.native_batch_norm_backward.default, reads=3)
def _batch_norm_backward(
    cx: Any, g: Lowered, x: Lowered, weight: Any, running_mean: Any, running_var: Any, mean: Any, invstd: Any, train: bool, eps: float, mask: Any
) -> tuple[Any, ...]:
    if not x.numel:
        raise Library("batch normalization of nothing")
    wide, size = compute(x.dtype), x.size
    if not train:
        if running_mean is None or running_var is None:
            raise Library("statistics are absent")
        mean = running_mean
        invstd = mapped(lambda v: 1 / s.sqrt(v + eps), to(running_var, wide))
        invstd = cx.store(invstd) if invstd.numel > 1 else invstd
    dims = tuple(d for d in range(len(size)) if d != 1)
    mean, rstd = placed(to(mean, wide), size, (1,)), placed(to(invstd, wide), size, (1,))
    w = None if weight is None else placed(to(weight, wide), size, (1,))
    g = cx.kept(widened(to(g, x.dtype)))
    hat = mapped(lambda v, m, r: (v - m) * r, cx.kept(widened(x)), mean, rstd)
    dx = None
    if mask[0] and train:
        dx = _input(cx, g, hat, rstd, w, dims, True)
    elif mask[0]:
        dx = mapped(lambda a, r: a * r, g, rstd)
        dx = dx if w is None else mapped(lambda a, v: a * v, dx, w)
    dw = _parameter(cx, 1, mapped(lambda a, h: a * h, g, hat), dims) if mask[1] else None
    return None if dx is None else nominal(dx, x.dtype), dw, _parameter(cx, 2, g, dims) if mask[2] else None
