"""Programs that are one native entry: the extension allocates, launches and returns without any host code.

In: a plan, its entry, its arena.  Out: the extension's `Launch`, called like the host code; None where host code is
needed (library calls, written inputs, results that are views, other devices) or the extension is not there.
Always: it does what the host code of the same plan does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...errors import CheckFailed
from ...native import native
from ..artifacts.build import Artifact
from ..codegen.target import Source
from ..loops.nodes import Extern, Ref
from ..schedule.plan import Plan
from . import launch
from .arena import Arena
from .pages import LARGE, empty_large


def direct(
    plan: Plan, source: Source, artifact: Artifact, arena: Arena, eager: Callable[[CheckFailed, tuple], Any], views: Mapping[int, Any]
) -> Callable[..., tuple] | None:
    """The whole program as one call of the extension."""
    if native is None or len(plan.segments) != 1 or isinstance(plan.segments[0], Extern) or plan.loops.written_inputs or views:
        return None
    buffers = plan.loops.buffers
    results = [r for r in plan.loops.outputs if isinstance(r, Ref) and _whole(plan, r)]
    names = [r.buffer for r in results]
    if len(results) != len(plan.loops.outputs) or len({*names}) != len(names) or {*names} != {*plan.memory.fresh}:
        return None
    slots = {name: slot for slot, name in enumerate(plan.slots)}
    inputs = [b.name for b in plan.loops.inputs]
    if not {*slots} <= {*inputs, *names, *plan.memory.arena, *plan.loops.constants} or not {*names} <= {*slots}:
        return None
    return native.Launch(
        launch.entry_of(artifact, source.entries[0]),
        len(slots),
        arena.constants,
        tuple(slots.get(name, -1) for name in inputs),
        tuple(slots[name] for name in names),
        tuple((b.size, b.stride, b.dtype) for b in (buffers[name] for name in names)),
        (artifact, plan.loops.constants),
        empty_large if any(buffers[name].nbytes > LARGE for name in names) else launch.empty_cpu,
        torch.get_num_threads,
        arena.take if arena.bytes else None,
        arena.give if arena.bytes else None,
        lambda code, given: eager(CheckFailed(0, code), given),
    )


def _whole(plan: Plan, r: Ref) -> bool:
    b = plan.loops.buffers[r.buffer]
    fresh = r.buffer in plan.memory.fresh and b.device.type == "cpu"
    return fresh and r.offset == 0 and r.size == b.size and r.stride == b.stride
