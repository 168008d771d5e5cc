"""Back ends that stop at a level, and one that builds the kernels of many programs in one compilation.

A C++ compiler needs most of its time for starting, for our header and for linking; programs of the operator database
are a few lines each. `Batch` compiles them as one text, each program in a namespace of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx


class Staged:
    """A graph that is not native yet: the attributes that a `Program` has, and how it runs until it is."""

    host = ""

    def __init__(self, graph: fx.GraphModule | None, part: Any, current: Callable[..., Any], otherwise: Callable[..., Any] | None = None) -> None:
        self.graph, self.current, self.otherwise = graph, current, otherwise
        self.ops, self.loops, self.plan, self.source = part.ops, part.loops, part.plan, part.source
        self.seconds: dict[str, float] = {}

    def __call__(self, *inputs: torch.Tensor) -> Any:
        return self.current(*inputs)


def staged(graph: fx.GraphModule, samples: Sequence[torch.Tensor], part_of: Callable[..., Any], first: Callable[..., Any], made: Callable[[Staged], None]) -> Any:
    """The program of a captured graph, for inference or training. first: how an operator graph runs until `made` saw to it."""
    from tensorplay.stax.joint.budget import chosen
    from tensorplay.stax.joint.differentiate import differentiate
    from tensorplay.stax.joint.function import TrainingProgram, Unserved
    from tensorplay.stax.joint.partition import partition
    from tensorplay.stax.joint.retrace import retrace
    from tensorplay.training import trains

    def refuse(failed: Any, inputs: tuple) -> Any:
        raise Unserved(str(failed))

    def stage(ops: Any, otherwise: Callable[..., Any] | None = None) -> Staged:
        program = Staged(None, part_of(ops), first(ops), otherwise)
        made(program)
        return program

    if trains(graph, samples):
        joint = differentiate(graph, samples)
        if joint.tangents:
            parts = partition(joint, chosen({}))
            forward, backward = stage(parts.forward, refuse), stage(parts.backward)
            return TrainingProgram(graph, joint, parts, forward, lambda ops: backward if ops is parts.backward else stage(ops), (forward, backward))
    program = Staged(graph, part_of(retrace(graph, samples)), graph)
    made(program)
    return program


def Interpreted(graph: fx.GraphModule, samples: Sequence[torch.Tensor], **options: object) -> Any:
    """Stops at the plan and interprets it: no compiler runs."""
    from tensorplay.stax.codegen.detect import detect
    from tensorplay.stax.codegen.target import Source
    from tensorplay.stax.loops.interpret import interpret_plan
    from tensorplay.stax.loops.lower import lower
    from tensorplay.stax.loops.verify import verify
    from tensorplay.stax.pipeline import Part
    from tensorplay.stax.schedule.schedule import schedule

    def part_of(ops: Any) -> Part:
        loops = verify(lower(ops))
        return Part(ops, loops, schedule(loops, detect()), Source("cpp", "", (), {}))

    def interpreted(program: Staged) -> None:
        program.current = lambda *inputs: tuple(interpret_plan(program.plan, inputs))

    return staged(graph, samples, part_of, lambda ops: ops.module, interpreted)


@dataclass
class Batch:
    """A back end whose programs run on torch until `build`, and native code after it."""

    waiting: list[Staged] = field(default_factory=list)

    def __call__(self, graph: fx.GraphModule, samples: Sequence[torch.Tensor], **options: object) -> Any:
        from tensorplay.stax.codegen.detect import detect
        from tensorplay.stax.joint.function import Operators
        from tensorplay.stax.pipeline import Clock, prepare

        return staged(graph, samples, lambda ops: prepare(ops, detect(), Clock()), Operators, self.waiting.append)

    def build(self) -> None:
        """Compiles all that waits; where the compiler refuses the whole, each alone. A program that cannot be built says so when called."""
        from tensorplay.errors import CompilerError
        from tensorplay.stax.artifacts.build import Artifact, build
        from tensorplay.stax.codegen.detect import detect
        from tensorplay.stax.codegen.target import Source

        waiting, self.waiting = self.waiting, []
        if not waiting:
            return
        different = {p.source.text: p for p in waiting if p.source.entries}
        names = {text: f"program_{k}" for k, text in enumerate(different)}
        texts, entries = ['#include "stx.h"\n'], []
        for p in different.values():
            name, text = names[p.source.text], p.source.text.replace('#include "stx.h"', "")
            for entry in p.source.entries:
                text = text.replace(f" {entry}(", f" {name}_{entry}(")
                entries.append(f"{name}_{entry}")
            texts.append(f"namespace {name} {{\n{text}\n}}\n")
        target = detect()
        whole: Artifact | None = None
        with contextlib.suppress(CompilerError):
            whole = build(Source("cpp", "\n".join(texts), tuple(entries), {}, (), waiting[0].source.flags), target)
        for p in waiting:
            try:
                if whole is None:
                    p.current = _program(p, build(p.source, target))
                else:
                    name = names.get(p.source.text, "")
                    own = {entry: whole.entries[f"{name}_{entry}"] for entry in p.source.entries}
                    p.current = _program(p, Artifact(whole.key, whole.path, whole.built, whole.seconds, own), whole)
            except CompilerError as failure:
                p.current = _raising(failure)


def _program(p: Staged, artifact: Any, keep: Any = None) -> Callable[..., Any]:
    from tensorplay.stax.runtime.program import Program

    program = Program(p.graph, p.ops, p.loops, p.plan, p.source, artifact, {}, p.otherwise)
    program.keep = keep  # type: ignore[attr-defined]  # the code stays loaded as long as its artifact lives
    return program


def _raising(failure: Exception) -> Callable[..., Any]:
    def raises(*_: Any) -> Any:
        raise failure

    return raises


BACKENDS: dict[str, Any] = {"graph": "eager", "ops": "aot_eager", "loops": Interpreted, "kernels": "stax"}
