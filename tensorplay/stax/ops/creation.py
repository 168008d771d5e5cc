"""Operators that make a tensor from numbers.

`empty` and its like give zeros: any value is right, and a fixed one keeps runs equal.
"""

from __future__ import annotations

from typing import Any

import torch

from ..expr import affine, value
from . import scalar as s
from .lowered import Lowered, Read, apart, compute, convert, point, to
from .row import Library, Refuse, declare
from .scalar import Scalar, where

aten = torch.ops.aten


def filled(cx: Any, number: bool | int | float) -> Lowered:
    """A tensor of the node's size and dtype that holds one number."""
    return Lowered(cx.spec.size, cx.spec.dtype, s.literal(number, compute(cx.spec.dtype)))


def _constant(name: str, number: Any) -> None:
    @declare("creation", *(getattr(aten, n) for n in (name, f"{name}_like", f"new_{name}") if hasattr(aten, n)))
    def lower(cx: Any, *_: Any, **__: Any) -> Lowered:
        return filled(cx, number)


for _row, _value in (("zeros", 0), ("ones", 1), ("empty", 0)):
    _constant(_row, _value)


@declare("creation", aten.empty_strided.default, aten.new_empty_strided.default, aten.empty_permuted.default)
def _empty(cx: Any, *_: Any, **__: Any) -> Lowered:
    if not apart(cx.spec.size, cx.spec.stride):
        raise Refuse("memory that overlaps itself")
    return filled(cx, 0)


@declare("creation", aten.full.default, aten.full_like.default)
def _full(cx: Any, _: Any, fill_value: Any, **__: Any) -> Lowered:
    return _number(cx, fill_value)


@declare("creation", aten.new_full.default)
def _new_full(cx: Any, _: Any, size: Any, fill_value: Any, **__: Any) -> Lowered:
    return _number(cx, fill_value)


@declare("creation", aten.scalar_tensor.default)
def _scalar_tensor(cx: Any, number: Any, **__: Any) -> Lowered:
    return _number(cx, number)


def _number(cx: Any, number: Any) -> Lowered:
    if isinstance(number, Read) and cx.spec.dtype.is_floating_point:
        return Lowered(cx.spec.size, cx.spec.dtype, convert(number.body, number.dtype, cx.spec.dtype))
    if isinstance(number, Lowered):
        raise Library("fill value is a tensor")
    if cx.spec.dtype == torch.bool:
        number = bool(number)
    elif not cx.spec.dtype.is_floating_point and isinstance(number, float):
        if number != number or abs(number) >= 2**63:
            raise Library("conversion of a fill value that is no integer")
        number = int(number)
    return filled(cx, number)


@declare("creation", aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(cx: Any, *args: Any, step: Any = 1, **_: Any) -> Lowered:
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else step)
    (i,) = point(cx.spec.size)
    dtype = cx.spec.dtype
    if dtype.is_floating_point:
        at = Scalar(value(i, torch.float64))
        return Lowered(cx.spec.size, dtype, (float(start) + at * float(step)).to(compute(dtype)).expr)
    return Lowered(cx.spec.size, dtype, value(affine(int(start), ((i, int(step)),)), dtype))


@declare("creation", aten.linspace.default, aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor)
def _linspace(cx: Any, start: Any, end: Any, steps: int, **_: Any) -> Lowered:
    """From both ends to the middle, with a step in the dtype of the result (float64 for integers), rounded as eager does."""
    dtype = cx.spec.dtype
    wide = compute(dtype) if dtype.is_floating_point else torch.float64

    def rounded(x: Scalar) -> Scalar:
        return x.to(dtype).to(wide) if dtype.is_floating_point else x

    def bound(x: Any) -> Scalar:
        if isinstance(x, Lowered):
            return Scalar(to(x, dtype).body).to(wide)
        return rounded(s.scalar(float(x if dtype.is_floating_point else int(x)), wide))

    first, last = bound(start), bound(end)
    if steps < 2:
        return Lowered(cx.spec.size, dtype, first.to(compute(dtype)).expr)
    (i,) = point(cx.spec.size)
    at = Scalar(value(i, wide))
    step = rounded(rounded(last - first) / float(steps - 1))
    near, far = first + rounded(step * at), last - rounded(step * (float(steps - 1) - at))
    body = rounded(where(Scalar(value(i)) < steps // 2, near, far))
    return Lowered(cx.spec.size, dtype, body.to(compute(dtype)).expr)


@declare("creation", aten.eye.default, aten.eye.m)
def _eye(cx: Any, *_: Any, **__: Any) -> Lowered:
    i, j = point(cx.spec.size)
    dtype = compute(cx.spec.dtype)
    body = s.eq(Scalar(value(i)), Scalar(value(j))).to(dtype)
    return Lowered(cx.spec.size, cx.spec.dtype, body.expr)


@declare("creation", aten.tril.default)
def _tril(cx: Any, x: Lowered, diagonal: int = 0) -> Lowered:
    return _triangle(x, diagonal, lower=True)


@declare("creation", aten.triu.default)
def _triu(cx: Any, x: Lowered, diagonal: int = 0) -> Lowered:
    return _triangle(x, diagonal, lower=False)


def _triangle(x: Lowered, diagonal: int, lower: bool) -> Lowered:
    i, j = (Scalar(value(v)) for v in point(x.size)[-2:])
    keep = s.le(j, i + diagonal) if lower else s.ge(j, i + diagonal)
    return Lowered(x.size, x.dtype, where(keep, Scalar(x.body), s.scalar(0, x.body.dtype)).expr)
