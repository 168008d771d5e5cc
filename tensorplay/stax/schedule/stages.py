"""Few results of long reductions in two stages, on a device that runs a thousand programs at once.

In: `Loops`.  Out: `Loops` where such a reduction is one of parts and one that joins them, in a fixed order.
Always: the sum of what each part sees is what the reduction saw; the value of a part has the dtype of the body.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ..expr import Expr, add, const, in_range, integer, linear, load, masked, mul, substitute, var
from ..loops.nodes import Buffer, Compute, Loops, Node, Reduction, row_major

PROGRAMS = 1024  # that keep the device busy
FEW = 32  # results at most: with more, rows that are walked again had better stay one kernel
LEAST = 4096  # elements of a part
IDENTITY = {"sum": 0, "prod": 1, "amax": -math.inf, "amin": math.inf, "any": False, "all": True}


def in_stages(loops: Loops) -> Loops:
    """Every reduction that has fewer results than the device runs programs, and is long, in two stages."""
    nodes = [stage for node in loops.nodes for stage in stages(node)]
    return loops if len(nodes) == len(loops.nodes) else replace(loops, nodes=tuple(nodes))


def stages(node: Node) -> Iterator[Node]:
    """The node itself, or the two that stand for it."""
    if not isinstance(node, Compute) or not isinstance(node.loop, Reduction) or node.loop.kind not in IDENTITY:
        yield node
        return
    kind, body = node.loop.kind, node.loop.body
    rows, length = (math.prod(v.args[1] for v in vs) for vs in (node.vars, node.rvars))
    longest = max(node.rvars, key=lambda v: v.args[1], default=integer(0))
    parts = min(PROGRAMS // max(rows, 1), length // LEAST, longest.args[1] if node.rvars else 0)
    if parts < 2 or rows > FEW:
        yield node
        return
    size = longest.args[1]
    step = -(-size // parts)
    parts = -(-size // step)
    part, rest = var(f"{longest.name}_part", parts), var(longest.name, step)
    at = add(mul(part, step), rest)
    inside = substitute(body, {longest: at})
    if parts * step != size:
        inside = masked(in_range(at, 0, size), inside, const(identity(kind, body.dtype), body.dtype))
    dims = (part, *node.vars)
    sizes = tuple(v.args[1] for v in dims)
    buffer = Buffer(f"{node.name}_parts", body.dtype, node.outputs[0].device, sizes, row_major(sizes))
    where: Expr = linear(dims, buffer.stride)
    rvars = tuple(rest if v is longest else v for v in node.rvars)
    yield Compute((buffer,), (where,), Reduction(kind, dims, rvars, inside), node.origins)
    yield replace(node, loop=Reduction(kind, node.vars, (part,), load(buffer.name, where, body.dtype)))


def identity(kind: str, dtype: torch.dtype) -> bool | int | float:
    """What leaves the other operand of `kind` as it is, as a value of `dtype`."""
    if kind in ("amax", "amin") and not dtype.is_floating_point:
        if dtype is torch.bool:
            return kind == "amin"
        return torch.iinfo(dtype).min if kind == "amax" else torch.iinfo(dtype).max
    return float(IDENTITY[kind]) if dtype.is_floating_point else IDENTITY[kind]
