"""What happens along the vector variable: strides of index expressions, number of lanes, narrow integers.

In: expressions of a kernel and the variable that runs over the lanes.  Out: plain facts about them.
Always: a loop over the vector variable starts at a multiple of N and moves by N, so a lane-0 value of the variable is
divisible by N; that makes many floor divisions and remainders constant or affine within one vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ...dtypes import compute
from ...expr import Expr

INT32 = (-(2**31), 2**31 - 1)


def slope(x: Expr, v: Expr, n: int) -> int | None:
    """The step of index `x` from one lane to the next, or None where lanes are not evenly spaced."""
    if v not in x.free:
        return 0
    found = _lane(x, v, n, {})
    return None if found is None else found[0]


def _lane(x: Expr, v: Expr, n: int, memo: dict[Expr, tuple[int, int] | None]) -> tuple[int, int] | None:
    """(step, divisor of the lane-0 value); depth is that of nested divisions, so recursion is shallow."""
    if x in memo:
        return memo[x]
    found: tuple[int, int] | None = None
    if x is v:
        found = (1, n)
    elif x.op == "integer":
        found = (0, x.args[0])
    elif v not in x.free:
        found = (0, 1)
        if x.op == "affine":
            found = (0, math.gcd(x.args[0], *(c for _, c in x.args[1])))
    elif x.op == "affine":
        step, divisor = 0, x.args[0]
        for term, c in x.args[1]:
            inner = _lane(term, v, n, memo)
            if inner is None:
                memo[x] = None
                return None
            step += c * inner[0]
            divisor = math.gcd(divisor, c * inner[1])
        found = (step, divisor)
    elif x.op in ("floordiv", "mod"):
        inner, d = _lane(x.args[0], v, n, memo), x.args[1]
        if inner is not None:
            step, divisor = inner
            block = math.gcd(divisor, d)  # the lanes start at a multiple of it, and so do the periods of d
            if step % d == 0:
                found = (step // d, 1) if x.op == "floordiv" else (0, 1)
            elif step > 0 and step * (n - 1) < block:
                found = (0, divisor // d if divisor % d == 0 else 1) if x.op == "floordiv" else (step, block)
    memo[x] = found
    return found


def value_children(node: Expr) -> Iterable[Expr]:
    """Operands that are values in registers: a load's offset and a value's index are not."""
    return () if node.op in ("load", "value") else node.children


def walk_values(*roots: Expr) -> list[Expr]:
    """Distinct value nodes below the roots, operands first, without looking into indices."""
    seen: set[Expr] = set()
    out: list[Expr] = []
    stack: list[tuple[Expr, bool]] = [(r, False) for r in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            out.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((c, False) for c in reversed(tuple(value_children(node))) if c not in seen)
    return out


_COMPARE = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))


def narrow(order: Iterable[Expr], v: Expr | None) -> dict[Expr, tuple[int, int]]:
    """int64 values made of indices and literals that are known to fit 32 bits: they may use 32-bit lanes."""
    fits: dict[Expr, tuple[int, int]] = {}
    for node in order:
        if node.dtype is not torch.int64:
            continue
        span: tuple[int, int] | None = None
        if node.op == "value":
            span = (node.args[0].low, node.args[0].high)
        elif node.op == "const":
            span = (node.args[0], node.args[0])
        elif node.op in ("add", "sub", "mul", "where", "maximum", "minimum") and all(
            a in fits for a in node.args if a.dtype is torch.int64
        ):
            (a, b), (c, d) = (fits[x] for x in node.args if x.dtype is torch.int64)
            if node.op == "add":
                span = (a + c, b + d)
            elif node.op == "sub":
                span = (a - d, b - c)
            elif node.op == "mul":
                ends = (a * c, a * d, b * c, b * d)
                span = (min(ends), max(ends))
            else:
                span = (min(a, c), max(b, d))
        if span is not None and INT32[0] <= span[0] and span[1] <= INT32[1]:
            fits[node] = span
    return fits


def widest(order: Iterable[Expr], v: Expr, fits: dict[Expr, tuple[int, int]]) -> int:
    """Bytes of the widest register type among the values that vary along the lanes: 4 or 8."""
    for node in order:
        if v not in node.free:
            continue
        dtype = node.dtype
        if node in fits:
            continue
        if compute(dtype).itemsize == 8:
            return 8
    return 4


def unconditional(roots: Iterable[Expr]) -> list[Expr]:
    """Distinct value nodes that are computed at every point: nothing under the condition of a `masked`."""
    seen: set[Expr] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += (node.args[0], node.args[2]) if node.op == "masked" else value_children(node)
    return sorted(seen, key=lambda e: e.digest)
