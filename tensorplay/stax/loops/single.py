"""Sums all terms of which are zero but one, whose place along the loop is an equation: one-hot rows (section 6.6).

In: the body of a sum and the variable that it runs over.  Out: the sum without a loop, or None.
Always: a sum is never -0, so 0 is added to the term.
"""

from __future__ import annotations

import torch

from ..expr import Expr, const, in_range, make, masked, parts


def single(body: Expr, r: Expr) -> Expr | None:
    """The sum of `body` over `r`, where it is zero but for one value of `r`."""
    if body.op not in ("masked", "where") or body.args[2].op != "const" or body.args[2].args[0] or r in body.args[1].free:
        return None
    where: Expr | None = None
    tests, rest = [body.args[0]], []
    while tests:
        test = tests.pop()
        if test.op == "logical_and":
            tests += reversed(test.args)
        elif r not in test.free:
            rest.append(test)
        elif where is None and (where := _solved(test, r)) is not None:
            rest.append(where)
        else:
            return None
    if where is None:
        return None
    for test in rest[1:]:
        rest[0] = make("logical_and", (rest[0], test), torch.bool)
    zero = const(0, body.dtype)
    term = masked(rest[0], body.args[1], zero)
    return make("add", (term, zero), body.dtype) if body.dtype.is_floating_point else term


def _solved(test: Expr, r: Expr) -> Expr | None:
    """Whether `test` holds for a value of `r`, where it is an equation with `r`; None where it is none."""
    if test.op != "eq":
        return None
    a, b = test.args if r not in test.args[0].free else reversed(test.args)
    if r in a.free or b.op != "value":
        return None
    k, terms = parts(b.args[0])
    if terms != ((r, 1),):
        return None
    if a.op == "value":
        return in_range(a.args[0], k, k + r.args[1])
    low, high = (const(x, a.dtype) for x in (k, k + r.args[1]))
    return make("logical_and", (make("ge", (a, low), torch.bool), make("lt", (a, high), torch.bool)), torch.bool)
