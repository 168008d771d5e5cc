"""Where along a loop conditions begin or cease to hold, and what is left of an expression between two such places.

In: expressions whose `masked` and `where` compare indices with constants.  Out: `cuts`, `between`.
Always: on a stretch between neighbouring cuts of a variable, every comparison of that variable alone is decided.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..expr import Expr, add, parts, postorder, rebuild, var

FEW = 32  # comparisons that each step of a reduction may make
LOGIC = frozenset(("logical_and", "logical_or", "logical_not"))
COMPARED = frozenset(("ge", "lt", "gt", "le", "eq", "ne"))


def comparisons(*roots: Expr) -> Iterator[Expr]:
    """The comparisons of an index with a constant that conditions below the roots consist of."""
    for e in postorder(*roots):
        stack = [e.args[0]] if e.op in ("masked", "where") else []
        while stack:
            test = stack.pop()
            if test.op in LOGIC:
                stack += test.args
            elif _compares(test):
                yield test


def _compares(e: Expr) -> bool:
    return e.op in COMPARED and e.args[0].op == "value" and e.args[1].op == "const" and e.args[1].dtype == torch.int64


def cuts(*roots: Expr) -> dict[Expr, list[int]]:
    """For each variable the values at which a condition differs from what it is at the value before."""
    found: dict[Expr, set[int]] = {}
    for test in comparisons(*roots):
        if (own := _alone(test)) is not None:
            v, c, limit = own
            at: tuple[int, ...]
            if test.op in ("eq", "ne"):
                at = () if limit % c else (limit // c, limit // c + 1)
            else:
                limit += test.op in ("gt", "le")
                at = (-(-limit // c),) if c > 0 else (limit // c + 1,)
            found.setdefault(v, set()).update(k for k in at if 0 < k < v.args[1])
    return {v: sorted(at) for v, at in found.items() if at}


def _alone(test: Expr) -> tuple[Expr, int, int] | None:
    """A comparison with one variable only, as (v, c, limit): c * v against limit."""
    k, terms = parts(test.args[0].args[0])
    if len(terms) != 1 or terms[0][0].op != "var":
        return None
    return (*terms[0], test.args[1].args[0] - k)


def between(root: Expr, v: Expr, low: int, high: int) -> Expr:
    """`root` where low <= v < high, as an expression of a variable of that name that counts from 0."""
    done: dict[Expr, Expr] = {v: add(var(v.name, high - low), low)}
    stack: list[tuple[Expr, Expr | None]] = [(root, None)]  # a node, and what stands for it once that is done
    while stack:
        node, same = stack.pop()
        if node in done:
            continue
        if same is not None:
            done[node] = rebuild(node, done.__getitem__) if same is node else done[same]
        elif v not in node.free:
            done[node] = node
        else:
            held = _held(node.args[0], v, low, high) if node.op in ("masked", "where") else None
            same = node if held is None else node.args[1 if held else 2]
            stack.append((node, same))
            stack += [(c, None) for c in (node.children if held is None else (same,)) if c not in done]
    return done[root]


def _held(test: Expr, v: Expr, low: int, high: int) -> bool | None:
    """Whether a condition holds everywhere between low and high, or nowhere."""
    if test.op in LOGIC:
        each = [_held(t, v, low, high) for t in test.args]
        if test.op == "logical_not":
            return None if each[0] is None else not each[0]
        ends = test.op == "logical_or"
        return ends if ends in each else None if None in each else not ends
    own = _alone(test) if _compares(test) else None
    if own is None or own[0] is not v:
        return None
    _, c, limit = own
    first, last = sorted((c * low, c * (high - 1)))
    if test.op in ("eq", "ne"):
        if first == limit == last:
            return test.op == "eq"
        return None if first <= limit <= last and not limit % c else test.op == "ne"
    least = first >= limit + (test.op in ("gt", "le"))
    most = last < limit + (test.op in ("gt", "le"))
    return None if not least and not most else least == (test.op in ("ge", "gt"))
