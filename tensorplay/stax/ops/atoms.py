"""The atoms: scalar operators that loop bodies are made of, one line each (design: say it once, in a table).

An atom is spelled for each target and has a reference meaning in torch, which the interpreter runs and every test
checks the spellings against. Everything else is written in atoms (`pointwise.py`) and so works on every target.

Columns: the name; the result ('same' as the operands' dtype, or 'bool'); the kinds of operand dtype that it takes
(f floating, i integer, b bool); the reference on tensors; C++ on vector registers; Triton. `{0}`, `{1}`, ... are the
operands. A spelling of None means that the target has none yet: such a node becomes a fallback there.
Operands always have equal dtypes, except the condition of `where` and shift counts. Operands of half dtypes do not
occur: lowering casts them to float32 first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Atom:
    """One row of the table."""

    name: str
    result: str
    kinds: str
    reference: Callable[..., torch.Tensor]
    cpp: str | None
    triton: str | None


def _where(cond: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(cond, a, b)


def _clamp_min(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return torch.where(c > x, c, x)


def _clamp_max(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return torch.where(c < x, c, x)


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    if a.dtype == torch.float32:  # exact product in float64; the double rounding of the sum is below one ulp
        return (a.double() * b.double() + c.double()).float()
    return a * b + c


_ROWS = (
    # name          result  kinds  reference              C++                      Triton
    ("add",         "same", "fi",  torch.add,             "{0} + {1}",             "{0} + {1}"),
    ("sub",         "same", "fi",  torch.sub,             "{0} - {1}",             "{0} - {1}"),
    ("mul",         "same", "fib", torch.mul,             "{0} * {1}",             "{0} * {1}"),
    ("div",         "same", "f",   torch.div,             "{0} / {1}",             "tl.div_rn({0}, {1})"),
    ("neg",         "same", "fi",  torch.neg,             "-{0}",                  "-{0}"),
    ("abs",         "same", "fi",  torch.abs,             "abs({0})",              "tl.abs({0})"),
    ("fma",         "same", "f",   _fma,                  "fma({0}, {1}, {2})",    "tl.fma({0}, {1}, {2})"),
    # integer division by zero never traps: it is a run-time check (ZeroDivisionError, as eager)
    ("div_floor",   "same", "i",   lambda a, b: torch.div(a, b, rounding_mode="floor"), "div_floor({0}, {1})", None),
    ("div_trunc",   "same", "i",   lambda a, b: torch.div(a, b, rounding_mode="trunc"), "div_trunc({0}, {1})", "{0} // {1}"),
    ("remainder",   "same", "fi",  torch.remainder,       "remainder({0}, {1})",   None),
    ("fmod",        "same", "fi",  torch.fmod,            "fmod({0}, {1})",        None),
    # maximum and minimum keep a NaN from either side; clamp_min(x, c) is c > x ? c : x: keeps a NaN and a -0 in x
    ("maximum",     "same", "fib", torch.maximum,         "maximum({0}, {1})",     "tl.maximum({0}, {1}, tl.PropagateNan.ALL)"),
    ("minimum",     "same", "fib", torch.minimum,         "minimum({0}, {1})",     "tl.minimum({0}, {1}, tl.PropagateNan.ALL)"),
    ("fmax",        "same", "f",   torch.fmax,            "fmax({0}, {1})",        "tl.maximum({0}, {1})"),
    ("fmin",        "same", "f",   torch.fmin,            "fmin({0}, {1})",        "tl.minimum({0}, {1})"),
    ("clamp_min",   "same", "fi",  _clamp_min,            "clamp_min({0}, {1})",   "tl.maximum({1}, {0}, tl.PropagateNan.ALL)"),
    ("clamp_max",   "same", "fi",  _clamp_max,            "clamp_max({0}, {1})",   "tl.minimum({1}, {0}, tl.PropagateNan.ALL)"),
    ("eq",          "bool", "fib", torch.eq,              "{0} == {1}",            "{0} == {1}"),
    ("ne",          "bool", "fib", torch.ne,              "{0} != {1}",            "{0} != {1}"),
    ("lt",          "bool", "fib", torch.lt,              "{0} < {1}",             "{0} < {1}"),
    ("le",          "bool", "fib", torch.le,              "{0} <= {1}",            "{0} <= {1}"),
    ("gt",          "bool", "fib", torch.gt,              "{0} > {1}",             "{0} > {1}"),
    ("ge",          "bool", "fib", torch.ge,              "{0} >= {1}",            "{0} >= {1}"),
    ("logical_and", "bool", "b",   torch.logical_and,     "{0} & {1}",             "{0} & {1}"),
    ("logical_or",  "bool", "b",   torch.logical_or,      "{0} | {1}",             "{0} | {1}"),
    ("logical_xor", "bool", "b",   torch.logical_xor,     "{0} ^ {1}",             "{0} ^ {1}"),
    ("logical_not", "bool", "b",   torch.logical_not,     "~{0}",                  "~{0}"),
    ("bitwise_and", "same", "ib",  torch.bitwise_and,     "{0} & {1}",             "{0} & {1}"),
    ("bitwise_or",  "same", "ib",  torch.bitwise_or,      "{0} | {1}",             "{0} | {1}"),
    ("bitwise_xor", "same", "ib",  torch.bitwise_xor,     "{0} ^ {1}",             "{0} ^ {1}"),
    ("bitwise_not", "same", "ib",  torch.bitwise_not,     "~{0}",                  "~{0}"),
    ("lshift",      "same", "i",   torch.bitwise_left_shift,  "lshift({0}, {1})",  "{0} << {1}"),
    ("rshift",      "same", "i",   torch.bitwise_right_shift, "rshift({0}, {1})",  "{0} >> {1}"),
    ("int_pow",     "same", "i",   torch.pow,             "int_pow({0}, {1})",     None),  # to a negative power: 0, or 1 and -1
    ("gcd",         "same", "i",   torch.gcd,             "gcd({0}, {1})",         None),
    ("lcm",         "same", "i",   torch.lcm,             "lcm({0}, {1})",         None),
    ("where",       "same", "fib", _where,                "where({0}, {1}, {2})",  "tl.where({0}, {1}, {2})"),
    ("isnan",       "bool", "f",   torch.isnan,           "{0} != {0}",            "{0} != {0}"),
    ("isinf",       "bool", "f",   torch.isinf,           "isinf({0})",            "tl.abs({0}) == float('inf')"),
    ("signbit",     "bool", "f",   torch.signbit,         "signbit({0})",          None),
    ("copysign",    "same", "f",   torch.copysign,        "copysign({0}, {1})",    "libdevice.copysign({0}, {1})"),
    ("nextafter",   "same", "f",   torch.nextafter,       "nextafter({0}, {1})",   "libdevice.nextafter({0}, {1})"),
    ("floor",       "same", "f",   torch.floor,           "floor({0})",            "tl.floor({0})"),
    ("ceil",        "same", "f",   torch.ceil,            "ceil({0})",             "tl.ceil({0})"),
    ("trunc",       "same", "f",   torch.trunc,           "trunc({0})",            "libdevice.trunc({0})"),
    ("round",       "same", "f",   torch.round,           "round({0})",            "libdevice.rint({0})"),  # half to even
    ("sqrt",        "same", "f",   torch.sqrt,            "sqrt({0})",             "tl.sqrt_rn({0})"),
    ("rsqrt",       "same", "f",   torch.rsqrt,           "rsqrt({0})",            "tl.rsqrt({0})"),
    ("exp",         "same", "f",   torch.exp,             "exp({0})",              "tl.exp({0})"),
    ("exp2",        "same", "f",   torch.exp2,            "exp2({0})",             "tl.exp2({0})"),
    ("expm1",       "same", "f",   torch.expm1,           "expm1({0})",            "libdevice.expm1({0})"),
    ("log",         "same", "f",   torch.log,             "log({0})",              "tl.log({0})"),
    ("log2",        "same", "f",   torch.log2,            "log2({0})",             "tl.log2({0})"),
    ("log10",       "same", "f",   torch.log10,           "log10({0})",            "libdevice.log10({0})"),
    ("log1p",       "same", "f",   torch.log1p,           "log1p({0})",            "libdevice.log1p({0})"),
    ("sin",         "same", "f",   torch.sin,             "sin({0})",              "tl.sin({0})"),
    ("cos",         "same", "f",   torch.cos,             "cos({0})",              "tl.cos({0})"),
    ("tan",         "same", "f",   torch.tan,             "tan({0})",              "libdevice.tan({0})"),
    ("asin",        "same", "f",   torch.asin,            "asin({0})",             "libdevice.asin({0})"),
    ("acos",        "same", "f",   torch.acos,            "acos({0})",             "libdevice.acos({0})"),
    ("atan",        "same", "f",   torch.atan,            "atan({0})",             "libdevice.atan({0})"),
    ("atan2",       "same", "f",   torch.atan2,           "atan2({0}, {1})",       "libdevice.atan2({0}, {1})"),
    ("sinh",        "same", "f",   torch.sinh,            "sinh({0})",             "libdevice.sinh({0})"),
    ("cosh",        "same", "f",   torch.cosh,            "cosh({0})",             "libdevice.cosh({0})"),
    ("tanh",        "same", "f",   torch.tanh,            "tanh({0})",             "libdevice.tanh({0})"),
    ("asinh",       "same", "f",   torch.asinh,           "asinh({0})",            "libdevice.asinh({0})"),
    ("acosh",       "same", "f",   torch.acosh,           "acosh({0})",            "libdevice.acosh({0})"),
    ("atanh",       "same", "f",   torch.atanh,           "atanh({0})",            "libdevice.atanh({0})"),
    ("erf",         "same", "f",   torch.erf,             "erf({0})",              "tl.erf({0})"),
    ("erfc",        "same", "f",   torch.erfc,            "erfc({0})",             "libdevice.erfc({0})"),
    ("lgamma",      "same", "f",   torch.lgamma,          "lgamma({0})",           "libdevice.lgamma({0})"),
    ("sigmoid",     "same", "f",   torch.sigmoid,         "sigmoid({0})",          "tl.sigmoid({0})"),
    ("pow",         "same", "f",   torch.pow,             "pow({0}, {1})",         "libdevice.pow({0}, {1})"),
    ("hypot",       "same", "f",   torch.hypot,           "hypot({0}, {1})",       "libdevice.hypot({0}, {1})"),
)  # fmt: skip

ATOMS = {row[0]: Atom(*row) for row in _ROWS}
