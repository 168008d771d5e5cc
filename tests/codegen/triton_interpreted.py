"""Runs random programs and examples through the Triton printer and Triton's own interpreter on the CPU.

    TRITON_INTERPRET=1 python -m tests.codegen.triton_interpreted FIRST LAST

Prints one line for each wrong result and a last line of counts; the exit status is 1 if any was wrong.
"""

from __future__ import annotations

import sys
from collections import Counter

import torch
import triton

from tensorplay.errors import UnsupportedError
from tensorplay.stax.codegen.target import Target
from tensorplay.stax.codegen.triton import kernel, launch
from tensorplay.stax.codegen.triton.emit import emit
from tensorplay.stax.loops.interpret import interpret
from tensorplay.stax.schedule.schedule import schedule
from tests.loops.programs import Programs, tensor
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


def main(first: int, last: int) -> int:
    counts: Counter[str] = Counter()
    x, w = torch.randn(64, 128), torch.randn(64, 128)
    got, want = both(example(), [x, w])
    counts["wrong"] += not torch.allclose(got[0], want[0], atol=1e-4)
    for seed in range(first, last):
        loops = Programs(seed).loops()
        inputs = [tensor(b, k) for k, b in enumerate(loops.inputs)]
        kernel.PERSISTENT = 4 if seed % 2 else 4096  # also walks along short rows
        kernel.WALK = 4 if seed % 2 else 2048
        kernel.COLUMN = 4 if seed % 4 == 1 else 64
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
