"""From loops to a plan: dependences, fusion, order, names, memory, costs (section 7).

In: `Loops` and the target.  Out: `Plan`.
Always: running the steps in order, each kernel node by node, gives what running the loops in order gives.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ..codegen.target import Target
from ..expr import Expr, substitute
from ..loops.nodes import Compute, Extern, Loop, Loops, Pointwise, Reduction, Scan
from .align import Access, Space, composed, named, numel, ordered
from .cost import kernel_cost, lower_bound, points
from .deps import Dependences, dependences
from .fuse import Fusion, Group
from .launch import launches
from .legality import carried
from .memory import plan_memory
from .order import in_order
from .peak import SMALL, peak
from .plan import Kernel, Plan, Refusal, Step
from .stages import in_stages


def schedule(loops: Loops, target: Target, consumed: Collection[str] | None = None) -> Plan:
    """Which loops form a kernel, in which order, in which memory.

    consumed: the inputs that die behind their last use, where memory counts; None where the arena is kept between calls.
    """
    given = None if consumed is None else [b.name for b in loops.inputs if b.name in consumed]
    deps = dependences(in_stages(loops) if target.device == "cuda" else loops)
    fusion = Fusion(deps, target)
    refusals = fusion.run()
    steps: list[Step] = []
    names: dict[int, str] = {}
    reads: list[dict[str, None]] = []
    kernels = 0
    fails: set[str] = set()
    for group in in_order(fusion):
        node = deps.nodes[group.nodes[0]]
        reads.append(dict.fromkeys(name for i in group.nodes for name in deps.reads[i]))
        if isinstance(node, Extern):
            steps.append(node)
            names[group.number] = node.name
        else:
            kernel = finish(group, f"k{kernels}", fusion)
            kernels += 1
            steps.append(kernel)
            names[group.number] = kernel.name
            if not deps.fails.isdisjoint(group.nodes):
                fails.add(kernel.name)
    refused = [Refusal(names[r.first], names[r.second], r.saved, r.reason) for r in refusals]
    together = launches(steps, fails)
    least, fits = bound(deps), dict[tuple[str, str], bool]()

    def planned(apart: Callable[[str, int], bool] = lambda name, last: False) -> Plan:
        memory = plan_memory(steps, reads, deps, together, apart, fits)
        return Plan(deps.loops, tuple(steps), memory, tuple(refused), least, together)

    return planned() if given is None else parted(planned, given)


def parted(planned: Callable[..., Plan], consumed: Collection[str]) -> Plan:
    """The memory that holds least at the highest step, with few tensors of their own.

    What stands apart is all that is large, or what dies in the last steps, where the highest one mostly lies.
    """
    whole = planned()
    large = planned(lambda name, last: whole.loops.buffers[name].nbytes > SMALL)
    limit = peak(large, consumed)
    if peak(whole, consumed) <= limit:
        return whole

    def since(time: int) -> Plan:
        return planned(lambda name, last: last >= time)

    above = bisect(range(len(whole.steps) + 1), False, key=lambda time: peak(since(time), consumed) > limit)
    return min(since(above - 1), large, key=lambda plan: len(plan.memory.apart))


def bound(deps: Dependences) -> int:
    """Proposition 1.1 for the whole graph."""
    offsets: dict[str, list[Expr]] = {}
    for found in deps.loads:
        for e in found:
            offsets.setdefault(e.name, []).append(e.args[1])
    return lower_bound(deps.loops, offsets, deps.buffers)


def finish(group: Group, name: str, fusion: Fusion) -> Kernel:
    """A group as a kernel: loops ordered, neighbours collapsed, canonical names, costs."""
    deps = fusion.deps
    group.nodes.sort()
    local = frozenset(w for w in group.stores if not _needed_outside(w, group, fusion))
    given = [n for n in (deps.nodes[i] for i in group.nodes) if isinstance(n, Compute)]
    space, change = canonical(group, given, local, fusion)
    maps = [composed(group.maps[i], change) for i in group.nodes]
    rows = [i in group.rows for i in group.nodes]
    nodes = tuple(over(n, at, space, row) for n, at, row in zip(given, maps, rows, strict=True))
    read, written, flops = kernel_cost(nodes, space.rdims, local, deps.buffers, fusion.target)
    return Kernel(name, space.dims, space.rdims, nodes, local, read, written, flops)


def canonical(
    group: Group, nodes: Sequence[Compute], local: frozenset[str], fusion: Fusion
) -> tuple[Space, dict[Expr, Expr]]:
    """The kernel's own loops x0, x1, ... and r0, r1, ..., and how the group's variables are written over them.

    Loops that carry something from one iteration to the next stay as they are, and so do empty ones.
    """
    space = group.space
    roots = [*(e for es in group.loads.values() for e in es), *group.stores.values(), *group.values]
    if any(map(carried, nodes)) or not numel(space.vars):
        return named(space.dims, space.rdims, roots, whole=False)
    buffers = fusion.deps.buffers
    accesses = [Access(e, 2 * points(e) * buffers[b].dtype.itemsize) for b, e in group.stores.items() if b not in local]
    for b, offsets in group.loads.items():
        if b not in group.stores:
            accesses += [Access(e, points(e) * buffers[b].dtype.itemsize) for e in offsets]
    rdims = space.fixed if space.fixed is not None else ordered(space.rdims, accesses)
    return named(ordered(space.dims, accesses), rdims, roots)


def over(node: Compute, at: dict[Expr, Expr], space: Space, row: bool) -> Compute:
    """The node with its variables replaced by the kernel's."""
    loop = node.loop
    body = substitute(loop.body, at)
    new: Loop
    if isinstance(loop, Reduction):
        new = Reduction(loop.kind, space.dims, space.rdims, body)
    elif isinstance(loop, Scan):
        new = Scan(loop.kind, space.dims, loop.axis, body)
    else:
        new = Pointwise(space.dims if row else space.vars, body)
    return replace(node, at=tuple(substitute(e, at) for e in node.at), loop=new)


def _needed_outside(name: str, group: Group, fusion: Fusion) -> bool:
    deps = fusion.deps
    if name in deps.returned or name in deps.written:
        return True
    return any(fusion.find(r) != group.number for r in deps.readers.get(name, ()))
