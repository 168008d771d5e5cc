"""Training steps of real models: compiled, eager and through Inductor.

    python -m bench.training [names ...] [--small] [--dtype float32 bfloat16] [--systems eager ours inductor] [--parts losses saved peak time cold]

losses: the largest relative difference of the losses of ten AdamW steps to eager's (dropout on, same seed); nudged:
eager against itself where each weight starts one rounding away. saved: bytes of distinct memory that the nodes of the
autograd graph hold between forward and backward, parameters and inputs apart. peak: growth of the resident memory of a
process of its own over steps, after a collection and a trim, and what our programs keep between calls. time:
milliseconds of CPU time of forward and backward, the median of alternated rounds; outside: the same where matrix
products, convolutions and attention compute nothing, of five times as many rounds. cold: seconds of the first step of
a fresh process on empty caches, one compilation at a time in either system.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import tensorplay as tp
from tensorplay.capture.history import nodes_of
from tensorplay.compiled import compiled_of
from tensorplay.native import built

from .clock import machine, table
from .zoo import make, tensors

MODELS = ("gpt2", "bert", "llama", "t5", "vit", "resnet")
LABELLED = ("gpt2", "llama", "t5")


def model_of(name: str, dtype: torch.dtype, small: bool, seed: int = 0) -> tuple[torch.nn.Module, dict]:
    model, inputs = make(name, dtype, small, seed)
    if name in LABELLED:
        inputs["labels"] = inputs.get("decoder_input_ids", inputs["input_ids"])
    return model.train(), inputs


def loss_of(result: Any) -> torch.Tensor:
    loss = getattr(result, "loss", None)
    if loss is not None:
        return loss
    parts = [t.float().pow(2).mean() for t in tensors(result)[:2] if t.is_floating_point()]
    return torch.stack(parts).sum()


def system(which: str, model: torch.nn.Module) -> Any:
    """The model as a system runs it."""
    if which == "ours":
        return tp.compile(model, strict_native=True)
    return torch.compile(model) if which == "inductor" else model


def step(call: Any, inputs: dict) -> float:
    loss = loss_of(call(**inputs))
    loss.backward()
    return loss.item()


def losses(name: str, which: str, steps: int = 10, seed: int = 0) -> list[float]:
    """Losses of AdamW steps of a small configuration, from the same seed each time.

    'nudged': eager, where each weight moves to one of its two neighbours first; how far any other rounding may lead.
    """
    model, inputs = model_of(name, torch.float32, True, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if which == "nudged":
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.nextafter(p, torch.where(torch.rand_like(p) < 0.5, torch.inf, -torch.inf)))
    call = system(which, model)
    torch.manual_seed(7)
    found = []
    for _ in range(steps):
        found.append(step(call, inputs))
        optimizer.step()
        optimizer.zero_grad()
    return found


def saved(name: str, which: str, dtype: torch.dtype, small: bool) -> int:
    """Bytes of distinct memory that the autograd graph of a step holds."""
    model, inputs = model_of(name, dtype, small)
    call = system(which, model)
    step(call, inputs)
    loss = loss_of(call(**inputs))
    held: dict[int, int] = {}
    for t in saved_tensors(loss):
        held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    for t in (*model.parameters(), *model.buffers(), *tensors(inputs)):
        held.pop(t.untyped_storage().data_ptr(), None)
    return sum(held.values())


def saved_tensors(loss: torch.Tensor) -> list[torch.Tensor]:
    """What the nodes of an autograd graph have saved."""
    found: list[torch.Tensor] = []
    for node in nodes_of(loss):
        names = [name for name in dir(node) if name.startswith("_saved_")] or ["saved_tensors"]
        found += tensors([getattr(node, name, None) for name in names])
    return found


def peak(name: str, which: str, dtype: torch.dtype, small: bool) -> int:
    """Bytes by which steps raise the resident memory over what the model takes."""
    model, inputs = model_of(name, dtype, small)
    call = system(which, model)

    def steps() -> None:
        for _ in range(3):
            step(call, inputs)
            model.zero_grad()

    steps()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM starts anew
    steps()
    return resident("VmHWM") - before + idle(call)


def idle(call: Any) -> int:
    """Bytes of the arenas that our programs keep between calls."""
    if not hasattr(call, "_tp_compiled"):
        return 0
    program = compiled_of(call).versions[-1].program
    arenas = [p.arena for p in (program.program, *(run for run, _, _ in program.backwards.values()))]
    blocks = [lease.block for arena in arenas for lease in arena.idle if lease.block is not None]
    return sum(block.untyped_storage().nbytes() for block in blocks)


def resident(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def first(name: str, which: str, dtype: torch.dtype, small: bool) -> float:
    model, inputs = model_of(name, dtype, small)
    start = time.perf_counter()
    step(system(which, model), inputs)
    return time.perf_counter() - start


def times(name: str, systems: list[str], dtype: torch.dtype, small: bool, rounds: int) -> dict[str, tuple[float, float]]:
    """For each system the milliseconds of a step, and of what is no library call in it."""
    model, inputs = model_of(name, dtype, small)
    peers: dict[str, Callable[[], None]] = {}
    for which in systems:
        peers[which] = run = stepper(copy.deepcopy(model), which, inputs)
        run()
        run()
    whole = medians(peers, rounds)
    with stubs():
        outside = medians(peers, 5 * rounds)
    return {which: (whole[which], outside[which]) for which in systems}


def medians(peers: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Milliseconds of CPU time of each in the median of alternated rounds."""
    found: dict[str, list[float]] = {which: [] for which in peers}
    for k in range(rounds):
        for which in peers if k % 2 else reversed(peers):
            start = time.process_time()
            peers[which]()
            found[which].append(1e3 * (time.process_time() - start))
    return {which: statistics.median(times) for which, times in found.items()}


def stepper(model: torch.nn.Module, which: str, inputs: dict) -> Callable[[], None]:
    call = system(which, model)

    def run() -> None:
        step(call, inputs)
        model.zero_grad()

    return run


@contextmanager
def stubs() -> Iterator[None]:
    """Matrix products, convolutions and attention give memory of the right shape, and compute nothing (stubs.cpp).

    What lies in that memory may be denormal, which some processors compute with a hundred times as slowly: they count as 0.
    """
    library = ctypes.CDLL(str(stub_library()))
    library.install()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        library.uninstall()


def stub_library() -> Path:
    """The stubs, compiled against this torch into the cache folder."""
    source, root = Path(__file__).with_name("stubs.cpp"), Path(torch.__file__).parent
    tag = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    target = built().with_name(f"stubs-{tag}.so")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        made = target.with_suffix(f".{os.getpid()}")
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        include = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
        link = [f"-L{root}/lib", "-ltorch_cpu", "-lc10"]
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, "-O1", "-std=c++20", "-shared", "-fPIC", abi, *include, str(source), "-o", str(made), *link], check=True)
        os.replace(made, target)
    return target


CHILD = """
import json, sys, warnings
import torch
warnings.simplefilter("ignore")
from bench import training
part, name, which, dtype, small = sys.argv[1:]
found = getattr(training, part)(name, which, getattr(torch, dtype), small == "small")
print(json.dumps(found))
"""


def child(part: str, name: str, which: str, dtype: str, small: bool, **environ: str) -> Any:
    """A measurement in a process of its own."""
    command = [sys.executable, "-c", CHILD, part, name, which, dtype, "small" if small else "full"]
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{which}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def cold(name: str, which: str, dtype: str, small: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        places = {"TP_CACHE_DIR": f"{folder}/tp", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        return child("first", name, which, dtype, small, TORCHINDUCTOR_COMPILE_THREADS="1", **places)


def row(part: str, name: str, dtype: str, options: argparse.Namespace) -> list[str]:
    systems, small = options.systems, options.small
    if part == "losses":
        eager = losses(name, "eager")
        others = [losses(name, s) for s in (*systems, "nudged")]
        return [f"{max(abs(a - b) / abs(b) for a, b in zip(other, eager, strict=True)):.1e}" for other in others]
    if part == "time":
        found = times(name, systems, getattr(torch, dtype), small, options.rounds)
        return [f"{found[s][0]:.1f}" for s in systems] + [f"{found[s][1]:.1f}" for s in systems]
    if part == "cold":
        return [f"{cold(name, s, dtype, small):.1f}" for s in systems]
    fixed = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)} if part == "peak" else {}
    return [f"{child(part, name, s, dtype, small, **fixed) / 1e6:.2f}" for s in systems]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", default=list(MODELS))
    options.add_argument("--small", action="store_true", help="two narrow layers; else 6 layers, 384 wide")
    options.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    options.add_argument("--systems", nargs="*", default=["eager", "ours", "inductor"])
    options.add_argument("--parts", nargs="*", default=["losses", "saved", "peak", "time", "cold"])
    options.add_argument("--rounds", type=int, default=20)
    chosen = options.parse_args()
    warnings.simplefilter("ignore")
    print(machine())
    units = {"losses": "", "saved": " MB", "peak": " MB", "time": " ms", "cold": " s"}
    for part in chosen.parts:
        head = ["model", "dtype", *(f"{s}{units[part]}" for s in chosen.systems)]
        head += {"time": [f"{s} outside ms" for s in chosen.systems], "losses": ["eager nudged"]}.get(part, [])
        rows = []
        for name in chosen.names:
            for dtype in chosen.dtype if part != "losses" else ("float32",):
                try:
                    rows.append([name, dtype, *row(part, name, dtype, chosen)])
                except Exception as failure:  # a model that fails is a row of the table, not the end of it
                    rows.append([name, dtype, f"{type(failure).__name__}: {failure}"[:120], *[""] * (len(head) - 3)])
                print(f"{part}: {' '.join(rows[-1])}", file=sys.stderr, flush=True)
        print(f"\n## {part}\n\n{table(head, rows)}", flush=True)


if __name__ == "__main__":
    main()
