"""A kernel whose conditions ask where along a loop a point lies, as kernels on the stretches between.

In: a `Kernel`.  Out: `Piece`s: together they store what it stores, each at its own points, with the conditions decided.
Always: no point belongs to two pieces; the offsets of a piece count from a base of its own in each buffer, so that
pieces of one form are one function.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ...expr import Expr, add, coefficient, load, loads, parts, rewrite, var
from ...loops.nodes import Compute, Pointwise
from ...loops.stretches import between, cuts
from ...schedule.deps import walk
from ...schedule.plan import Kernel

MOST = 64  # pieces of a kernel
ENTRY = 2  # steps that it takes to enter a loop and to leave it


@dataclass(frozen=True)
class Piece:
    """A kernel, and from which element of a buffer its offsets count."""

    kernel: Kernel
    base: dict[str, int] = field(default_factory=dict)


def pieces(kernel: Kernel, lanes: int) -> list[Piece]:
    """The kernel itself, or what stands for it."""
    if kernel.rdims or not all(isinstance(n.loop, Pointwise) and not walk(n).fails for n in kernel.nodes):
        return [Piece(kernel)]
    done: list[Kernel] = []
    waiting = [kernel]
    while waiting:
        k = waiting.pop()
        found = cuts(*(n.loop.body for n in k.nodes))
        v = max(k.dims, key=lambda d: len(found.get(d, ())), default=None)
        if v in found and len(done) + len(waiting) + len(found[v]) < MOST and _pays(k, v, found[v], lanes):
            waiting += reversed([*_split(k, v, [0, *found[v], v.args[1]])])
        else:
            done.append(k)
    return [Piece(kernel)] if len(done) == 1 else [_based(k) for k in done]


def _pays(kernel: Kernel, v: Expr, at: list[int], lanes: int) -> bool:
    """Whether loops without conditions take fewer steps along the lanes than one loop that computes them in each step."""
    if not any(coefficient(store, v) == 1 for n in kernel.nodes for store in n.at):
        return True
    apart = sum(math.ceil((high - low) / lanes) + ENTRY for low, high in pairwise([0, *at, v.args[1]]))
    return apart <= math.ceil(v.args[1] / lanes) * (1 + len(at))


def _split(kernel: Kernel, v: Expr, ends: list[int]) -> Iterator[Kernel]:
    for low, high in pairwise(ends):
        inner = var(v.name, high - low)
        dims = tuple(inner if d is v else d for d in kernel.dims)
        nodes = tuple(
            replace(n, at=tuple(between(at, v, low, high) for at in n.at), loop=Pointwise(dims, between(n.loop.body, v, low, high)))
            for n in kernel.nodes
        )
        share = (high - low) / v.args[1]
        costs = {name: math.ceil(getattr(kernel, name) * share) for name in ("read_bytes", "write_bytes", "flops")}
        yield replace(kernel, dims=dims, nodes=nodes, **costs)


def _based(kernel: Kernel) -> Piece:
    """The piece with its offsets counted from the least constant among them."""
    base: dict[str, int] = {}
    for n in kernel.nodes:
        offsets = [(e.name, e.args[1]) for e in loads(n.loop.body)] + [(b.name, at) for b, at in zip(n.outputs, n.at, strict=True)]
        for name, at in offsets:
            if name not in kernel.local:
                base[name] = min(base.get(name, parts(at)[0]), parts(at)[0])

    def moved(e: Expr) -> Expr | None:
        start = base.get(e.args[0], 0) if e.op == "load" else 0
        return load(e.args[0], add(e.args[1], -start), e.dtype) if start else None

    def counted(n: Compute) -> Compute:
        at = tuple(add(at, -base.get(b.name, 0)) for b, at in zip(n.outputs, n.at, strict=True))
        return replace(n, at=at, loop=Pointwise(n.loop.vars, rewrite(n.loop.body, moved)))

    return Piece(replace(kernel, nodes=tuple(counted(n) for n in kernel.nodes)), base)
