"""Where buffers live: one arena for intermediates, planned over the order of steps (rows 7.08, 7.09, 4.32).

In: steps in order.  Out: `Memory`.
Always: two arena buffers that are alive in one step do not overlap, except where a kernel writes an element over
the element of a dying buffer that it reads at the same point; a library call's result never overlaps its arguments.
A buffer that stands apart is a tensor of its own, or takes over that of a dying one in the same way.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from ..expr import Expr, loads
from ..loops.nodes import Buffer, Compute, Pointwise
from .cost import distinct
from .deps import Dependences
from .plan import Kernel, Launch, Memory, Step

ALIGN = 64
aten = torch.ops.aten

# Library operators that can write their result into memory that we give them, and how.
OUT_VARIANTS = {
    aten.mm.default: aten.mm.out,
    aten.addmm.default: aten.addmm.out,
    aten.bmm.default: aten.bmm.out,
    aten.baddbmm.default: aten.baddbmm.out,
}


def writes_in_place(step: Step) -> bool:
    """Whether the step's results go where we say (a library call without an out= variant allocates its own)."""
    return isinstance(step, Kernel) or (step.library and step.target in OUT_VARIANTS)


def plan_memory(
    steps: Sequence[Step], reads: Sequence[Iterable[str]], deps: Dependences, launches: Sequence[Launch] = (),
    parts: Callable[[str, int], bool] = lambda name, last: False, fits: dict[tuple[str, str], bool] | None = None,
) -> Memory:  # fmt: skip
    """Best-fit placement in step order; a freed block is reused from the next step on, or in place where legal.

    `reads`: the buffers that each step reads, its own included. What runs as one launch counts as one step.
    `parts`: whether an intermediate stands apart, given the time of its last use. `fits`: what `in_place` said before.
    """
    owned: list[str] = []
    fresh: dict[str, None] = {}
    planned: dict[str, int] = {}  # buffer -> time at which it is defined
    last: dict[str, int] = {}
    times = clock(steps, launches)
    for at, step, read in zip(times, steps, reads, strict=True):
        for name in read:
            last[name] = at
        for name in step.writes:
            if name in deps.written:
                continue
            last[name] = at
            if not writes_in_place(step):
                owned.append(name)
            elif name in deps.returned:
                fresh[name] = None
            else:
                planned[name] = at
    arena = _Arena()
    fits = {} if fits is None else fits
    apart = dict.fromkeys(name for name in planned if parts(name, last[name]))
    over: dict[str, str] = {}
    dying: dict[int, list[str]] = {}
    for name in planned:
        dying.setdefault(last[name], []).append(name)
    users = Counter((at, name) for at, read in zip(times, reads, strict=True) for name in dict.fromkeys(read))
    inherited: set[str] = set()
    for k, (at, step) in enumerate(zip(times, steps, strict=True)):
        dead = dying.get(at, [])
        for name in step.writes:
            if name not in planned and name not in fresh:
                continue
            alone = name in fresh or name in apart
            heir = None
            if isinstance(step, Kernel):
                candidates = [d for d in dead if d in reads[k] and users[at, d] == 1 and d not in inherited and planned[d] < at]
                if alone:
                    candidates = [d for d in candidates if d in apart and takes_over(deps.buffers[name], deps.buffers[d])]
                else:
                    candidates = [d for d in candidates if d not in apart]
                for d in candidates:
                    if (name, d) not in fits:
                        fits[name, d] = in_place(step, name, d, deps.buffers)
                heir = next((d for d in candidates if fits[name, d]), None)
            if heir is not None:
                inherited.add(heir)
            if heir is not None and alone:
                over[name] = heir
            elif heir is not None:
                arena.inherit(name, heir)
            elif not alone:
                arena.place(name, deps.buffers[name].nbytes)
        if k + 1 == len(steps) or times[k + 1] != at:
            for name in dead:
                if name not in inherited and name not in apart:
                    arena.free(name)
    return Memory(arena.offsets, arena.top, tuple(fresh), tuple(owned), tuple(apart), over)


def takes_over(new: Buffer, old: Buffer) -> bool:
    """Whether a tensor of the old buffer is one of the new."""
    return replace(old, name=new.name) == new


def clock(steps: Sequence[Step], launches: Sequence[Launch]) -> list[int]:
    """The time of each step: kernels of one launch run at the same time."""
    first = {name: launch.kernels[0] for launch in launches for name in launch.kernels}
    out: list[int] = []
    now, before = -1, ""
    for step in steps:
        name = first.get(step.name, step.name) if isinstance(step, Kernel) else ""
        if not name or name != before:
            now += 1
        before = name
        out.append(now)
    return out


class _Arena:
    """Free blocks as sorted (offset, size); blocks in use by name."""

    def __init__(self) -> None:
        self.offsets: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.holes: list[tuple[int, int]] = []
        self.top = 0

    def place(self, name: str, nbytes: int) -> None:
        need = -(-nbytes // ALIGN) * ALIGN
        self.sizes[name] = need
        fitting = [(size, offset) for offset, size in self.holes if size >= need]
        if need == 0:
            self.offsets[name] = 0
        elif fitting:
            size, offset = min(fitting)
            self.holes.remove((offset, size))
            if size > need:
                bisect.insort(self.holes, (offset + need, size - need))
            self.offsets[name] = offset
        elif self.holes and sum(self.holes[-1]) == self.top:  # the last block is too small: let it grow
            self.offsets[name], _ = self.holes.pop()
            self.top = self.offsets[name] + need
        else:
            self.offsets[name] = self.top
            self.top += need

    def inherit(self, name: str, heir: str) -> None:
        self.offsets[name], self.sizes[name] = self.offsets[heir], self.sizes[heir]

    def free(self, name: str) -> None:
        offset, size = self.offsets[name], self.sizes[name]
        if not size:
            return
        at = bisect.bisect(self.holes, (offset, size))
        if at < len(self.holes) and self.holes[at][0] == offset + size:
            size += self.holes.pop(at)[1]
        if at and sum(self.holes[at - 1]) == offset:
            before, extra = self.holes.pop(at - 1)
            offset, size = before, size + extra
        bisect.insort(self.holes, (offset, size))


def in_place(kernel: Kernel, name: str, dead: str, buffers: dict[str, Buffer]) -> bool:
    """Whether `kernel` may store `name` over `dead`: same layout, and each point stores where it alone has loaded.

    Every pass over a row may load it: full points are stored in the last one (see `Kernel`).
    """
    new, old = buffers[name], buffers[dead]
    if new.dtype.itemsize != old.dtype.itemsize or new.span != old.span or distinct(new) != new.span:
        return False
    writer = next(i for i, n in enumerate(kernel.nodes) if name in n.writes)
    if not isinstance(kernel.nodes[writer].loop, Pointwise):
        return False
    at = kernel.nodes[writer].at[kernel.nodes[writer].writes.index(name)]
    readers = [i for i, n in enumerate(kernel.nodes) if dead in n.reads]
    return max(readers) <= writer and all(e is at for i in readers for e in _offsets(kernel.nodes[i], dead))


def _offsets(node: Compute, name: str) -> list[Expr]:
    return [e.args[1] for e in loads(node.loop.body, *node.at) if e.name == name]
