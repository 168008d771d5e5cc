"""Example 1.1 through every level to Triton, run on the GPU against eager: error, time, bandwidth.

    python bench/gpu_example.py [rows columns]
"""

from __future__ import annotations

import sys

import torch

from tensorplay.capture.tracer import capture
from tensorplay.stax.codegen.target import Target
from tensorplay.stax.codegen.triton import launch
from tensorplay.stax.codegen.triton.emit import emit
from tensorplay.stax.joint.retrace import retrace
from tensorplay.stax.loops.lower import lower
from tensorplay.stax.loops.verify import verify
from tensorplay.stax.schedule.schedule import schedule
from tensorplay.stax.schedule.verify import verify_plan


def example(x, w):
    return ((x + w).relu() * 2.0).sum(dim=1)


def softmax(x, w):
    return torch.softmax(x + w, -1)


def layer_norm(x, w):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], w[0], w[0])


def gelu(x, w):
    return torch.nn.functional.gelu(x * 2.0 + w, approximate="tanh")


def columns(x, w):
    return (x * w).sum(dim=0)


def build(f, *args):
    """The plan, its Triton source and its module for one function and its arguments."""
    captured = capture(f, args, {})
    plan = verify_plan(schedule(verify(lower(retrace(captured.graph, captured.samples))), Target(device="cuda")))
    source = emit(plan, Target(device="cuda"))
    return plan, source, launch.load(source)


def milliseconds(f, repeat=20):
    for _ in range(5):
        f()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeat):
        f()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeat


def compare(f, size, shown):
    """One function at one size: prints a row, returns whether the result is right."""
    x, w = (torch.randn(*size, device="cuda") for _ in range(2))
    plan, source, module = build(f, x, w)
    if shown:
        print(source.text)
    (got,) = launch.run(plan, module, [x, w])
    exact = f(x.double(), w.double())
    error, eager = ((a.double() - exact).abs().max().item() for a in (got, f(x, w)))
    ours, theirs = milliseconds(lambda: launch.run(plan, module, [x, w])), milliseconds(lambda: f(x, w))
    x[1, 3] = float("nan")
    (bad,) = launch.run(plan, module, [x, w])
    right = error <= 4 * eager + 1e-6 and torch.equal(bad.isnan(), f(x, w).isnan())
    rate = sum(k.model_bytes for k in plan.kernels) / ours / 1e6
    print(
        f"{f.__name__:12} {size[0]:6} x {size[1]:<6} kernels {len(plan.kernels)}  max error {error:.2e} "
        f"(eager {eager:.2e})  {ours:8.4f} ms (eager {theirs:8.4f})  {rate:7.1f} GB/s  {'ok' if right else 'WRONG'}"
    )
    return right


def main():
    sizes = [(64, 128), (4096, 4096), (512, 50304)]
    if len(sys.argv) == 3:
        sizes = [(int(sys.argv[1]), int(sys.argv[2]))]
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    rows = [
        compare(f, size, f is example and size == sizes[0])
        for f in (example, softmax, layer_norm, gelu, columns)
        for size in sizes
    ]
    sys.exit(not all(rows))


if __name__ == "__main__":
    main()
