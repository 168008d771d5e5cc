"""Kernels of every kind through every level to Triton, run on the GPU against eager: error, time, bandwidth.

    python bench/gpu_example.py [--sweep] [names ...]

Prints a table and exits with 1 if a result is wrong. A result is right if its error against float64 is at most four
times eager's, and a NaN in the input comes out where eager has it. GB/s counts model bytes; "copy" is what a device
copy reaches in the same run. --sweep tries other limits for rows that are walked more than once and prints the times.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tensorplay.capture.tracer import capture
from tensorplay.stax.codegen.target import Target
from tensorplay.stax.codegen.triton import kernel, launch
from tensorplay.stax.codegen.triton.emit import emit
from tensorplay.stax.joint.retrace import retrace
from tensorplay.stax.loops.lower import lower
from tensorplay.stax.loops.verify import verify
from tensorplay.stax.schedule.schedule import schedule
from tensorplay.stax.schedule.verify import verify_plan

CUDA = Target(device="cuda")
# for --sweep: rows that are walked again (elements held over all operands, of a walk, of a thread in either case), and
# the outputs and rows of a block of a scan across memory
LIMITS = ((32768, 8192, 32, 8), (32768, 4096, 32, 8), (32768, 16384, 32, 16), (65536, 8192, 64, 8), (4096, 8192, 32, 8))
SCANS = ((16, 128), (16, 256), (32, 64), (32, 256), (64, 64))
SQUARE, WIDE, FLAT = (16384, 16384), (8192, 50304), (1, 1 << 28)
# name: function of x and w, its sizes
CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, int], ...]]] = {
    "example 1.1": (lambda x, w: ((x + w).relu() * 2.0).sum(dim=1), ((64, 128), SQUARE, WIDE)),
    "gelu(2 x + w), tanh": (lambda x, w: F.gelu(x * 2.0 + w, approximate="tanh"), (SQUARE,)),
    "softmax(x)": (lambda x, w: torch.softmax(x, -1), ((4096, 1024), SQUARE, WIDE)),
    "layer_norm(x, w, w)": (lambda x, w: F.layer_norm(x, x.shape[-1:], w[0], w[0]), ((4096, 1024), SQUARE, WIDE)),
    "rms_norm(x, w)": (lambda x, w: F.rms_norm(x, x.shape[-1:], w[0], 1e-5), (SQUARE,)),
    "(x * w).sum(0)": (lambda x, w: (x * w).sum(dim=0), (SQUARE, WIDE)),
    "x.sum()": (lambda x, w: x.sum(), (SQUARE, FLAT)),
    "x.amax()": (lambda x, w: x.amax(), (SQUARE,)),
    "cumsum(x, 1)": (lambda x, w: x.cumsum(1), ((4096, 1024), SQUARE)),
    "cumsum(x, 0)": (lambda x, w: x.cumsum(0), (SQUARE,)),
    "x.cummax(1)": (lambda x, w: x.cummax(1), ((4096, 1024),)),
}


def build(f, *args):
    """The plan, its Triton source and its module for one function and its arguments."""
    captured = capture(f, args, {})
    plan = verify_plan(schedule(verify(lower(retrace(captured.graph, captured.samples))), CUDA))
    source = emit(plan, CUDA)
    return plan, source, launch.load(source)


def milliseconds(f, repeat=20):
    """The best of five rounds."""
    best = float("inf")
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeat):
            f()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / repeat)
    return best


def leaves(result) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def errors(f, got, x, w) -> tuple[float, float]:
    """The largest error of our values and of eager's against float64."""
    exact = leaves(f(x.double(), w.double()))
    theirs = leaves(f(x, w))
    return tuple(
        max((a.double() - e.double()).abs().max().item() for a, e in zip(values, exact, strict=True)) for values in (got, theirs)
    )


def right(f, plan, module, x, w) -> tuple[bool, float, float]:
    """Whether values and the places of NaN are eager's; our error and eager's."""
    got = launch.run(plan, module, [x, w][: len(plan.loops.inputs)])
    error, eager = errors(f, got, x, w)
    fits = error <= 4 * eager + 1e-6 * (1 + max(a.double().abs().max().item() for a in got))
    x = x.clone()
    x[0, 3] = float("nan")
    bad, want = launch.run(plan, module, [x, w][: len(plan.loops.inputs)]), leaves(f(x, w))
    return fits and all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(bad, want, strict=True)), error, eager


def compare(name, f, size, dtype, copy):
    """One function at one size: prints a row, returns whether the result is right."""
    x, w = (torch.randn(*size, device="cuda").to(dtype) for _ in range(2))
    try:
        plan, _, module = build(f, x, w)
        inputs = [x, w][: len(plan.loops.inputs)]
        good, error, eager = right(f, plan, module, x, w)
    except Exception as problem:  # one case must not hide the others
        print(f"| {name} | {size[0]} x {size[1]} | {str(dtype)[6:]} | FAILED: {type(problem).__name__}: {str(problem)[:200]} |", flush=True)
        return False
    ours, theirs = milliseconds(lambda: launch.run(plan, module, inputs)), milliseconds(lambda: f(x, w))
    rate = sum(k.model_bytes for k in plan.kernels) / ours / 1e6
    print(
        f"| {name} | {size[0]} x {size[1]} | {str(dtype)[6:]} | {len(plan.kernels)} | {error:.1e} ({eager:.1e}) | {ours:.4f} | "
        f"{theirs:.4f} | {rate:.0f} | {rate / copy:.2f} | {'ok' if good else 'WRONG'} |", flush=True,
    )  # fmt: skip
    return good


def sweep(copy):
    """The same kernels under other limits."""
    print("\n| kernel | size | dtype | limits | ms | share of copy |\n|" + "---|" * 6)
    rows = itertools.product(("softmax(x)", "layer_norm(x, w, w)"), (SQUARE, WIDE), LIMITS)
    for name, size, limits in [*rows, *itertools.product(("cumsum(x, 0)",), (SQUARE,), SCANS)]:
        if limits in SCANS:
            kernel.SCAN = limits
        else:
            kernel.AGAIN, kernel.REWALK, kernel.HELD, kernel.PASSED = limits
        for dtype in (torch.float32, torch.bfloat16):
            x, w = (torch.randn(*size, device="cuda").to(dtype) for _ in range(2))
            try:
                plan, _, module = build(CASES[name][0], x, w)
                time = milliseconds(functools.partial(launch.run, plan, module, [x, w][: len(plan.loops.inputs)]))
                share = sum(k.model_bytes for k in plan.kernels) / time / 1e6 / copy
                cells = f"{time:.4f} | {share:.2f}"
            except Exception as problem:
                cells = f"{type(problem).__name__} | "
            print(f"| {name} | {size[0]} x {size[1]} | {str(dtype)[6:]} | {limits} | {cells} |", flush=True)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", default=list(CASES))
    options.add_argument("--sweep", action="store_true")
    chosen = options.parse_args()
    memory = torch.empty(2, 1 << 28, device="cuda")
    copy = memory.nbytes / milliseconds(lambda: memory[0].copy_(memory[1])) / 1e6
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, copy {copy:.0f} GB/s\n")
    print("| kernel | size | dtype | kernels | max error (eager's) | ours ms | eager ms | GB/s | share of copy | |")
    print("|" + "---|" * 10)
    good = True
    for name in chosen.names:
        f, sizes = CASES[name]
        for size, dtype in itertools.product(sizes, (torch.float32, torch.bfloat16)):
            good &= compare(name, f, size, dtype, copy)
    if chosen.sweep:
        sweep(copy)
    sys.exit(not good)


if __name__ == "__main__":
    main()
