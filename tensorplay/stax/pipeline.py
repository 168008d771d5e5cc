"""The straight line from a captured graph to a program that runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..errors import UnsupportedError
from .artifacts.build import build
from .codegen.cpp.emit import emit
from .codegen.detect import detect
from .joint.retrace import retrace
from .loops.lower import lower
from .loops.nodes import Loops
from .loops.verify import verify
from .runtime.program import Program
from .schedule.schedule import schedule


def stax(graph: fx.GraphModule, samples: Sequence[torch.Tensor], **options: Any) -> Program:
    """The back end of contract `backend(graph_module, example_inputs, **options) -> callable` (section 1.2).

    The callable takes the placeholders' tensors and returns the graph's outputs in the graph's own structure.
    """
    target = detect(options.get("cpu_isa"))
    clock = Clock()
    ops = clock("retrace", retrace(graph, samples))
    loops = clock("lower", verify(lower(ops)))
    on_cpu(loops)
    plan = clock("schedule", schedule(loops, target))
    source = clock("codegen", emit(plan, target))
    artifact = clock("build", build(source, target))
    return Program(graph, ops, loops, plan, source, artifact, clock.seconds)


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
        self.seconds[stage] = now - self.last
        self.last = now
        return result
