"""Compiles the C++ of hand-built plans with the machine's compiler and runs it on torch tensors."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import pathlib
import shutil
import subprocess
import tempfile

import torch

import tensorplay.stax.codegen.cpp as cpp
from tensorplay.stax.codegen.cpp.emit import emit
from tensorplay.stax.codegen.detect import detect
from tensorplay.stax.codegen.target import Source
from tensorplay.stax.expr import Expr, linear, load, var
from tensorplay.stax.loops.nodes import Buffer, Compute, Loops, Pointwise, Reduction, Ref, Scan
from tensorplay.stax.schedule.plan import Kernel, Memory, Plan

CPU = torch.device("cpu")
HEADERS = pathlib.Path(cpp.__file__).parent
LIB = pathlib.Path(torch.__file__).parent / "lib"
CXX = next((c for c in ("g++", "c++", "clang++") if shutil.which(c)), "")
FOLDER = tempfile.TemporaryDirectory(prefix="stax-test-")


@functools.cache
def library(text: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    name = hashlib.sha256((text + repr(flags)).encode()).hexdigest()[:16]
    source, out = pathlib.Path(FOLDER.name, f"{name}.cpp"), pathlib.Path(FOLDER.name, f"{name}.so")
    source.write_text(text)
    libs = [str(p) for p in (*sorted(LIB.glob("libgomp*.so*"))[:1], LIB / "libtorch_cpu.so")]
    command = [CXX, "-std=c++17", "-shared", "-fPIC", "-nostdlib", *flags, "-I", str(HEADERS), str(source), "-o", str(out)]
    done = subprocess.run([*command, "-Wl,--as-needed", *libs, "-lm", "-lgcc"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000] + "\n" + text
    return ctypes.CDLL(str(out))


def buffer(name: str, t: torch.Tensor) -> Buffer:
    return Buffer(name, t.dtype, CPU, tuple(t.shape), tuple(t.stride()))


def dense(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Buffer:
    return Buffer(name, dtype, CPU, size, tuple(torch.empty(size, device="meta").stride()))


def space(size: tuple[int, ...], stem: str = "x") -> tuple[Expr, ...]:
    return tuple(var(f"{stem}{k}", n) for k, n in enumerate(size))


def at(b: Buffer, point) -> Expr:
    return load(b.name, b.at(point), b.dtype)


def pointwise(name: str, size: tuple[int, ...], body: Expr, dtype: torch.dtype | None = None, variables=None) -> Compute:
    variables = space(size) if variables is None else variables
    out = dense(name, size, dtype or body.dtype)
    return Compute((out,), (linear(variables[: len(size)], out.stride),), Pointwise(variables, body), (name,))


def reduction(kind: str, names: tuple[str, ...], dims, rdims, body: Expr, dtypes: tuple[torch.dtype, ...]) -> Compute:
    outs = tuple(dense(n, tuple(v.args[1] for v in dims), d) for n, d in zip(names, dtypes, strict=True))
    return Compute(outs, tuple(linear(dims, o.stride) for o in outs), Reduction(kind, dims, rdims, body), (kind,))


def scan(kind: str, names: tuple[str, ...], variables, axis: int, body: Expr, dtypes) -> Compute:
    outs = tuple(dense(n, tuple(v.args[1] for v in variables), d) for n, d in zip(names, dtypes, strict=True))
    return Compute(outs, tuple(linear(variables, o.stride) for o in outs), Scan(kind, variables, axis, body), (kind,))


def plan_of(inputs: list[Buffer], kernels: list[Kernel], returned: list[str] | None = None) -> Plan:
    nodes = tuple(n for k in kernels for n in k.nodes)
    local = frozenset().union(*(k.local for k in kernels))
    outs = {b.name: b for n in nodes for b in n.outputs if b.name not in local}
    names = list(outs) if returned is None else returned
    refs = tuple(Ref(n, outs[n].size, outs[n].stride) for n in names)
    loops = Loops(tuple(inputs), nodes, refs)
    return Plan(loops, tuple(kernels), Memory(fresh=tuple(n for n in outs if n not in {b.name for b in inputs})))


def kernel(dims, nodes, rdims=(), local=(), read_bytes: int = 0) -> Kernel:
    return Kernel("kernel", tuple(dims), tuple(rdims), tuple(nodes), frozenset(local), read_bytes)


class Failed(Exception):
    """A check of the kernel failed; holds its message."""


def run(plan: Plan, inputs: list[torch.Tensor], isa: str | None = None, threads: int = 1) -> list[torch.Tensor]:
    """The outputs of a plan's native code; outputs are filled with a pattern first."""
    source = emit(plan, detect(isa))
    return run_source(source, plan, inputs, threads)


def run_source(source: Source, plan: Plan, inputs: list[torch.Tensor], threads: int = 1) -> list[torch.Tensor]:
    lib = library(source.text, source.flags)
    memory = {b.name: t for b, t in zip(plan.loops.inputs, inputs, strict=True)} | plan.loops.constants
    guard = []
    for name, b in plan.loops.buffers.items():
        if name not in memory:
            raw = torch.full((b.nbytes + 128,), 0x5A, dtype=torch.uint8)
            guard.append((name, raw, b.nbytes))
            memory[name] = raw[64 : 64 + b.nbytes].view(b.dtype).as_strided(b.size, b.stride)
    table = (ctypes.c_void_p * max(1, len(plan.slots)))(*(memory[s].data_ptr() for s in plan.slots))
    for entry in source.entries:
        code = lib[entry](table, threads)
        if code:
            raise Failed(source.checks[code - 1].message)
    for name, raw, n in guard:
        assert bool((raw[:64] == 0x5A).all()) and bool((raw[64 + n :] == 0x5A).all()), f"{name}: written outside"
    return [memory[r.buffer].as_strided(r.size, r.stride, memory[r.buffer].storage_offset() + r.offset) if isinstance(r, Ref) else r for r in plan.loops.outputs]
