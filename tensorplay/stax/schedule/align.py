"""Two iteration spaces over one set of variables: refinement, permutation, collapse (rows 6.08, 7.11).

In: spaces (loop variables with their roles) and links (a pair of offsets into one buffer, one from each side).
Out: `Match`, the substitutions that put both sides over the same variables, or the reason why there is none.
Always: a match is a bijection between the points of the two spaces, or between the second space and the rows of the
first. Every linked pair that must agree is checked afterwards by identity of the substituted offsets, so that a
wrong guess here can only lose a fusion, never a value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..expr import Expr, affine, integer, parts, postorder, substitute, var

NARROW = 8  # an innermost loop is not split into pieces shorter than this


@dataclass(frozen=True)
class Space:
    """Points: dims x rdims. `fixed` are the rdims in the order in which a reduction counts them, where it matters."""

    dims: tuple[Expr, ...]
    rdims: tuple[Expr, ...] = ()
    fixed: tuple[Expr, ...] | None = None

    @property
    def vars(self) -> tuple[Expr, ...]:
        return self.dims + self.rdims


@dataclass(frozen=True)
class Link:
    """Offsets of the two sides into one buffer. `must`: one side stores what the other loads."""

    first: Expr
    second: Expr
    must: bool


@dataclass(frozen=True)
class Match:
    """Both spaces over the pieces of the first one's variables.

    first: replacement of the first side's variables that were split.  second: of all the second side's variables.
    row: the second side runs once a row of the joint space, over its dims only.
    """

    first: dict[Expr, Expr]
    second: dict[Expr, Expr]
    space: Space
    row: bool = False
    memo: dict[Expr, Expr] = field(default_factory=dict, compare=False, repr=False)

    def of_first(self, e: Expr) -> Expr:
        """An index of the first side over the joint space."""
        return substitute(e, self.first) if self.first else e

    def of_second(self, e: Expr) -> Expr:
        """An index of the second side over the joint space."""
        found = self.memo.get(e)
        if found is None:
            found = self.memo[e] = substitute(e, self.second)
        return found


def extent(v: Expr) -> int:
    """The size of a loop variable."""
    return v.args[1]


def numel(variables: Iterable[Expr]) -> int:
    return math.prod(map(extent, variables))


class _Side:
    """One space while it is being matched: each variable as pieces, fastest first, and the pieces that are bound."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.pieces: dict[Expr, list[Expr]] = {v: [v] for v in space.vars}
        self.owner: dict[Expr, Expr] = {v: v for v in space.vars}
        self.bound: dict[Expr, Expr] = {}

    def digits(self, offset: Expr) -> list[tuple[int, Expr]] | None:
        """The offset as mixed-radix digits (weight, piece), smallest weight first; None where it is none."""
        out = []
        for term, weight in parts(offset)[1]:
            if term not in self.pieces or weight <= 0:
                return None
            for piece in self.pieces[term]:
                out.append((weight, piece))
                weight *= extent(piece)
        out.sort(key=lambda digit: digit[0])
        return out

    def split(self, piece: Expr, n: int) -> tuple[Expr, Expr]:
        """Cuts a piece into (fast part of size n, slow part)."""
        owner = self.owner[piece]
        low, high = var(f"{piece.name}.1", n), var(f"{piece.name}.0", extent(piece) // n)
        at = self.pieces[owner].index(piece)
        self.pieces[owner][at : at + 1] = [low, high]
        self.owner[low] = self.owner[high] = owner
        return low, high

    def free(self, variables: Sequence[Expr]) -> list[Expr]:
        """Unbound pieces of these variables, innermost first."""
        return [p for v in reversed(variables) for p in self.pieces[v] if p not in self.bound]

    def slow_first(self, variables: Iterable[Expr]) -> tuple[Expr, ...]:
        return tuple(p for v in variables for p in reversed(self.pieces[v]))

    def state(self) -> tuple:
        return {v: list(p) for v, p in self.pieces.items()}, dict(self.owner), dict(self.bound)

    def restore(self, state: tuple) -> None:
        self.pieces, self.owner, self.bound = state


def _bind(a: _Side, b: _Side, digits_a: list, digits_b: list) -> str:
    """Binds two lists of (weight, piece), fastest first, piece by piece, splitting where sizes differ; '' or why not."""
    left, right = digits_a[::-1], digits_b[::-1]
    while left and right:
        (weight, p), (weight_b, q) = left.pop(), right.pop()
        if weight != weight_b:
            return "it is read with other strides than it is written"
        n, m = extent(p), extent(q)
        if a.bound.get(p, q) is not q or b.bound.get(q, p) is not p:
            return "two shared buffers need different loop orders"
        if n == m:
            a.bound[p], b.bound[q] = q, p
            continue
        if p in a.bound or q in b.bound:
            return "two shared buffers need different loop orders"
        small = min(n, m)
        if max(n, m) % small:
            return f"ranges {n} and {m} have no common refinement"
        if n > m:
            p, high = a.split(p, small)
            left.append((weight * small if weight else 0, high))
        else:
            q, high = b.split(q, small)
            right.append((weight * small if weight else 0, high))
        a.bound[p], b.bound[q] = q, p
    return "only a part of it is read" if left or right else ""


def _bind_link(a: _Side, b: _Side, link: Link) -> str:
    """Binds the variables that two offsets into one buffer depend on."""
    if parts(link.first)[0] != parts(link.second)[0]:
        return "it is read at an offset"
    digits_a, digits_b = a.digits(link.first), b.digits(link.second)
    if digits_a is None or digits_b is None:
        return "its index is not affine"
    return _bind(a, b, digits_a, digits_b)


def _bind_rest(a: _Side, b: _Side, mine: list[Expr], theirs: list[Expr]) -> str:
    """Binds free pieces in loop order: any bijection is right where no shared buffer depends on them."""
    if numel(mine) != numel(theirs):
        return "their ranges differ"
    return _bind(a, b, [(0, p) for p in mine], [(0, q) for q in theirs])


def match(first: Space, second: Space, links: Sequence[Link]) -> Match | str:
    """Puts `second` over `first`'s variables. If exactly one of the two reduces, it must be `first`."""
    a, b = _Side(first), _Side(second)
    for link in links:
        before = a.state(), b.state()
        reason = _bind_link(a, b, link)
        if reason and link.must:
            return reason
        if reason:
            a.restore(before[0])
            b.restore(before[1])
    row = False
    if second.rdims:
        for p, q in a.bound.items():
            if (a.owner[p] in first.rdims) != (b.owner[q] in second.rdims):
                return "they reduce over different dimensions"
        for role in ("dims", "rdims"):
            if _bind_rest(a, b, a.free(getattr(first, role)), b.free(getattr(second, role))):
                return "they reduce over different ranges"
    else:
        mine, theirs = a.free(first.vars), b.free(second.dims)
        if first.rdims and not theirs and mine and not a.free(first.dims):
            if any(a.owner[p] in first.rdims for p in a.bound):
                return "it runs over a part of the row"
            row = True
        elif reason := _bind_rest(a, b, mine, theirs):
            return reason
    fixed = a.slow_first(first.fixed) if first.fixed is not None else None
    if second.fixed is not None:
        theirs_fixed = tuple(b.bound[q] for q in b.slow_first(second.fixed))
        if fixed is not None and fixed != theirs_fixed:
            return "they count the reduced elements in different orders"
        fixed = theirs_fixed
    space = Space(a.slow_first(first.dims), a.slow_first(first.rdims), fixed)
    if len(space.vars) > 10:
        return "their common refinement has more than 10 loops"
    return Match(
        first={v: _joined(p) for v, p in a.pieces.items() if p != [v]},
        second={v: _joined([b.bound[q] for q in p]) for v, p in b.pieces.items()},
        space=space,
        row=row,
    )


def _joined(pieces: Iterable[Expr]) -> Expr:
    """A variable from its pieces, fastest first."""
    weight, terms = 1, []
    for piece in pieces:
        terms.append((piece, weight))
        weight *= extent(piece)
    return affine(0, terms)


# ---- one space ---------------------------------------------------------------------------------------------------


def straighten(variables: Sequence[Expr], roots: Iterable[Expr], innermost: Expr | None) -> dict[Expr, Expr]:
    """Splits of variables after which v // d and v % d in the index expressions are affine; drops ranges of size 1."""
    cuts: dict[Expr, set[int]] = {}
    allowed = frozenset(variables)
    for node in postorder(*roots):
        if node.op in ("floordiv", "mod"):
            x, scale = node.args[0], 1
            if x.op == "floordiv":
                x, scale = x.args
            if x in allowed:
                cuts.setdefault(x, set()).update((scale, scale * node.args[1]))
    split: dict[Expr, Expr] = {v: integer(0) for v in variables if extent(v) == 1}
    for v, at in cuts.items():
        bounds = sorted({1, *at, extent(v)})
        if v in split or len(bounds) > 5 or bounds[-1] != extent(v):
            continue
        if any(high % low for low, high in pairwise(bounds)):
            continue
        if v is innermost and bounds[1] < NARROW:
            continue
        sizes = [high // low for low, high in pairwise(bounds)]
        split[v] = _joined(var(f"{v.name}.{len(sizes) - 1 - k}", n) for k, n in enumerate(sizes))
    return split


def split_variables(variables: Sequence[Expr], split: dict[Expr, Expr]) -> tuple[Expr, ...]:
    """The variables after `straighten`, slow parts first."""
    out: list[Expr] = []
    for v in variables:
        pieces = [v] if v not in split else [t for t, _ in sorted(parts(split[v])[1], key=lambda item: -item[1])]
        out.extend(pieces)
    return tuple(out)


@dataclass(frozen=True)
class Access:
    """An offset at which a kernel touches memory, and how much the order of loops should please it."""

    offset: Expr
    weight: int


def ordered(variables: Sequence[Expr], accesses: Sequence[Access]) -> tuple[Expr, ...]:
    """Slowest first: the variable that most traffic walks with the smallest stride becomes the innermost one."""
    if len(variables) < 2:
        return tuple(variables)
    strides = [dict(parts(access.offset)[1]) for access in accesses]
    votes: dict[Expr, int] = {}
    for access, stride in zip(accesses, strides, strict=True):
        walked = [(abs(stride[v]), v.name, v) for v in variables if v in stride]
        if walked:
            inner = min(walked)[2]
            votes[inner] = votes.get(inner, 0) + access.weight
    if not votes:
        return tuple(variables)
    best = max(votes, key=lambda v: (votes[v], v.name))
    ranked = sorted(zip(accesses, strides, strict=True), key=lambda pair: -pair[0].weight)
    agreeing = [s for _, s in ranked if best in s and s[best] == min(abs(s[v]) for v in variables if v in s)]
    disagreeing = [s for _, s in ranked if s not in agreeing]
    place = {v: i for i, v in enumerate(variables)}

    def slowness(v: Expr) -> tuple:
        seen = [abs(s.get(v, 0)) for s in (*agreeing[:4], *disagreeing[:4])]
        return (v is not best, *seen, -place[v])

    return tuple(sorted(variables, key=slowness, reverse=True))


def collapse(groups: Sequence[Sequence[Expr]], roots: Iterable[Expr]) -> dict[Expr, tuple[Expr, int]]:
    """Which neighbouring loops are one loop for every index (6.08): variable -> (innermost variable of its run, size).

    Neighbours o, i join iff each linear form has coefficient(o) == coefficient(i) * size(i); putting the joint
    variable for i and 0 for o then gives the same form.
    """
    forms = list(_forms(roots))
    merged: dict[Expr, tuple[Expr, int]] = {}
    for group in groups:
        run: list[Expr] = []
        size = 1
        for v in reversed(group):
            if run and all(form.get(v, 0) == form.get(run[0], 0) * size for form in forms):
                run.append(v)
                size *= extent(v)
            else:
                merged.update(dict.fromkeys(run, (run[0], size)) if run else {})
                run, size = [v], extent(v)
        merged.update(dict.fromkeys(run, (run[0], size)) if run else {})
    return merged


def _forms(roots: Iterable[Expr]) -> Iterator[dict[Expr, int]]:
    """The linear forms in loop variables that the index expressions are made of."""
    seen: set[Expr] = set()
    stack = [r for r in roots if r.free]
    while stack:
        node = stack.pop()
        if node in seen or not node.free:
            continue
        seen.add(node)
        if node.op in ("affine", "var"):
            form = {}
            for term, c in parts(node)[1]:
                if term.op == "var":
                    form[term] = c
                else:
                    stack.append(term)
            yield form
        elif node.op in ("floordiv", "mod"):
            stack.append(node.args[0])
        # the offsets within an `index` are roots of their own


def named(
    dims: Sequence[Expr], rdims: Sequence[Expr], roots: Iterable[Expr], whole: bool = True
) -> tuple[Space, dict[Expr, Expr]]:
    """The joint loops under their canonical names x0, x1, ..., r0, r1, ... and the substitution that leads there.

    `whole=False` keeps every loop as it is.
    """
    merged = collapse((dims, rdims), roots) if whole else {v: (v, extent(v)) for v in (*dims, *rdims)}
    at: dict[Expr, Expr] = {}
    spaces = []
    for prefix, group in (("x", dims), ("r", rdims)):
        fresh: list[Expr] = []
        for v in group:
            inner, size = merged[v]
            if inner is v:
                fresh.append(var(f"{prefix}{len(fresh)}", size))
                at[v] = fresh[-1]
            else:
                at[v] = integer(0)
        spaces.append(tuple(fresh))
    return Space(*spaces), at


def composed(mapping: dict[Expr, Expr], change: dict[Expr, Expr]) -> dict[Expr, Expr]:
    """`mapping`, then `change`."""
    return {v: substitute(x, change) for v, x in mapping.items()} if change else mapping
