"""Loads a Triton module and runs a plan with it; Triton itself is imported here and no earlier.

In: a `Source` of language 'triton', its `Plan`, input tensors on the GPU.  Out: the flat outputs.
Always: the text lies in the artifact folder under its own digest, since Triton reads the source of its functions.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from ...artifacts import store
from ...loops.interpret import allocate, enter, leave, run_extern
from ...loops.nodes import Extern
from ...schedule.plan import Plan
from ..target import Source


def load(source: Source) -> ModuleType:
    """The module of a source."""
    key = hashlib.sha256(source.text.encode()).hexdigest()
    file = store.path(key, ".triton.py")
    text = source.text.encode()
    if not file.exists() or file.read_bytes() != text:
        store.write(file, text)
    spec = importlib.util.spec_from_file_location(f"stax_{key[:16]}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(plan: Plan, module: ModuleType, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """The flat outputs of a plan, its memory as planned, its library calls through torch."""
    loops, place, buffers = plan.loops, plan.memory, plan.loops.buffers
    with torch.no_grad():
        memory = enter(loops, inputs)
        arenas: dict[torch.device, torch.Tensor] = {}
        for name, offset in place.arena.items():
            b = buffers[name]
            if b.device not in arenas:
                arenas[b.device] = torch.empty(place.arena_bytes, dtype=torch.uint8, device=b.device)
            memory[name] = arenas[b.device][offset : offset + b.nbytes].view(b.dtype)
        for name in place.fresh:
            memory[name] = allocate(buffers[name])
        number = 0
        for segment in plan.segments:
            if isinstance(segment, Extern):
                run_extern(segment, memory)
            else:
                getattr(module, f"segment_{number}")([memory.get(name) for name in plan.slots])
                number += 1
        return leave(loops, inputs, memory, [])
