"""The most memory that a program holds at one time.

In: a plan, and the inputs that it lets go of behind their last use.  Out: bytes beside the other inputs and constants.
Always: the count of the host code: the arena as a whole, results from their first write on, what a library call
allocates until its last reader, an input that is consumed until its last. What a library call needs inside is not seen.
"""

from __future__ import annotations

from collections.abc import Collection

from ..loops.nodes import Extern, Ref
from .plan import Plan


def peak(plan: Plan, consumed: Collection[str] = ()) -> int:
    """Bytes at the highest step."""
    size = {name: b.nbytes for name, b in plan.loops.buffers.items()}
    returned = {r.buffer for r in plan.loops.outputs if isinstance(r, Ref)}
    made = {*plan.memory.fresh, *plan.memory.owned}
    segments = [(s,) if isinstance(s, Extern) else s for s in plan.segments]
    last: dict[str, int] = {}
    for at, steps in enumerate(segments):
        last |= {name: at for step in steps for name in (*step.reads, *step.writes)}
    dying: dict[int, list[str]] = {}
    for name, at in last.items():
        if name in consumed or (name in made and name not in returned):
            dying.setdefault(at, []).append(name)
    held = highest = plan.memory.arena_bytes + sum(size[name] for name in consumed)
    there = set(consumed)
    for at, steps in enumerate(segments):
        new = {name for step in steps for name in step.writes if name in made} - there
        there |= new
        held += sum(size[name] for name in new)
        highest = max(highest, held)
        held -= sum(size[name] for name in dying.get(at, ()))
    return highest
