"""What always holds of a plan, checked.

In: a `Plan`.  Out: the same object, or an `IRError` that names the step.

Always: every node of the loops stands in one step, after what it reads; a kernel's nodes run over the kernel's
variables and meet the kernel's own values at the very offset where they were stored; a local buffer is read nowhere
else; every other buffer that is made has one place; two places of the arena that overlap are not alive together, and a
tensor takes over none that is alive, except that a kernel may store over what it is the last to read, at the same offset.
"""

from __future__ import annotations

from collections import Counter

from ..expr import Expr, loads
from ..loops.nodes import Buffer, Extern, Pointwise, Reduction, Ref, Scan
from ..loops.text import show_expr
from ..loops.verify import IRError, check_compute, need
from .memory import clock, takes_over
from .plan import Kernel, Plan, Step

ALIGNMENT = 64


def verify_plan(plan: Plan) -> Plan:
    """Returns `plan` if all its rules hold."""
    loops = plan.loops
    made = Counter(w for node in loops.nodes for w in node.writes)
    planned = Counter(w for step in plan.steps for w in all_writes(step))
    need(made == planned, f"steps make {planned - made} more and {made - planned} less than the loops")
    calls = (sum(isinstance(n, Extern) for n in loops.nodes), len(plan.externs))
    need(calls[0] == calls[1], f"{calls[1]} library calls planned, not {calls[0]}")
    buffers, written_back = loops.buffers, set(loops.written_inputs)
    typed: set[Expr] = set()
    defined = {b.name for b in loops.inputs} | loops.constants.keys()
    inputs = frozenset(b.name for b in loops.inputs)
    written: set[str] = set()
    for step in plan.steps:
        name = step.name
        for read in step.reads:
            need(read in defined, f"{name} reads {read} before it is made")
            need(read not in written, f"{name} reads {read} after it was written back")
        if isinstance(step, Kernel):
            check_kernel(step, buffers, inputs, typed)
        defined |= set(all_writes(step)) - (step.local if isinstance(step, Kernel) else set())
        written |= set(all_writes(step)) & written_back
    for out in loops.outputs:
        need(not isinstance(out, Ref) or out.buffer in defined, f"output {out} is not made")
    check_launches(plan)
    check_places(plan, buffers)
    check_arena(plan, buffers)
    return plan


def all_writes(step: Step) -> tuple[str, ...]:
    """Also those of local buffers."""
    return step.writes if isinstance(step, Extern) else tuple(w for n in step.nodes for w in n.writes)


def check_kernel(kernel: Kernel, buffers: dict[str, Buffer], inputs: frozenset[str], typed: set[Expr]) -> None:
    stored: dict[str, Expr] = {}
    stores = {b.name: at for n in kernel.nodes for b, at in zip(n.outputs, n.at, strict=True)}
    own = stores.keys()
    need(kernel.local <= own, f"{kernel.name} makes no {', '.join(kernel.local - own)}")
    for node in kernel.nodes:
        where = f"{kernel.name}: {node.name}"
        try:
            check_compute(node, buffers, typed)
        except IRError as error:
            raise IRError(f"{where}: {error}") from None
        match node.loop:
            case Pointwise(vars=v):
                need(v in (kernel.dims, kernel.dims + kernel.rdims), f"{where} runs over other variables")
            case Reduction(vars=v, rvars=r):
                need((v, r) == (kernel.dims, kernel.rdims), f"{where} runs over other variables")
            case Scan(vars=v):
                need(v == kernel.dims and not kernel.rdims and len(kernel.nodes) == 1, f"{where} does not stand alone")
        for n in loads(node.loop.body, *node.at):
            if n.name in own:
                offset = show_expr(n.args[1])
                old = n.name in inputs and n.name not in stored  # its value before the kernel, at the same point only
                need(old or n.name in stored, f"{where} reads {n.name} before it is made")
                need(n.args[1] is stores[n.name], f"{where} reads {n.name} at {offset}, stored elsewhere")
        stored.update((b.name, at) for b, at in zip(node.outputs, node.at, strict=True))


def check_launches(plan: Plan) -> None:
    """A launch holds neighbours, and none of them writes what another reads or writes."""
    need([k for together in plan.together for k in together] == list(plan.kernels), "launches hold other kernels, or in another order")
    at = {step.name: k for k, step in enumerate(plan.steps) if isinstance(step, Kernel)}
    for together in plan.together:
        reads: set[str] = set()
        writes: set[str] = set()
        for k, kernel in enumerate(together):
            need(at[kernel.name] == at[together[0].name] + k, f"{kernel.name} does not stand beside its launch")
            need(writes.isdisjoint((*kernel.reads, *kernel.writes)), f"{kernel.name} needs what its own launch makes")
            need(reads.isdisjoint(kernel.writes), f"{kernel.name} writes what its own launch reads")
            reads.update(kernel.reads)
            writes.update(kernel.writes)


def check_places(plan: Plan, buffers: dict[str, Buffer]) -> None:
    memory = plan.memory
    local = frozenset().union(*(k.local for k in plan.kernels))
    given = {b.name for b in plan.loops.inputs} | plan.loops.constants.keys()
    for name in buffers.keys() - given:
        places = (name in memory.arena) + sum(names.count(name) for names in (memory.fresh, memory.owned, memory.apart))
        need(places == (name not in local), f"{name} has {places} places")
    for out in plan.loops.outputs:
        if isinstance(out, Ref):
            need(out.buffer not in (*memory.arena, *memory.apart), f"output {out.buffer} lies in the arena, or apart")


def check_arena(plan: Plan, buffers: dict[str, Buffer]) -> None:
    memory = plan.memory
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    maker: dict[str, Step] = {}
    readers: dict[str, int] = {}  # steps that read a buffer when it is read last
    for k, step in zip(clock(plan.steps, plan.launches), plan.steps, strict=True):
        for name in (*step.reads, *step.writes):
            first.setdefault(name, k)
            maker.setdefault(name, step)
            readers[name] = readers.get(name, 0) + 1 if last.get(name) == k else 1
            last[name] = k

    def inherits(old: str, new: str) -> bool:
        step = maker[new]
        dies = last[old] == first[new] and readers[old] == 1 and old in step.reads
        return dies and in_place(step, buffers[old], buffers[new])

    ends: list[tuple[int, int, str]] = []
    for name, offset in memory.arena.items():
        end = offset + buffers[name].nbytes
        need(offset % ALIGNMENT == 0 and 0 <= offset and end <= memory.arena_bytes, f"{name} leaves the arena")
        if end > offset:
            ends.append((offset, end, name))
    ends.sort()
    for i, (offset, end, a) in enumerate(ends):
        for start, _, b in ends[i + 1 :]:
            if start >= end:
                break
            early, late = (a, b) if first[a] <= first[b] else (b, a)
            if last[early] < first[late]:
                continue
            need(start == offset and inherits(early, late), f"{early} and {late} overlap in {maker[late].name}")
    need(len({*memory.over.values()}) == len(memory.over), "two buffers take over the memory of one")
    for new, old in memory.over.items():
        fits = old in memory.apart and new in (*memory.apart, *memory.fresh) and takes_over(buffers[new], buffers[old])
        need(fits and inherits(old, new), f"{new} takes over {old}, which is not free")


def in_place(kernel: Step, old: Buffer, new: Buffer) -> bool:
    """Whether the kernel may store `new` over `old`: at each point it reads `old` there and nowhere else, and before."""
    if isinstance(kernel, Extern) or old.dtype.itemsize != new.dtype.itemsize or old.span != new.span or old.name in kernel.writes:
        return False
    at = next(a for n in kernel.nodes for b, a in zip(n.outputs, n.at, strict=True) if b.name == new.name)
    maker = next(k for k, n in enumerate(kernel.nodes) if new.name in n.writes)
    reads = [(k, n) for k, node in enumerate(kernel.nodes) for n in loads(node.loop.body, *node.at) if n.name == old.name]
    return all(k <= maker and n.args[1] is at for k, n in reads)
