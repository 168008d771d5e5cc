"""Refinement, permutation and collapse of loops (rows 6.08, 7.10, 7.11)."""

from __future__ import annotations

import itertools
import random

import pytest

from tensorplay.stax.expr import affine, floordiv, integer, mod, substitute, var
from tensorplay.stax.loops.nodes import Compute, Pointwise, Scan
from tensorplay.stax.schedule.align import Access, Link, Match, Space, extent, match, named, ordered, straighten
from tensorplay.stax.schedule.legality import carried, forward, may_reorder, may_tile, same_point


def dense(variables):
    weight, terms = 1, []
    for v in reversed(variables):
        terms.append((v, weight))
        weight *= extent(v)
    return affine(0, terms)


def variables(prefix, *sizes):
    return tuple(var(f"{prefix}{k}", n) for k, n in enumerate(sizes))


@pytest.mark.parametrize(
    "first, second, loops",
    [
        ((2, 128, 384), (2, 128, 6, 64), 4),
        ((8192,), (64, 128), 2),
        ((64, 128), (8192,), 2),
        ((4, 6), (2, 12), 3),
        ((4, 6), (6, 4), None),
        ((5, 7), (5, 7), 2),
    ],
)
def test_common_refinement(first, second, loops):
    a, b = variables("i", *first), variables("j", *second)
    found = match(Space(a), Space(b), [Link(dense(a), dense(b), True)])
    if loops is None:
        assert found == "ranges 6 and 4 have no common refinement"
        return
    assert isinstance(found, Match) and len(found.space.dims) == loops
    assert same_point(substitute(dense(a), found.first), substitute(dense(b), found.second))


def test_random_permuted_views_match():
    rng = random.Random(0)
    for _ in range(200):
        factors = [rng.choice((2, 3, 4, 5)) for _ in range(rng.randrange(2, 5))]
        a = variables("i", *factors)
        cut = rng.randrange(1, len(factors))
        sizes = [extent(v) for v in a]
        merged = [*sizes[: cut - 1], sizes[cut - 1] * sizes[cut], *sizes[cut + 1 :]]
        b = variables("j", *merged)
        order = list(range(len(b)))
        rng.shuffle(order)
        found = match(Space(a), Space(tuple(b[k] for k in order)), [Link(dense(a), dense(b), True)])
        assert isinstance(found, Match)
        assert same_point(substitute(dense(a), found.first), substitute(dense(b), found.second))


def test_rows_join_a_reduction():
    i, r, j = var("i", 6), var("r", 8), var("j", 6)
    space = Space((i,), (r,))
    found = match(space, Space((j,)), [Link(i, j, True)])
    assert isinstance(found, Match) and found.row and found.second == {j: i}
    full = variables("k", 6, 8)
    found = match(space, Space(full), [Link(i, full[0], True)])
    assert isinstance(found, Match) and not found.row and found.second == {full[0]: i, full[1]: r}
    flat = var("n", 48)
    found = match(space, Space((flat,)), [Link(affine(0, [(i, 8), (r, 1)]), flat, False)])
    assert isinstance(found, Match) and found.second[flat] is affine(0, [(i, 8), (r, 1)])
    assert match(space, Space((var("q", 8),)), [Link(r, var("q", 8), False)]) == "their ranges differ"
    assert "different" in match(space, Space((var("q", 8),), (var("p", 6),)), [Link(i, var("p", 6), False)])


def test_collapse_keeps_every_offset():
    rng = random.Random(1)
    for _ in range(200):
        dims = variables("i", *(rng.choice((2, 3, 4)) for _ in range(rng.randrange(1, 5))))
        offsets = []
        for _ in range(rng.randrange(1, 4)):
            chosen = [v for v in dims if rng.randrange(4)]
            offset = dense(chosen)
            if rng.randrange(3) == 0:
                offset = floordiv(offset, 6) if rng.randrange(2) else mod(offset, 6)
            offsets.append(offset)
        space, change = named(dims, (), offsets)
        new = [substitute(e, change) for e in offsets]
        want = sorted(tuple(value(e, dict(zip(dims, p, strict=True))) for e in offsets) for p in points(dims))
        got = sorted(tuple(value(e, dict(zip(space.dims, p, strict=True))) for e in new) for p in points(space.dims))
        assert want == got


def points(dims):
    return itertools.product(*(range(extent(v)) for v in dims))


def value(e, at):
    result = substitute(e, {v: integer(k) for v, k in at.items()})
    assert result.op == "integer"
    return result.args[0]


def test_6_08_contiguous_loops_are_one():
    dims = variables("i", 4, 8, 16)
    space, _ = named(dims, (), [dense(dims)])
    assert [extent(v) for v in space.dims] == [512]
    space, _ = named(dims, (), [dense(dims), dims[2]])  # a bias
    assert [extent(v) for v in space.dims] == [32, 16]


def test_innermost_loop_follows_the_traffic():
    i, j = variables("i", 64, 32)
    row, column = affine(0, [(i, 32), (j, 1)]), affine(0, [(i, 1), (j, 64)])
    assert ordered((i, j), [Access(row, 2), Access(column, 1)]) == (i, j)
    assert ordered((i, j), [Access(row, 1), Access(column, 2)]) == (j, i)


def test_division_and_remainder_by_splitting():
    n = var("n", 384)
    change = straighten((n,), [floordiv(n, 64), mod(n, 64)], None)
    assert substitute(floordiv(n, 64), change).op == "var" and substitute(mod(n, 64), change).op == "var"
    assert straighten((n,), [floordiv(n, 2)], n) == {}  # a pair of lanes is no loop
    assert straighten((var("one", 1),), [], None)


def test_7_10_distance_vectors():
    assert forward((0, 0)) and forward((0, 1)) and not forward((0, -1))
    assert not may_reorder([(1, -1)], (1, 0)) and may_reorder([(1, 1)], (1, 0))
    assert may_tile([(0, 1)]) and not may_tile([(1, -1)])
    i, j = variables("i", 4, 4)
    assert carried(Compute((), (), Scan("sum", (i, j), 1, i))) == ((0, 1),)
    assert carried(Compute((), (), Pointwise((i, j), i))) == ()
