"""Arithmetic on scalars of loop bodies, so that a row reads like its formula: `x * sigmoid(x)`.

In: `Scalar`s and Python numbers.  Out: `Scalar`s over interned expressions of atoms.
Always: the operands of an atom have equal dtypes; a Python number takes the dtype of the `Scalar` beside it, and is
refused where it does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch

from .. import expr
from ..expr import Expr
from .atoms import ATOMS
from .row import Library, Refuse

Operand: TypeAlias = "Scalar | bool | int | float"
_RANGE = {d: torch.iinfo(d) for d in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)}


class Scalar:
    """One element of a loop body, with Python's operators."""

    __slots__ = ("expr",)

    def __init__(self, e: Expr) -> None:
        self.expr = e

    @property
    def dtype(self) -> torch.dtype:
        return self.expr.dtype

    @property
    def floating(self) -> bool:
        return self.expr.dtype.is_floating_point

    def __add__(self, y):
        return add(self, y)

    def __radd__(self, y):
        return add(y, self)

    def __sub__(self, y):
        return sub(self, y)

    def __rsub__(self, y):
        return sub(y, self)

    def __mul__(self, y):
        return mul(self, y)

    def __rmul__(self, y):
        return mul(y, self)

    def __truediv__(self, y):
        return div(self, y)

    def __rtruediv__(self, y):
        return div(y, self)

    def __neg__(self):
        return neg(self)

    def __abs__(self):
        return absolute(self)

    def __lt__(self, y):
        return lt(self, y)

    def __le__(self, y):
        return le(self, y)

    def __gt__(self, y):
        return gt(self, y)

    def __ge__(self, y):
        return ge(self, y)

    def __and__(self, y):
        return logical_and(self, y) if self.dtype == torch.bool else bitwise_and(self, y)

    def __or__(self, y):
        return logical_or(self, y) if self.dtype == torch.bool else bitwise_or(self, y)

    def __xor__(self, y):
        return logical_xor(self, y) if self.dtype == torch.bool else bitwise_xor(self, y)

    def __invert__(self):
        return logical_not(self) if self.dtype == torch.bool else bitwise_not(self)

    def to(self, dtype: torch.dtype) -> Scalar:
        return Scalar(expr.cast(self.expr, dtype))


def literal(x: bool | int | float, dtype: torch.dtype) -> Expr:
    """A Python number as a literal of `dtype`; left to torch where it has to wrap or truncate."""
    if isinstance(x, complex):
        raise Refuse("complex number")
    if dtype == torch.bool:
        if x not in (0, 1):
            raise Library(f"{x} is no bool")
    elif not dtype.is_floating_point:
        if isinstance(x, float) and not x.is_integer():
            raise Library(f"{x} is no {dtype}")
        if not _RANGE[dtype].min <= x <= _RANGE[dtype].max:
            raise Library(f"{x} is outside of {dtype}")
    else:
        try:
            float(x)
        except OverflowError:
            raise Library("an integer beyond the range of float") from None
    return expr.const(x, dtype)


def scalar(x: Operand, dtype: torch.dtype) -> Scalar:
    """A number as a Scalar of `dtype`."""
    return x if isinstance(x, Scalar) else Scalar(literal(x, dtype))


def function(name: str, first: int = 0) -> Callable[..., Scalar]:
    """The atom `name` as a function; operands before `first` keep their own dtype (the condition of where)."""
    atom = ATOMS[name]
    boolean = atom.result == "bool"

    def apply(*xs: Operand) -> Scalar:
        dtype = next((x.expr.dtype for x in xs[first:] if type(x) is Scalar), None)
        if dtype is None:
            raise Library(f"{name} of numbers only")
        args = tuple(x.expr if type(x) is Scalar else literal(x, dtype) for x in xs)
        if any(a.dtype != dtype for a in args[first:]):
            raise AssertionError(f"{name} mixes {[a.dtype for a in args]}")
        return Scalar(expr.make(name, args, torch.bool if boolean else dtype))

    apply.__name__ = name
    return apply


_add, _sub, _mul, _div = map(function, ("add", "sub", "mul", "div"))
neg, fma, absolute = map(function, ("neg", "fma", "abs"))


def _position(x: Operand) -> Expr | int | None:
    """The index expression behind an int64 scalar, or an integer; None for any other scalar."""
    if type(x) is int:
        return x
    if type(x) is Scalar and x.expr.op == "value":
        return x.expr.args[0]
    return None


def _of_index(x: Operand, y: Operand, sign: int) -> Scalar | None:
    """x + sign * y kept as index arithmetic, so that positions stay affine and ranges stay known."""
    a, b = _position(x), _position(y)
    if a is None or b is None or (type(a) is int and type(b) is int):
        return None
    e = expr.add(a, expr.mul(b, sign))
    return Scalar(expr.value(e)) if -_FAR < e.low and e.high < _FAR else None


_FAR = 1 << 62  # beyond it int64 arithmetic would wrap, which index arithmetic does not


def add(x: Operand, y: Operand) -> Scalar:
    return _of_index(x, y, 1) or _add(x, y)


def sub(x: Operand, y: Operand) -> Scalar:
    """x - 0 is x, for every x."""
    if type(y) in (int, float) and y == 0 and math.copysign(1, y) == 1 and type(x) is Scalar:
        return x
    return _of_index(x, y, -1) or _sub(x, y)


def mul(x: Operand, y: Operand) -> Scalar:
    """x * 1 is x, for every x."""
    for a, b in ((x, y), (y, x)):
        if type(a) is Scalar and type(b) in (int, float, bool):
            if b == 1:
                return a
            at = _position(a) if type(b) is int else None
            if at is not None and type(at) is not int and max(-at.low, at.high) * abs(b) < _FAR:
                return Scalar(expr.value(expr.mul(at, b)))
    return _mul(x, y)


def div(x: Operand, y: Operand) -> Scalar:
    """x / 1 is x, for every x."""
    return x if type(x) is Scalar and type(y) in (int, float) and y == 1 else _div(x, y)


div_floor, div_trunc, remainder, fmod = map(function, ("div_floor", "div_trunc", "remainder", "fmod"))
maximum, minimum, clamp_min, clamp_max = map(function, ("maximum", "minimum", "clamp_min", "clamp_max"))
fmax, fmin = map(function, ("fmax", "fmin"))
eq, ne, lt, le, gt, ge = map(function, ("eq", "ne", "lt", "le", "gt", "ge"))
logical_and, logical_or, logical_xor = map(function, ("logical_and", "logical_or", "logical_xor"))
bitwise_and, bitwise_or, bitwise_xor = map(function, ("bitwise_and", "bitwise_or", "bitwise_xor"))
logical_not, bitwise_not, lshift, rshift = map(function, ("logical_not", "bitwise_not", "lshift", "rshift"))
isnan, isinf, signbit, copysign, nextafter = map(function, ("isnan", "isinf", "signbit", "copysign", "nextafter"))
floor, ceil, trunc, round_ = map(function, ("floor", "ceil", "trunc", "round"))
sqrt, rsqrt, exp, exp2, expm1 = map(function, ("sqrt", "rsqrt", "exp", "exp2", "expm1"))
log, log2, log10, log1p = map(function, ("log", "log2", "log10", "log1p"))
sin, cos, tanh, erf, erfc, sigmoid = map(function, ("sin", "cos", "tanh", "erf", "erfc", "sigmoid"))
pow_, hypot, atan2, int_pow, gcd, lcm = map(function, ("pow", "hypot", "atan2", "int_pow", "gcd", "lcm"))
where = function("where", first=1)
