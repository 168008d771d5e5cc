"""When loops may be reordered, tiled and fused: distance vectors (row 7.10).

In: distance vectors, one entry a loop from the outermost inwards: how many iterations lie between a value's making
and its use.  Out: whether a transformation keeps every value made before it is used.
Always: a pointwise loop and the parallel loops of a reduction carry nothing (a reduction may take its elements in any
order), a scan carries distance 1 along its axis. So kernels need one question only, `same_point`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..expr import Expr
from ..loops.nodes import Compute, Scan


def forward(distance: Sequence[int]) -> bool:
    """Whether a distance is lexicographically non-negative: its first entry that is not zero is positive."""
    return next((d > 0 for d in distance if d), True)


def may_reorder(distances: Iterable[Sequence[int]], order: Sequence[int]) -> bool:
    """Whether the loops may be nested in another order: every permuted distance still points forward."""
    return all(forward([distance[k] for k in order]) for distance in distances)


def may_tile(distances: Iterable[Sequence[int]]) -> bool:
    """Whether the band of loops may be tiled: no distance has a negative entry."""
    return all(d >= 0 for distance in distances for d in distance)


def same_point(stored: Expr, loaded: Expr) -> bool:
    """Whether two nodes over the same variables may run point by point in one nest.

    The distance between making and using is zero in every loop iff the offsets are one expression; interned
    expressions in normal form make it a comparison of identities.
    """
    return stored is loaded


def carried(node: Compute) -> tuple[tuple[int, ...], ...]:
    """The distance vectors of a node over its own dims that are not zero."""
    if isinstance(node.loop, Scan):
        return (tuple(int(k == node.loop.axis) for k in range(len(node.vars))),)
    return ()
