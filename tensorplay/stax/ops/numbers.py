"""Python numbers that the program reads from tensors, as operators (section 3.5: a value read from data).

    values = tensorplay.numbers(program, reads, dtype, limits)      all numbers of one step, computed by Python as in eager
    x = tensorplay.number(values, k)                                 one of them, a Python number

In: 0-d tensors.  Out: one tensor of float64 or int64, which kernels read as they read any other.
Always: where Python raises, or a number is of another type than when the program was recorded, the whole call is
computed again by eager, so that it raises the same.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...capture.numbers import power
from ...errors import CheckFailed
from .row import ROWS, Row

SYMBOLS = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.mod: "%", operator.pow: "**", power: "**", operator.neg: "-", operator.pos: "+", operator.abs: "abs",
}  # fmt: skip
DTYPES = {float: torch.float64, int: torch.int64}


@dataclass(frozen=True, eq=False, slots=True)
class Expression:
    """A number: an operator of Python on numbers and literals, or (op None) what a 0-d tensor holds."""

    op: Callable[..., Any] | None
    args: tuple[Any, ...]
    kind: type


def written(wanted: Sequence[Expression], names: dict[Expression, str]) -> str:
    """The program that computes the expressions. names: of those that are read."""
    names = dict(names)
    lines: list[str] = []
    for root in wanted:
        stack = [root]
        while stack:
            x = stack[-1]
            missing = [a for a in x.args if isinstance(a, Expression) and a not in names] if x not in names else []
            if missing:
                stack += missing
                continue
            stack.pop()
            if x not in names:
                operands = [names[a] if isinstance(a, Expression) else _literal(a) for a in x.args]
                symbol = SYMBOLS[x.op]  # type: ignore[index]
                names[x] = f"v{len(lines)}"
                text = f"{operands[0]} {symbol} {operands[1]}" if len(operands) == 2 else f"{symbol}({operands[0]})"
                lines.append(f"{names[x]} = {text}")
    return "\n".join((*lines, ", ".join(names[x] for x in wanted)))


def _literal(x: Any) -> str:
    if isinstance(x, float) and not math.isfinite(x):
        return f"float({str(x)!r})"
    return f"({x!r})" if x < 0 or str(x).startswith("-") else repr(x)


@functools.lru_cache(maxsize=256)
def _compiled(program: str, reads: int) -> Callable[..., tuple]:
    *lines, results = program.split("\n")
    arguments = ", ".join(f"r{k}" for k in range(reads))
    body = "".join(f"    {line}\n" for line in lines)
    space: dict[str, Any] = {}
    exec(compile(f"def numbers({arguments}):\n{body}    return ({results},)", "<numbers>", "exec"), space)
    return space["numbers"]


def numbers(program: str, reads: Sequence[torch.Tensor], dtype: torch.dtype, limits: Sequence[float]) -> torch.Tensor:
    """What the program gives for the values of the 0-d tensors; `limits`: what each result is at most, where it is finite."""
    kind = int if dtype is torch.int64 else float
    try:
        found = _compiled(program, len(reads))(*[t.item() for t in reads])
        if all([type(x) is kind and (abs(x) <= most or abs(x) == math.inf or x != x) for x, most in zip(found, limits)]):
            return torch.tensor(found, dtype=dtype)
    except Exception:
        pass
    raise CheckFailed(None, 0, "Python's arithmetic raised, or gave a number of another type, or one that its reader cannot hold")


def most(dtype: torch.dtype) -> float:
    """The largest number of a dtype that torch takes without complaint."""
    return float(torch.finfo(dtype).max) if dtype.is_floating_point else 0.0 if dtype.is_complex else float(torch.iinfo(dtype).max)


def number(values: torch.Tensor, k: int) -> Any:
    return values[k].item()


_LIBRARY = torch.library.Library("tensorplay", "FRAGMENT")
_LIBRARY.define("numbers(str program, Tensor[] reads, ScalarType dtype, float[] limits) -> Tensor")
_LIBRARY.define("number(Tensor values, int k) -> Scalar")
_LIBRARY.impl("numbers", numbers, "CompositeExplicitAutograd")
_LIBRARY.impl("number", number, "CompositeExplicitAutograd")
NUMBERS = torch.ops.tensorplay.numbers.default
NUMBER = torch.ops.tensorplay.number.default
ROWS[torch.ops.tensorplay.numbers] = Row("library", None)
