"""The byte model of proposition 1.1: what a kernel moves, what it computes, and what the whole graph must move.

In: nodes of a kernel over its final variables.  Out: bytes and operation counts.
Always: an element that is needed counts once a kernel (once a pass where a row does not fit into the cache), however
often it is loaded; elements that are never needed do not count (row 1.04).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ..codegen.target import Target
from ..expr import Expr, parts, postorder
from ..loops.nodes import Buffer, Compute, Extern, Loops, Reduction, Ref
from ..ops.atoms import ATOMS

LINE = 64  # bytes of a cache line
FOLDING = {"welford": 3}  # operations for each element that a reduction takes, 1 where not named


def points(offset: Expr) -> int:
    """Upper bound of the number of elements that an offset visits: it moves with its free variables only."""
    assert offset.low is not None and offset.high is not None
    return min(math.prod(v.args[1] for v in offset.free), offset.high - offset.low + 1)


def distinct(buffer: Buffer) -> int:
    """Elements of a buffer that differ in memory (an expanded dimension holds one)."""
    return min(buffer.span, math.prod(n for n, st in zip(buffer.size, buffer.stride, strict=True) if st))


def image(offsets: Iterable[Expr], buffer: Buffer) -> int:
    """Elements of `buffer` that are needed at these offsets."""
    return min(distinct(buffer), sum(map(points, offsets)))


def least(offset: Expr) -> int:
    """A lower bound of the number of elements that an affine offset visits."""
    count, reach = 1, 0
    for term, c in sorted(parts(offset)[1], key=lambda item: abs(item[1])):
        if term.op != "var":
            return points(offset)
        n = term.args[1]
        count = count * n if abs(c) > reach else max(count, n)
        reach += abs(c) * (n - 1)
    return count


def levels(nodes: Sequence[tuple[Sequence[str], Sequence[str], bool]]) -> list[int]:
    """The pass of each (reads, writes, is a reduction): one more than the reductions that it waits for."""
    available: dict[str, int] = {}
    out = []
    for reads, writes, reduction in nodes:
        level = max((available[r] for r in reads if r in available), default=0)
        out.append(level)
        available.update(dict.fromkeys(writes, level + reduction))
    return out


def column(rdims: Iterable[Expr], offsets: Iterable[Expr]) -> bool:
    """Whether the reduced loops stride over memory: most offsets walk with a smaller stride along a parallel loop."""
    reduced = frozenset(rdims)
    strided = votes = 0
    for offset in offsets:
        terms = [(abs(c), t in reduced) for t, c in parts(offset)[1] if t.op == "var"]
        if any(r for _, r in terms) and any(not r for _, r in terms):
            votes += 1
            strided += not min(terms)[1]
    return 2 * strided > votes


def footprint(rdims: Sequence[Expr], accesses: Iterable[tuple[Expr, int]]) -> int:
    """Bytes that stay in the cache while one row (or one cache line of columns) is walked several times.

    `accesses`: offsets with the item size of their buffer.
    """
    reduced = frozenset(rdims)
    full = [(e, size) for e, size in accesses if not reduced.isdisjoint(e.free)]
    is_column = column(rdims, (e for e, _ in full))
    return sum(
        math.prod(v.args[1] for v in e.free & reduced) * (LINE if is_column and e.free - reduced else size)
        for e, size in full
    )


def kernel_cost(
    nodes: Sequence[Compute], rdims: Sequence[Expr], local: frozenset[str], buffers: dict[str, Buffer], target: Target
) -> tuple[int, int, int]:
    """(bytes read, bytes written, operations) of a kernel."""
    reduced = frozenset(rdims)
    made: dict[str, int] = {}  # buffer -> the node of this kernel that defines it
    inside: list[list[Expr]] = []  # loads of values of this kernel, by node
    outside: list[list[Expr]] = []
    accesses: dict[tuple[Expr, int], None] = {}
    counted: set[tuple[Expr, bool]] = set()
    flops = written = 0
    for k, node in enumerate(nodes):
        reduction = isinstance(node.loop, Reduction)
        count = FOLDING.get(node.loop.kind, 1) if isinstance(node.loop, Reduction) else 0
        found: list[Expr] = []
        for e in postorder(node.loop.body, *node.at):
            if e.op == "load":
                found.append(e)
            elif e.op in ATOMS and (e, reduction) not in counted:
                counted.add((e, reduction))
                count += 1
        flops += count * math.prod(v.args[1] for v in (*node.vars, *node.rvars))
        inside.append([e for e in found if e.name in made])
        outside.append([e for e in found if e.name not in made])
        accesses.update(((e.args[1], buffers[e.name].dtype.itemsize), None) for e in outside[k])
        for buffer, at in zip(node.outputs, node.at, strict=True):
            made[buffer.name] = k
            if buffer.name not in local:
                accesses[at, buffer.dtype.itemsize] = None
                written += min(points(at), distinct(buffer)) * buffer.dtype.itemsize
    stages = [0] * len(nodes)
    if rdims and footprint(rdims, accesses) > target.l2:
        stages = levels([([e.name for e in i], n.writes, isinstance(n.loop, Reduction)) for i, n in zip(inside, nodes, strict=True)])
    once: dict[str, dict[Expr, None]] = {}
    walked: dict[tuple[int, str], dict[Expr, None]] = {}
    for k, level in enumerate(stages):
        # A value of an earlier pass is walked again: from memory where it was stored, else by computing it anew.
        stack, seen = [(e, True) for e in outside[k]] + [(e, False) for e in inside[k]], set()
        while stack:
            item = stack.pop()
            if item in seen:
                continue
            seen.add(item)
            e, external = item
            full = not reduced.isdisjoint(e.args[1].free)
            if not external:
                maker = made[e.name]
                if stages[maker] == level or not full:
                    continue
                if e.name in local:
                    stack += [(x, True) for x in outside[maker]] + [(x, False) for x in inside[maker]]
                    continue
            here = walked.setdefault((level, e.name), {}) if full else once.setdefault(e.name, {})
            here[e.args[1]] = None
    read = sum(image(offsets, buffers[n]) * buffers[n].dtype.itemsize for (_, n), offsets in walked.items())
    for name, offsets in once.items():
        if not any((level, name) in walked for level in stages):
            read += image(offsets, buffers[name]) * buffers[name].dtype.itemsize
    return read, written, flops


def lower_bound(loops: Loops, offsets: dict[str, list[Expr]], buffers: dict[str, Buffer]) -> int:
    """Proposition 1.1: bytes of the inputs' elements that some node needs, and of the elements that are returned.

    `offsets`: where kernels load each input or constant. Overlapping images count as the largest of them, so that
    the result stays a lower bound; elements that are picked by an index in memory count as all different.
    """
    outside = {b.name for b in loops.inputs} | set(loops.constants)
    spans: dict[str, list[tuple[int, int, int]]] = {}
    for name in outside:
        for e in offsets.get(name, ()):
            spans.setdefault(name, []).append((e.low or 0, e.high or 0, least(e)))
    for node in loops.nodes:
        for ref in node.refs if isinstance(node, Extern) else ():
            if ref.buffer in outside:
                spans.setdefault(ref.buffer, []).append(_span(ref))
    total = sum(min(_union(s), distinct(buffers[n])) * buffers[n].dtype.itemsize for n, s in spans.items())
    returned: dict[str, list[tuple[int, int, int]]] = {}
    for ref in loops.outputs:
        if isinstance(ref, Ref) and ref.buffer not in outside:
            returned.setdefault(ref.buffer, []).append(_span(ref))
    total += sum(min(_union(s), distinct(buffers[n])) * buffers[n].dtype.itemsize for n, s in returned.items())
    for node in loops.nodes:
        if isinstance(node, Compute):
            for buffer, at in zip(node.outputs, node.at, strict=True):
                if buffer.name in outside:
                    total += min(points(at), distinct(buffer)) * buffer.dtype.itemsize
    return total


def _span(ref: Ref) -> tuple[int, int, int]:
    if 0 in ref.size:
        return ref.offset, ref.offset, 0
    moving = [(n, s) for n, s in zip(ref.size, ref.stride, strict=True) if s and n > 1]
    high = ref.offset + sum((n - 1) * s for n, s in moving)
    return ref.offset, high, min(math.prod(n for n, _ in moving), high - ref.offset + 1)


def _union(spans: list[tuple[int, int, int]]) -> int:
    """A lower bound of the size of a union of sets, each given as (lowest, highest, count)."""
    total, end, most = 0, -1, 0
    for low, high, count in sorted(spans):
        if low > end:
            total, most = total + most, 0
        most, end = max(most, count), max(end, high)
    return total + most
