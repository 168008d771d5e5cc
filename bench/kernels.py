"""Forward kernels against eager and torch.compile: ratios and the fraction of the copy bandwidth.

    python -m bench.kernels [--dtype float32 bfloat16] [--no-inductor] [--threads 1] [names ...]

Model bytes are those of the plan (section 1.1); the ceiling is what `torch.Tensor.copy_` reaches in the same run.
Outputs come fresh from torch's allocator for every peer; "kept" calls our kernels on memory that stays, so that no
page is touched for the first time, and is what the share of the bandwidth counts. One thread: milliseconds of CPU
time; more: of the clock. Figures are the best of the rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import tensorplay as tp
from tensorplay.stax.runtime.launch import array, entry_of, launch, table_of
from tensorplay.testing import K

from .clock import alternate, machine, table


def chain(x):
    t = torch.relu((x + 1) * 0.5) - 0.25
    t = torch.abs(t * t + x)
    return torch.clamp_max(torch.sqrt(t) * 3, 6)


def adamw(p, g, m, v):
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.mul_(1 - 1e-5)
    p.addcdiv_(m, v.sqrt() + 1e-8, value=-1e-3)
    return p


KERNELS: dict[str, tuple[Callable, Callable]] = {
    "relu row sum 4096x4096": (lambda x, w: (torch.relu(x + w) * 2).sum(-1), lambda r: (r(4096, 4096), r(4096, 4096))),
    "relu row sum 64x128": (lambda x, w: (torch.relu(x + w) * 2).sum(-1), lambda r: (r(64, 128), r(64, 128))),
    "gelu(x*a+b) 16M": (lambda x: F.gelu(x * 1.5 + 0.5), lambda r: (r(16 << 20),)),
    "chain of 10, 16M": (chain, lambda r: (r(16 << 20),)),
    "softmax 4096x1024": (lambda x: torch.softmax(x, -1), lambda r: (r(4096, 1024),)),
    "softmax 64x32000": (lambda x: torch.softmax(x, -1), lambda r: (r(64, 32000),)),
    "layer_norm 4096x1024": (lambda x, g, b: F.layer_norm(x, (1024,), g, b), lambda r: (r(4096, 1024), r(1024), r(1024))),
    "sum dim 0, 4096x4096": (lambda x: x.sum(0), lambda r: (r(4096, 4096),)),
    "x + y.t(), 4096": (lambda x, y: x + y.t(), lambda r: (r(4096, 4096), r(4096, 4096))),
    "cross entropy 512x32000": (lambda x, t: F.cross_entropy(x, t), lambda r: (r(512, 32000), torch.randint(0, 32000, (512,)))),
    "AdamW 10M, in place": (adamw, lambda r: (r(10 << 20), r(10 << 20), r(10 << 20), r(10 << 20).abs())),
}


def kept(program, args) -> Callable[[], None]:
    """The kernels of a program alone, on memory that is allocated once."""
    plan = program.plan
    given = {b.name: t for b, t in zip(program.loops.inputs, args, strict=True)} | dict(program.loops.constants)
    buffers = program.loops.buffers
    memory = [
        given[slot] if slot in given else torch.empty_strided(buffers[slot].size, buffers[slot].stride, dtype=buffers[slot].dtype)
        for slot in plan.slots
    ]
    pointers = array(len(memory))
    for k, tensor in enumerate(memory):
        pointers[k] = tensor.data_ptr()
    table = table_of(pointers)
    entries = [entry_of(program.artifact, name) for name in program.source.entries]

    def run(held=(memory, pointers)) -> None:
        for entry in entries:
            launch(entry, table, torch.get_num_threads(), ())

    return run


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", default=list(KERNELS))
    options.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    options.add_argument("--no-inductor", action="store_true")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--rounds", type=int, default=7)
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    clock = time.process_time if chosen.threads == 1 else time.perf_counter
    source, target = torch.randn(16 << 20), torch.randn(16 << 20)
    copy = alternate({"copy": lambda: target.copy_(source)}, rounds=7, clock=clock)["copy"].best
    ceiling = 2 * source.nbytes / copy
    head = ["kernel", "dtype", "kernels", "eager ms", "ours ms", "kept ms"]
    if not chosen.no_inductor:
        head += ["Inductor ms", "Inductor/ours"]
    print(machine(), f"copy {ceiling / 1e9:.1f} GB/s\n")
    print(table([*head, "eager/ours", "% of copy bandwidth, kept"], []), flush=True)
    with torch.no_grad():
        for name in chosen.names:
            function, inputs = KERNELS[name]
            for dtype in (getattr(torch, d) for d in chosen.dtype):
                args = inputs(lambda *s, d=dtype: torch.randn(*s).to(d))
                compiled = tp.compile(function, strict_native=True)
                compiled(*args)
                peers = {"eager": lambda f=function, a=args: f(*a), "ours": lambda f=compiled, a=args: f(*a)}
                peers["kept"] = kept(tp.explain(compiled).versions[0].program, args)
                if not chosen.no_inductor:
                    peer = torch.compile(function)
                    peer(*args)
                    peers["inductor"] = lambda f=peer, a=args: f(*a)
                times = {p: t.best for p, t in alternate(peers, rounds=chosen.rounds, clock=clock).items()}
                moved = sum(k.model_bytes for k in K(compiled))
                row = [name, str(dtype).removeprefix("torch."), str(len(K(compiled)))]
                row += [f"{times[p] * 1e3:.3f}" for p in ("eager", "ours", "kept")]
                if not chosen.no_inductor:
                    row += [f"{times['inductor'] * 1e3:.3f}", f"{times['inductor'] / times['ours']:.2f}"]
                row += [f"{times['eager'] / times['ours']:.2f}", f"{100 * moved / times['kept'] / ceiling:.0f}"]
                print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
