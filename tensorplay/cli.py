"""The command line: `python -m tensorplay doctor | demo | cache`.

In: arguments.  Out: text on standard output and an exit status, 0 where everything works.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import nn

import tensorplay as tp

from .errors import CompilerError
from .stax.artifacts import store, toolchain
from .stax.codegen.detect import detect
from .version import VERSION

ROUNDS = 7


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command."""
    parser = argparse.ArgumentParser(prog="python -m tensorplay", description="Stax, a compiler for PyTorch programs")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="say what the compiler finds on this machine, and try one kernel")
    commands.add_parser("demo", help="compile a real model and measure it against eager")
    cache = commands.add_parser("cache", help="the folder of compiled artifacts")
    cache.add_argument("action", nargs="?", choices=("size", "clear"), default="size")
    chosen = parser.parse_args(arguments)
    match chosen.command:
        case "doctor":
            return doctor()
        case "demo":
            return demo()
    return show_cache(chosen.action)


def say(label: str, value: object) -> None:
    print(f"{label:<14}{value}")


# ---- doctor ----------------------------------------------------------------------------------------------------------


def doctor() -> int:
    """Everything that decides how programs are compiled here, and whether one kernel comes out right."""
    target = detect(None)
    say("tensorplay", f"{VERSION}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    say("torch", torch.__version__)
    try:
        say("compiler", toolchain.find())
    except CompilerError as error:
        say("compiler", f"MISSING: {error}")
    say("vectors", f"{target.isa}, {target.vector_bytes} bytes")
    say("threads", torch.get_num_threads())
    say("calls", extension())
    say("Triton", package("triton"))
    say("GPU", torch.cuda.get_device_name() if torch.cuda.is_available() else "none")
    say("cache", f"{store.folder()}, {megabytes(store.size())}")
    return kernel()


def extension() -> str:
    """Whether calls go through the C extension; builds it for later processes where it is missing."""
    from . import native

    if native.native is not None:
        return "through the C extension"
    try:
        native.build()
        return "through Python in this process; the C extension is built for the next"
    except (OSError, subprocess.SubprocessError) as error:
        return f"through Python, some microseconds slower: the C extension cannot be built ({error})"


def package(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def kernel() -> int:
    """Compiles and runs example 1.1."""

    def example(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x + w) * 2).sum(-1)

    x, w = torch.randn(64, 128), torch.randn(64, 128)
    before, start = toolchain.RUNS, time.perf_counter()
    try:
        compiled = tp.compile(example, strict_native=True)
        result = compiled(x, w)
    except Exception as error:
        say("kernel", f"FAILED: {type(error).__name__}: {error}")
        return 1
    seconds = time.perf_counter() - start
    right = torch.allclose(result, example(x, w))
    how = f"compiled by {toolchain.RUNS - before} compiler run" if toolchain.RUNS > before else "found in the cache"
    call = 1e6 * seconds_of(lambda: compiled(x, w), 1000)
    say("kernel", f"{'right' if right else 'WRONG'}; {how}, {seconds:.2f} s to the first result, {call:.1f} us a call")
    return 0 if right else 1


# ---- demo ------------------------------------------------------------------------------------------------------------


def demo() -> int:
    """Compiles a model and prints eager against compiled, measured alternately."""
    torch.manual_seed(0)
    name, model, call = gpt2() if importlib.util.find_spec("transformers") else perceptron()
    model.eval()
    say("model", name)
    say("machine", f"{detect(None).isa}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    with torch.no_grad():
        expected = call(model)
        start = time.perf_counter()
        compiled = tp.compile(model)
        result = call(compiled)
        say("first call", f"{time.perf_counter() - start:.2f} s, compilation included")
        eager, ours = [], []
        for _ in range(ROUNDS):
            eager.append(seconds_of(lambda: call(model), 1))
            ours.append(seconds_of(lambda: call(compiled), 1))
    explained = tp.explain(compiled)
    stages = sorted(explained.seconds.items(), key=lambda item: -item[1])
    say("of which", ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in stages if seconds >= 0.01))
    reference, mine = statistics.median(eager), statistics.median(ours)
    say("eager", f"{1e3 * reference:.1f} ms")
    say("compiled", f"{1e3 * mine:.1f} ms, {reference / mine:.2f}x eager's speed (medians of {ROUNDS}, alternately)")
    say("generated", f"{len(explained.kernels)} kernels, {len(explained.library_calls)} calls of library operators")
    say("fallbacks", len(explained.fallbacks))
    error = (result - expected).abs().max().item()
    scale = expected.abs().max().item()
    say("difference", f"{error:.2e} at most, where eager's largest value is {scale:.2f}")
    return 0 if error <= 1e-4 * max(scale, 1.0) else 1


def gpt2() -> tuple[str, nn.Module, Callable[[Any], torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=384, n_head=6, vocab_size=8192, bos_token_id=0, eos_token_id=0))
    tokens = torch.randint(0, 8192, (2, 128))
    name = "GPT-2 of transformers, 6 layers, 384 wide, random weights, 2 x 128 tokens, float32"
    return name, model, lambda m: m(tokens).logits


def perceptron() -> tuple[str, nn.Module, Callable[[Any], torch.Tensor]]:
    width = 512
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(6)]
    x = torch.randn(256, width)
    name = f"perceptron, 6 layers of {width} with GELU and LayerNorm, random weights (transformers is not installed)"
    return name, nn.Sequential(*layers), lambda m: m(x)


def seconds_of(run: Callable[[], object], repeats: int) -> float:
    """Seconds of one run, the mean over `repeats`."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


# ---- cache -----------------------------------------------------------------------------------------------------------


def show_cache(action: str) -> int:
    """Shows or empties the store."""
    if action == "clear":
        freed = store.size()
        say("removed", f"{store.clear()} files, {megabytes(freed)}")
    say("folder", store.folder())
    say("artifacts", sum(file.suffix == ".so" for file in store.entries()))
    say("size", megabytes(store.size()))
    return 0
