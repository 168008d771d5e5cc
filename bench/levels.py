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
    """A program that is not native: `plan`, `loops`, `ops`, `source` as a `Program` has them, and how it runs."""

    host = ""

    def __init__(self, graph: fx.GraphModule, samples: Sequence[torch.Tensor], native: bool) -> None:
        from tensorplay.stax.codegen.cpp.emit import emit
        from tensorplay.stax.codegen.detect import detect
        from tensorplay.stax.codegen.target import Source
        from tensorplay.stax.joint.retrace import retrace
        from tensorplay.stax.loops.lower import lower
        from tensorplay.stax.loops.verify import verify
        from tensorplay.stax.pipeline import on_cpu
        from tensorplay.stax.schedule.schedule import schedule

        self.graph = graph
        self.ops = retrace(graph, samples)
        self.loops = verify(lower(self.ops))
        self.target = detect()
        self.plan = schedule(self.loops, self.target)
        self.source = Source("cpp", "", (), {})
        self.seconds: dict[str, float] = {}
        if native:
            on_cpu(self.loops)
            self.source = emit(self.plan, self.target)
        self.run_native: Callable[..., Any] | None = None

    def __call__(self, *inputs: torch.Tensor) -> Any:
        return self.graph(*inputs) if self.run_native is None else self.run_native(*inputs)


class Interpreted(Staged):
    """Stops at the plan and interprets it: no compiler runs."""

    def __init__(self, graph: fx.GraphModule, samples: Sequence[torch.Tensor], **options: object) -> None:
        super().__init__(graph, samples, native=False)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        from tensorplay.stax.loops.interpret import interpret_plan

        return tuple(interpret_plan(self.plan, inputs))


@dataclass
class Batch:
    """A back end whose programs run the captured graph until `build`, and native code after it."""

    waiting: list[Staged] = field(default_factory=list)

    def __call__(self, graph: fx.GraphModule, samples: Sequence[torch.Tensor], **options: object) -> Staged:
        program = Staged(graph, samples, native=True)
        self.waiting.append(program)
        return program

    def build(self) -> None:
        """Compiles all that waits; where the compiler refuses the whole, each alone. A program that cannot be built says so when called."""
        from tensorplay.errors import CompilerError
        from tensorplay.stax.artifacts.build import Artifact, build
        from tensorplay.stax.codegen.target import Source

        waiting, self.waiting = self.waiting, []
        if not waiting:
            return
        names = {text: f"program_{k}" for k, text in enumerate(dict.fromkeys(p.source.text for p in waiting if p.source.entries))}
        texts, entries = ['#include "stx.h"\n'], []
        for p in {p.source.text: p for p in waiting if p.source.entries}.values():
            name, text = names[p.source.text], p.source.text.replace('#include "stx.h"', "")
            for entry in p.source.entries:
                text = text.replace(f" {entry}(", f" {name}_{entry}(")
                entries.append(f"{name}_{entry}")
            texts.append(f"namespace {name} {{\n{text}\n}}\n")
        target = waiting[0].target
        whole: Artifact | None = None
        with contextlib.suppress(CompilerError):
            whole = build(Source("cpp", "\n".join(texts), tuple(entries), {}, (), waiting[0].source.flags), target)
        for p in waiting:
            try:
                if whole is None:
                    p.run_native = _program(p, build(p.source, target))
                else:
                    name = names.get(p.source.text, "")
                    own = {entry: whole.entries[f"{name}_{entry}"] for entry in p.source.entries}
                    p.run_native = _program(p, Artifact(whole.key, whole.path, whole.built, whole.seconds, own), whole)
            except CompilerError as failure:
                p.run_native = _raising(failure)


def _program(p: Staged, artifact: Any, keep: Any = None) -> Callable[..., Any]:
    from tensorplay.stax.runtime.program import Program

    program = Program(p.graph, p.ops, p.loops, p.plan, p.source, artifact, {})
    program.keep = keep  # type: ignore[attr-defined]  # the code stays loaded as long as its artifact lives
    return program


def _raising(failure: Exception) -> Callable[..., Any]:
    def raises(*_: Any) -> Any:
        raise failure

    return raises


BACKENDS: dict[str, Any] = {"graph": "eager", "loops": Interpreted, "kernels": "stax"}
