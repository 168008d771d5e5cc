"""Normalization and losses: rows that reduce and then use the result along the same rows (row 4.26: kept whole)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import UnsupportedError
from ..expr import cast, index, masked
from . import scalar as s
from .lowered import Lowered, compute, numel, point, reindex, to, widened
from .reductions import mapped, moments, nominal
from .row import Library, declare
from .scalar import Scalar, where
from .views import reshaped

aten = torch.ops.aten


def placed(x: Lowered, size: tuple[int, ...], dims: Sequence[int]) -> Lowered:
    """`x` laid along some dimensions of `size`, constant along the others."""
    out = point(size)
    shape = tuple(size[d] if d in dims else 1 for d in range(len(size)))
    return Lowered(shape, x.dtype, reindex(x, shape, [out[d] for d in dims]).body, x.origins)


def affined(x: Lowered, weight: Lowered | None, bias: Lowered | None) -> Lowered:
    """x * weight + bias of a value around its mean, either of which may be absent; eager's zeros there are positive."""
    wide = compute(x.dtype)
    if bias is None:
        return x if weight is None else mapped(lambda a, w: a * w + 0.0, x, to(weight, wide))
    if weight is not None:
        x = mapped(lambda a, w: a * w, x, to(weight, wide))
    return mapped(lambda a, b: a + b, x, to(bias, wide))


def _of_nothing(cx: Any) -> tuple[Lowered, ...]:
    """The results of a normalization without elements, where its statistics have none either."""
    if any(numel(spec.size) for spec in cx.specs):
        raise Library("statistics of nothing")
    return tuple([Lowered(spec.size, spec.dtype, s.literal(0, compute(spec.dtype))) for spec in cx.specs])


def _inverse_deviation(cx: Any, squares: Lowered, n: int, eps: float) -> Lowered:
    rstd = mapped(lambda m: s.rsqrt(m / float(n) + eps), squares)
    return cx.store(rstd) if rstd.numel > 1 else rstd


@declare("norm", aten.native_layer_norm.default, reads=2)
def _layer_norm(cx: Any, x: Lowered, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Lowered, ...]:
    out, mean_spec, rstd_spec = cx.specs
    rank, inner = len(x.size), len(normalized_shape)
    dims = tuple(range(rank - inner, rank))
    if not x.numel:
        return _of_nothing(cx)
    x = cx.kept(widened(x))
    mean, squares, n = moments(cx, x, dims, True)
    rstd = _inverse_deviation(cx, squares, n, eps)
    y = mapped(lambda v, m, r: (v - m) * r, x, mean, rstd)
    weight, bias = (None if t is None else placed(t, x.size, dims) for t in (weight, bias))
    y = affined(y, weight, bias)
    return nominal(y, out.dtype), nominal(mean, mean_spec.dtype), nominal(rstd, rstd_spec.dtype)


@declare("norm", aten._fused_rms_norm.default, reads=2)
def _rms_norm(cx: Any, x: Lowered, normalized_shape: Any, weight: Any, eps: float | None) -> tuple[Lowered, ...]:
    out, rstd_spec = cx.specs
    rank, inner = len(x.size), len(normalized_shape)
    dims = tuple(range(rank - inner, rank))
    if not x.numel:
        return _of_nothing(cx)
    eps = torch.finfo(compute(x.dtype)).eps if eps is None else eps
    x = cx.kept(widened(x))
    (total,) = cx.reduce("sum", mapped(lambda v: v * v, x), dims, True)
    rstd = _inverse_deviation(cx, total, numel(normalized_shape), eps)
    y = mapped(lambda v, r: v * r, x, rstd)
    if weight is not None:
        y = mapped(lambda v, w: v * w, y, to(placed(weight, x.size, dims), compute(x.dtype)))
    return nominal(y, out.dtype), nominal(rstd, rstd_spec.dtype)


@declare("norm", aten.native_group_norm.default, reads=2)
def _group_norm(cx: Any, x: Lowered, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float) -> tuple[Lowered, ...]:
    out, mean_spec, rstd_spec = cx.specs
    if not x.numel:
        return _of_nothing(cx)
    size = (N, group, C // group, HxW)
    rows = reshaped(cx, cx.kept(widened(x)), size)
    mean, squares, n = moments(cx, rows, (2, 3), True)
    rstd = _inverse_deviation(cx, squares, n, eps)
    y = mapped(lambda v, m, r: (v - m) * r, rows, mean, rstd)
    channels = (group, C // group)
    weight, bias = (None if t is None else placed(reshaped(cx, t, channels), size, (1, 2)) for t in (weight, bias))
    y = reshaped(cx, affined(y, weight, bias), x.size)
    mean, rstd = reshaped(cx, mean, (N, group)), reshaped(cx, rstd, (N, group))
    return nominal(y, out.dtype), nominal(mean, mean_spec.dtype), nominal(rstd, rstd_spec.dtype)


def _normalized(cx: Any, x: Lowered, weight: Any, bias: Any, mean: Lowered, rstd: Lowered) -> Lowered:
    """Batch normalization with the given statistics, one a channel (dimension 1)."""
    size = x.size
    mean, rstd = placed(mean, size, (1,)), placed(rstd, size, (1,))
    weight, bias = (None if t is None else placed(t, size, (1,)) for t in (weight, bias))
    return affined(mapped(lambda v, m, r: (v - m) * r, x, mean, rstd), weight, bias)


def _batch_norm_eval(cx: Any, x: Lowered, weight: Any, bias: Any, mean: Lowered, var: Lowered, eps: float) -> Lowered:
    wide = compute(x.dtype)
    rstd = mapped(lambda v: 1 / s.sqrt(v + eps), to(var, wide))
    rstd = cx.store(rstd) if rstd.numel > 1 else rstd
    return nominal(_normalized(cx, widened(x), weight, bias, to(mean, wide), rstd), cx.specs[0].dtype)


def _nothing(cx: Any, k: int) -> Lowered | None:
    spec = cx.specs[k]
    return None if spec is None else Lowered(spec.size, spec.dtype, s.literal(0, compute(spec.dtype)))


@declare("norm", aten._native_batch_norm_legit_no_training.default, aten._batch_norm_no_update.default)
def _batch_norm_inference(cx: Any, x: Lowered, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float) -> tuple[Any, ...]:
    if mean is None or var is None:
        raise Library("statistics are absent")
    y = _batch_norm_eval(cx, x, weight, bias, mean, var, eps)
    return (y, *(_nothing(cx, k) for k in range(1, len(cx.specs))))


@declare("norm", aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten._native_batch_norm_legit.default)
def _batch_norm(
    cx: Any, x: Lowered, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    if training or mean is None or var is None:
        raise UnsupportedError("batch normalization that updates its statistics in place: expected the functional form")
    if any(spec is not None and spec.numel for spec in cx.specs[1:]):
        raise Library("saved statistics of an inference call")
    return _batch_norm_inference(cx, x, weight, bias, mean, var, momentum, eps)


@declare("norm", aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats, reads=2)
def _batch_norm_training(cx: Any, x: Lowered, weight: Any, bias: Any, *rest: Any) -> tuple[Any, ...]:
    *stats, training, momentum, eps = rest
    if not training:
        if len(stats) != 2 or len(cx.specs) != 5:
            raise Library("inference without statistics")
        y = _batch_norm_eval(cx, x, weight, bias, stats[0], stats[1], eps)
        return y, _nothing(cx, 1), _nothing(cx, 2), *stats
    if not x.numel:
        raise Library("batch normalization of nothing")
    x = cx.kept(widened(x))
    dims = tuple(d for d in range(len(x.size)) if d != 1)
    mean, squares, n = moments(cx, x, dims, False)
    rstd = _inverse_deviation(cx, squares, n, eps)
    y = nominal(_normalized(cx, x, weight, bias, mean, rstd), cx.specs[0].dtype)
    saved = nominal(mean, cx.specs[1].dtype), nominal(rstd, cx.specs[2].dtype)
    if not stats:
        return y, *saved
    wide = compute(x.dtype)

    def updated(old: Lowered, new: Lowered) -> Lowered:
        moved = mapped(lambda o, v: momentum * v + (1 - momentum) * o, to(old, wide), new)
        return to(moved, old.dtype)

    unbiased = mapped(lambda m: m / float(max(n - 1, 0)), squares)
    return y, *saved, updated(stats[0], mean), updated(stats[1], unbiased)


@declare("norm", aten._batch_norm_with_update_functional.default, reads=2)
def _batch_norm_update(
    cx: Any, x: Lowered, weight: Any, bias: Any, mean: Lowered, var: Lowered, momentum: float, eps: float
) -> tuple[Any, ...]:
    y, saved, rstd, new_mean, new_var = _batch_norm_training(cx, x, weight, bias, mean, var, True, momentum, eps)
    return y, saved, rstd, _nothing(cx, 3), new_mean, new_var


# ---- negative log likelihood -----------------------------------------------------------------------------------------


@declare("norm", aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll_loss(cx: Any, x: Lowered, target: Lowered, weight: Any, reduction: int, ignore_index: int) -> tuple[Lowered, Lowered]:
    out, total_spec = cx.specs
    rows = target.size
    if not x.numel or len(x.size) != len(rows) + 1:
        raise Library("negative log likelihood of an unusual shape")
    channel = 0 if not rows else 1
    classes = x.size[channel]
    label = Scalar(cast(target.body, torch.int64))
    used = s.ne(label, ignore_index)
    at = list(point(rows))
    chosen = index(label.expr, classes)
    at.insert(channel, chosen)
    picked = Scalar(reindex(widened(x), rows, at).body)
    zero = s.scalar(0, picked.dtype)
    scale = None
    if weight is not None:
        scale = Scalar(reindex(widened(to(weight, x.dtype)), rows, [chosen]).body)
    loss = Lowered(rows, compute(x.dtype), masked(used.expr, (-picked if scale is None else -picked * scale).expr, zero.expr))
    if reduction == 0:
        return nominal(loss, out.dtype), _nothing(cx, 1)
    weights = Lowered(
        rows, compute(x.dtype), where(used, s.scalar(1, picked.dtype), 0).expr if scale is None else masked(used.expr, scale.expr, zero.expr)
    )
    (total,) = cx.reduce("sum", loss)
    (count,) = cx.reduce("sum", weights)
    value = total if reduction == 2 else mapped(lambda a, b: a / b, total, count)
    return nominal(value, out.dtype), nominal(count, total_spec.dtype)
