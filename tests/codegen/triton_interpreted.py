"""Runs random programs and examples through the Triton printer and Triton's own interpreter on the CPU.

    TRITON_INTERPRET=1 python -m tests.codegen.triton_interpreted FIRST LAST

Prints one line for each wrong result and a last line of counts; the exit status is 1 if any was wrong.
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import product

import torch
import triton

from tensorplay.errors import UnsupportedError
from tensorplay.stax.codegen.target import Target
from tensorplay.stax.codegen.triton import kernel, launch
from tensorplay.stax.codegen.triton.emit import emit
from tensorplay.stax.expr import load, var
from tensorplay.stax.loops.interpret import interpret
from tensorplay.stax.loops.nodes import Compute, Loops, Scan
from tensorplay.stax.schedule import stages
from tensorplay.stax.schedule.schedule import schedule
from tests.loops.programs import F32, I64, Programs, buffer, tensor, whole
from tests.loops.test_text import example

CUDA = Target(device="cuda")


def equal(a, b):
    """Equal values; the interpreter's NumPy does not order zeros of different signs as the hardware does."""
    return a is b is None or (a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7)))


def both(loops, inputs):
    plan = schedule(loops, CUDA)
    source = emit(plan, CUDA)
    if "libdevice" in source.text:
        raise UnsupportedError("libdevice has no bodies in the interpreter")
    return launch.run(plan, launch.load(source), inputs), interpret(loops, inputs)


SCANS = (((3, 13), 1), ((13, 3), 0), ((1, 1), 0), ((2, 16, 5), 1), ((70,), 0))


def running(kind, dtype, size, axis):
    """A scan over its own input."""
    x, point = buffer("x", dtype, size), tuple(var(f"i{k}", n) for k, n in enumerate(size))
    outs = tuple(buffer(f"o{k}", I64 if k else dtype, size) for k in range(2 if "index" in kind else 1))
    node = Compute(outs, tuple(o.at(point) for o in outs), Scan(kind, point, axis, load("x", x.at(point), dtype)))
    return Loops((x,), (node,), tuple(map(whole, outs)))


def main(first: int, last: int) -> int:
    counts: Counter[str] = Counter()
    x, w = torch.randn(64, 128), torch.randn(64, 128)
    got, want = both(example(), [x, w])
    counts["wrong"] += not torch.allclose(got[0], want[0], atol=1e-4)
    for kind, dtype, (size, axis) in product(("sum", "prod", "max_index", "min_index"), (F32, I64), SCANS):
        loops = running(kind, dtype, size, axis)
        exact = {"sum": torch.arange(-3, 4), "prod": torch.tensor([-2, -1, 1, 2, 2])}  # in any order
        x = exact[kind][torch.randint(len(exact[kind]), size)].to(dtype) if kind in exact else tensor(loops.inputs[0], 3)
        for kernel.PERSISTENT, kernel.WALK, kernel.COLUMN, kernel.SCAN in ((4, 4, 4, (4, 4)), (4096, 2048, 64, (32, 128))):
            counts["scans"] += 1
            if not all(map(equal, *both(loops, [x]))):
                counts["wrong"] += 1
                print("wrong", kind, dtype, size, axis)
    for seed in range(first, last):
        loops = Programs(seed).loops()
        inputs = [tensor(b, k) for k, b in enumerate(loops.inputs)]
        kernel.PERSISTENT = 4 if seed % 2 else 4096  # also walks along short rows
        kernel.AGAIN, kernel.REWALK = (4, 4) if seed % 2 else (32768, 8192)
        kernel.WALK = 4 if seed % 2 else 2048
        kernel.COLUMN = 4 if seed % 4 == 1 else 64
        stages.LEAST, stages.PROGRAMS = (4, 8) if seed % 3 else (4096, 1024)
        try:
            got, want = both(loops, inputs)
        except UnsupportedError as error:
            counts[f"unsupported: {str(error).split(': ')[-1]}"] += 1
            continue
        except triton.runtime.errors.InterpreterError as error:
            counts["interpreter: " + str(error)[:40]] += 1
            continue
        counts["ran"] += 1
        if not all(map(equal, got, want)):
            counts["wrong"] += 1
            print("wrong", seed, got, want)
    print(dict(counts))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
