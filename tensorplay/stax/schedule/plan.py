"""The plan: which loops form a kernel, in which order, in which memory (section 7).

Always: every node stands in one step; steps are in dependency order; within a kernel, a value that a later node
of the same kernel reads at the same iteration point is forwarded in a register.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from ..expr import Expr
from ..loops.nodes import Compute, Extern, Loops


@dataclass(frozen=True)
class Kernel:
    """Loops that run as one nest over `dims` (parallel) and `rdims` (reduced, innermost or outermost as codegen likes).

    Every node is written over these very variables: a Pointwise has vars == dims + rdims (it runs at every point)
    or vars == dims (once a row); a Reduction has vars == dims and rvars == rdims; a Scan stands alone with
    rdims == (). Store offsets (`Compute.at`) and load offsets are linear in elements and already simplified.

    A load of a buffer written by an earlier node of the kernel is always at the offset that this node stored at
    (the same expression object), so its value is at hand; a Reduction's result is at hand once the loop over
    rdims is complete, so its readers belong to a later pass over the row. An input that the kernel writes back is
    loaded, by that node or by earlier ones, at the very offset of the store only: such a load takes the old value.

    A store may overwrite what a load of the same kernel reads at the same offset (a write-back, or an output that
    the memory plan puts over a dying input). So code computes all values of a point before it stores the first of
    them, and stores full points in the last pass over the row, values of a row behind it.
    """

    name: str
    dims: tuple[Expr, ...]
    rdims: tuple[Expr, ...]
    nodes: tuple[Compute, ...]
    local: frozenset[str] = frozenset()  # buffers that no other step and no output reads: no memory, no store
    read_bytes: int = 0  # model: each element that is needed, once
    write_bytes: int = 0
    flops: int = 0

    @property
    def model_bytes(self) -> int:
        """Bytes between the kernel and main memory in the model of proposition 1.1."""
        return self.read_bytes + self.write_bytes

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Buffers whose memory the kernel reads, in order of first use (the old value of one that it writes back too)."""
        made: set[str] = set()
        first: dict[str, None] = {}
        for n in self.nodes:
            first.update((r, None) for r in n.reads if r not in made)
            made.update(n.writes)
        return tuple(first)

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """Buffers that the kernel stores to memory."""
        return tuple(w for n in self.nodes for w in n.writes if w not in self.local)

    @property
    def origins(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(o for n in self.nodes for o in n.origins))


Step = Kernel | Extern


@dataclass(frozen=True)
class Refusal:
    """A pair of steps that share a buffer and were not fused, and why."""

    first: str
    second: str
    saved_bytes: int
    reason: str


@dataclass(frozen=True)
class Launch:
    """Kernels that start together, by name, and why the first of them did not join the launch before."""

    kernels: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True)
class Memory:
    """Where buffers live. Inputs, constants and kernel-local buffers need no entry.

    arena: planned intermediates, byte offsets (64-byte aligned) into one block leased for a call.
    fresh: buffers that the graph returns: allocated for each call with the buffer's own size and stride.
    owned: results that a library operator allocates itself; their pointer is known when the call returns.
    apart: intermediates that are a tensor each, so that their memory is free behind their last use.
    over: apart or fresh buffers that take the memory of an apart buffer that dies in the kernel that makes them.
    """

    arena: dict[str, int] = field(default_factory=dict)
    arena_bytes: int = 0
    fresh: tuple[str, ...] = ()
    owned: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    over: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Steps in order, their memory, and what was refused."""

    loops: Loops
    steps: tuple[Step, ...]
    memory: Memory
    refused: tuple[Refusal, ...] = ()
    lower_bound: int = 0  # proposition 1.1 for the whole graph: bytes of inputs that are needed + bytes of outputs
    launches: tuple[Launch, ...] = ()  # of all kernels in order; without it each kernel starts alone

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(s for s in self.steps if isinstance(s, Kernel))

    @property
    def externs(self) -> tuple[Extern, ...]:
        return tuple(s for s in self.steps if isinstance(s, Extern))

    @property
    def segments(self) -> tuple[tuple[Kernel, ...] | Extern, ...]:
        """Runs of kernels between library calls: each run is one entry into native code."""
        out: list[tuple[Kernel, ...] | Extern] = []
        for step in self.steps:
            if isinstance(step, Extern):
                out.append(step)
            elif out and isinstance(out[-1], tuple):
                out[-1] = (*out[-1], step)
            else:
                out.append((step,))
        return tuple(out)

    @property
    def together(self) -> tuple[tuple[Kernel, ...], ...]:
        """The kernels of each launch."""
        if not self.launches:
            return tuple((k,) for k in self.kernels)
        named = {k.name: k for k in self.kernels}
        return tuple(tuple(named[name] for name in launch.kernels) for launch in self.launches)

    @property
    def model_bytes(self) -> int:
        """Bytes that all steps move: what `lower_bound` bounds. A library call reads its operands, writes its results."""
        buffers = self.loops.buffers
        total = sum(k.model_bytes for k in self.kernels)
        for call in self.externs:
            total += sum(_elements(r.size, r.stride) * buffers[r.buffer].dtype.itemsize for r in call.refs)
            total += sum(_elements(b.size, b.stride) * b.dtype.itemsize for b in call.outputs if b is not None)
        return total

    @property
    def slots(self) -> tuple[str, ...]:
        """Every buffer that lives in memory, in the order of the pointer table that native code receives."""
        local = frozenset().union(*(k.local for k in self.kernels))
        return tuple(name for name in self.loops.buffers if name not in local)

    def __str__(self) -> str:
        from .text import show

        return show(self)


def _elements(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    return math.prod(n for n, st in zip(size, stride, strict=True) if st or not n)
