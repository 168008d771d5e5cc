"""Table 4.3 for one program: every transformation that its compilation made, in the three stages of figure 4.1.

In: a compiled version.  Out: a list of `Change`s: A the front end, B the operator graph, C loops and schedule.
Always: only what changed something is listed. Texts are made here, on request: compiling keeps none. The front end
runs again for them, on the captured graph and under the choices of that time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .graph.passes import run_passes


@dataclass(frozen=True)
class Change:
    """One transformation: its stage, its name, the text before and after, what it says of itself, seconds taken."""

    stage: str
    name: str
    before: str
    after: str
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        notes = "".join(f"\n    {note}" for note in self.notes)
        return f"[{self.stage}] {self.name}, {self.seconds * 1e3:.1f} ms{notes}"


def changes(version: Any) -> list[Change]:
    found = [*_front_end(version), *_operators(version), *_loops(version)]
    return [change for change in found if change.before != change.after]


def _front_end(version: Any) -> Iterator[Change]:
    if version.rewritten is None:
        return
    front = run_passes(version.captured.graph, choices=version.choices, texts=True)
    for step in front.steps:
        yield Change("A", step.name, step.before, step.after, step.notes, step.seconds)


def _operators(version: Any) -> Iterator[Change]:
    program, seconds, front = version.program, version.seconds, str(version.front.graph)
    joint, parts = getattr(program, "joint", None), getattr(program, "parts", None)
    if joint is not None:
        yield Change("B", "Differentiate", front, str(joint.module.graph), (), seconds.get("differentiate", 0.0))
        if parts is not None:
            halves = f"{program.forward}\n{program.backward}"
            yield Change("B", "MinCutPartition", str(joint.module.graph), halves, (), seconds.get("partition", 0.0))
        return
    ops = getattr(program, "ops", None)
    if ops is None:
        return
    recorded = str(ops.module.graph if ops.recorded is None else ops.recorded)
    yield Change("B", "Decompose", front, recorded, (), seconds.get("retrace", 0.0))
    yield Change("B", "Functionalize", recorded, str(ops))


def _loops(version: Any) -> Iterator[Change]:
    seconds = version.seconds
    for part in getattr(version.program, "parts", (version.program,)):
        plan = getattr(part, "plan", None)
        if plan is None:
            continue
        loops = str(part.loops)
        yield Change("C", "Lower", str(part.ops), loops, (), seconds.get("lower", 0.0))
        refused = tuple(f"not fused: {r.first}, {r.second}: {r.reason}" for r in plan.refused)
        yield Change("C", "FuseOrderPlace", loops, str(plan), refused, seconds.get("schedule", 0.0))
        yield Change(
            "C", "Generate", str(plan), "\n".join(part.source.kernels.values()), (), seconds.get("codegen", 0.0)
        )
