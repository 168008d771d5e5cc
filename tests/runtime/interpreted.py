"""A stand-in for native code: entries that run a plan's kernels with the interpreter, on the memory of the table.

So the host code and the memory plan are tested by themselves, with pointers and all, before any C++ is trusted.
"""

import ctypes

import torch

from tensorplay.stax.artifacts.build import Artifact
from tensorplay.stax.codegen.target import Source
from tensorplay.stax.loops.interpret import allocate, run_compute, store
from tensorplay.stax.schedule.plan import Plan

ENTRY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


def memory_at(pointer: int, buffer) -> torch.Tensor:
    if not buffer.nbytes:
        return torch.empty(0, dtype=buffer.dtype)
    return torch.frombuffer((ctypes.c_char * buffer.nbytes).from_address(pointer), dtype=buffer.dtype)


def entry(plan: Plan, kernels) -> ctypes._CFuncPtr:
    def run(table: int, threads: int) -> int:
        pointers = (ctypes.c_void_p * len(plan.slots)).from_address(table)
        for kernel in kernels:
            inside, stores = {}, []
            for name in dict.fromkeys((*kernel.reads, *kernel.writes)):
                b = plan.loops.buffers[name]
                inside[name] = memory_at(pointers[plan.slots.index(name)], b)
            for node in kernel.nodes:
                for b, at, result in zip(node.outputs, node.at, run_compute(node, inside), strict=True):
                    if b.name not in plan.loops.written_inputs:
                        inside[b.name] = allocate(b)
                        store(inside[b.name], at, node.vars, result)
                    if b.name not in kernel.local:
                        stores.append((b, at, node.vars, result.clone()))
            for b, at, variables, result in stores:
                store(memory_at(pointers[plan.slots.index(b.name)], b), at, variables, result)
        return 0

    return ENTRY(run)


def interpreted(plan: Plan) -> tuple[Source, Artifact]:
    """The source and artifact that a program of this plan takes."""
    runs = [segment for segment in plan.segments if isinstance(segment, tuple)]
    entries = {f"segment_{k}": entry(plan, kernels) for k, kernels in enumerate(runs)}
    return Source("cpp", "", tuple(entries), {}), Artifact("", None, False, 0.0, entries)
