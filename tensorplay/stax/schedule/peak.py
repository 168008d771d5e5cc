"""The most memory that a program holds at one time.

In: a plan, and the inputs that it lets go of behind their last use.  Out: bytes beside the other inputs and constants.
Always: the count of the host code: the arena up to its last use, or all the time where it is small; results from their
first write on; what stands apart, or a library call allocates, until its last reader; an input that is consumed until
its last; what takes over memory adds none. What a library call needs inside is not seen.
"""

from __future__ import annotations

from collections.abc import Collection

from ..loops.nodes import Extern, Ref
from .plan import Memory, Plan

SMALL = 64 * 1024  # bytes of what a training step need not free early: an arena between its calls, an intermediate


def peak(plan: Plan, consumed: Collection[str] = ()) -> int:
    """Bytes at the highest step."""
    memory = plan.memory
    return highest(plan, {*memory.fresh, *memory.owned, *memory.apart}, consumed)


def intermediates(plan: Plan) -> int:
    """Bytes of the arena and of what stands apart at the step where they are most."""
    return highest(plan, {*plan.memory.apart}, ())


def highest(plan: Plan, made: set[str], consumed: Collection[str]) -> int:
    """The most bytes that the arena, some of the buffers that are made, and some inputs take at one time."""
    memory, segments = plan.memory, [(s,) if isinstance(s, Extern) else s for s in plan.segments]
    size = {name: b.nbytes for name, b in plan.loops.buffers.items()}
    returned = {first_in(memory, r.buffer) for r in plan.loops.outputs if isinstance(r, Ref)}
    used = [dict.fromkeys(first_in(memory, name) for step in steps for name in (*step.reads, *step.writes)) for steps in segments]
    last = {name: at for at, names in enumerate(used) for name in names}
    dying: dict[int, list[str]] = {}
    for name, at in last.items():
        if name in consumed or (name in made and name not in returned):
            dying.setdefault(at, []).append(name)
    end = last_use(plan) if memory.arena_bytes > SMALL else len(segments)
    there, held = set(consumed), sum(size[name] for name in consumed)
    most = held
    for at, names in enumerate(used):
        new = [name for name in names if name in made and name not in there]
        there.update(new)
        held += sum(size[name] for name in new)
        most = max(most, held + (memory.arena_bytes if at <= end else 0))
        held -= sum(size[name] for name in dying.get(at, ()))
    return most


def last_use(plan: Plan) -> int:
    """The last segment that uses the arena."""
    segments, arena = [(s,) if isinstance(s, Extern) else s for s in plan.segments], plan.memory.arena
    return max((k for k, steps in enumerate(segments) for s in steps if not arena.keys().isdisjoint((*s.reads, *s.writes))), default=-1)


def first_in(memory: Memory, name: str) -> str:
    """The buffer for which the memory was allocated that this one has taken over."""
    while name in memory.over:
        name = memory.over[name]
    return name
