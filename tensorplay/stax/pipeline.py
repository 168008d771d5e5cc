"""The straight line from a captured graph to a program that runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..errors import NeedsDataError, UnsupportedError
from ..training import has_tape, trains
from .artifacts.build import build
from .codegen.cpp.emit import emit
from .codegen.detect import detect
from .codegen.target import Source, Target
from .joint.numbers import has_numbers
from .joint.opgraph import OpGraph
from .joint.retrace import retrace
from .loops.lower import lower
from .loops.nodes import Loops
from .loops.verify import verify
from .runtime.arena import KEEP_TRAINING
from .runtime.program import Program
from .schedule.plan import Plan
from .schedule.schedule import schedule

if TYPE_CHECKING:  # modules that few calls need are loaded where they are: a tenth of the time to the first result
    from .joint.differentiate import Joint
    from .joint.function import TrainingProgram


def stax(graph: fx.GraphModule, samples: Sequence[torch.Tensor], **options: Any) -> Any:
    """The back end of contract `backend(graph_module, example_inputs, **options) -> callable` (section 1.2).

    The callable takes the placeholders' tensors and returns the graph's outputs in the graph's own structure.
    Where an operator's result has a shape that only the data tell, what stands in front of it is compiled.
    """
    try:
        return whole(graph, samples, options)
    except NeedsDataError:
        from .joint.split import split
        from .runtime.divided import Divided, one_call

        parts = None if has_tape(graph) or has_numbers(graph) else split(graph, samples)
        if parts is None:
            raise
    plan = one_call(parts.target, parts.node, parts.line)
    first = whole(parts.first, samples, options)
    return Divided(first, parts.rest, Part(first.ops, plan.loops, plan, Source("cpp", "", (), {})))


def whole(graph: fx.GraphModule, samples: Sequence[torch.Tensor], options: dict[str, Any]) -> Any:
    """The program of a graph every operator of which has a place in it."""
    target = detect(options.get("cpu_isa"))
    clock = Clock()
    ops, apart = None, frozenset[int]()
    if has_tape(graph):
        from .joint.tape import taped

        ops = clock("retrace", taped(graph, samples))
    if ops is None and trains(graph, samples):
        from .joint.differentiate import differentiate

        joint = clock("differentiate", differentiate(graph, samples))
        if joint.tangents:
            return train(graph, joint, target, clock, options)
        from .joint.views import overlaps

        viewed = any(leaf.grad and leaf.links for leaf in joint.leaves)
        if viewed and any(s.requires_grad and overlaps(s.shape, s.stride()) for s in samples):
            raise UnsupportedError("returns a view of an input that requires grad and overlaps itself")
        apart = frozenset(k for k, leaf in enumerate(joint.leaves) if not leaf.grad)
    if ops is None:
        ops = clock("retrace", retrace(graph, samples))
    return finish(prepare(ops, target, clock), target, clock, graph, apart=apart)


def train(graph: fx.GraphModule, joint: Joint, target: Target, clock: Clock, options: dict[str, Any]) -> TrainingProgram:
    """A training region: its forward part is built now, its backward part up to the source; the first backward builds it."""
    from .joint.budget import chosen
    from .joint.function import TrainingProgram, Unserved
    from .joint.partition import partition

    parts = clock("partition", partition(joint, chosen(options)))
    consumed = frozenset(s.name for s in parts.saved)
    forward = prepare(parts.forward, target, clock)
    backward = prepare(parts.backward, target, clock, consumed)

    def built(ops: OpGraph) -> Callable[..., Any]:
        part = backward if ops is parts.backward else prepare(ops, target, Clock(), consumed)
        return finish(part, target, clock, consumes=True, keep=KEEP_TRAINING)

    def refuse(failed: Any, inputs: tuple) -> Any:
        raise Unserved(str(failed))

    run = finish(forward, target, clock, otherwise=refuse, keep=KEEP_TRAINING)
    return TrainingProgram(graph, joint, parts, run, built, (forward, backward), clock.seconds)


@dataclass(frozen=True)
class Part:
    """A graph on its way to a program: everything but the built artifact."""

    ops: OpGraph
    loops: Loops
    plan: Plan
    source: Source


def prepare(ops: OpGraph, target: Target, clock: Clock, consumed: frozenset[str] | None = None) -> Part:
    """Loops, plan and source of an operator graph. consumed: see `schedule`."""
    loops = clock("lower", verify(lower(ops)))
    on_cpu(loops)
    plan = clock("schedule", schedule(loops, target, consumed))
    return Part(ops, loops, plan, clock("codegen", emit(plan, target)))


def finish(part: Part, target: Target, clock: Clock, graph: fx.GraphModule | None = None, **how: Any) -> Program:
    """The program of a part. graph: the captured graph that it stands for. how: see `Program`."""
    artifact = clock("build", build(part.source, target))
    return Program(graph, part.ops, part.loops, part.plan, part.source, artifact, clock.seconds, **how)


def on_cpu(loops: Loops) -> None:
    """Native code gets bare pointers: it must never see memory of another device."""
    for buffer in loops.buffers.values():
        if buffer.device.type != "cpu":
            raise UnsupportedError(f"{buffer.name} is on {buffer.device}: the run time serves CPU tensors")


class Clock:
    """Seconds spent in each stage of one compilation."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def __call__(self, stage: str, result: Any) -> Any:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self.last
        self.last = now
        return result
