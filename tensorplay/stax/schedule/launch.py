"""Which kernels start together: neighbours that need nothing of each other run as one parallel region.

In: steps in order.  Out: their kernels as launches.
Always: the kernels of a launch stand next to each other in the order, none writes what another reads or writes, and
none can fail; each has its own loops of its own extent (a list of parameters of different shapes is one launch).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..loops.nodes import Extern, Pointwise
from .plan import Kernel, Launch, Step

MOST = 512  # kernels of a launch


def launches(steps: Sequence[Step], fails: Collection[str]) -> tuple[Launch, ...]:
    """Each kernel in one launch; `fails` names kernels with run-time checks."""
    out: list[Launch] = []
    members: list[Kernel] = []
    reads: set[str] = set()
    writes: set[str] = set()

    def close() -> None:
        if members:
            out.append(Launch(tuple(k.name for k in members), why))
        for kept in (members, reads, writes):
            kept.clear()

    why = ""
    for step in steps:
        if isinstance(step, Extern):
            close()
            why = ""
            continue
        needs = sorted(writes & set(step.reads) or (reads | writes) & set(step.writes))
        reason = alone(step, fails)
        if members:
            reason = reason or alone(members[-1], fails) or (f"{needs[0]} orders them" if needs else "")
            if len(members) == MOST:
                reason = reason or f"a launch has at most {MOST} kernels"
            if reason:
                close()
                why = reason
        members.append(step)
        reads.update(step.reads)
        writes.update(step.writes)
    close()
    return tuple(out)


def alone(kernel: Kernel, fails: Collection[str]) -> str:
    """Why a kernel starts with no other, or ''."""
    if kernel.name in fails:
        return f"{kernel.name} has run-time checks"
    if kernel.rdims or not all(isinstance(n.loop, Pointwise) for n in kernel.nodes):
        return f"{kernel.name} reduces or scans"
    if not all(v.args[1] for v in kernel.dims):
        return f"{kernel.name} has nothing to do"
    return ""
