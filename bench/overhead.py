"""What a call costs around its kernel, in microseconds (row 8.09).

    python -m bench.overhead [--inductor] [--rounds 11]

Kinds of calls: example 1.1 at (64, 128) with the same tensors, with other tensor objects at every call, by keyword and
in a dictionary; a module with 150 parameters, whose call checks every parameter, flag and hook; the
forward call of a module that trains. `kernel` is the native code alone on a filled pointer table (for the modules: the
program without its key, with its autograd node), and the overhead of a peer is what its call takes longer. Times are
CPU times of the calling thread. Peers run alternately in one process; --inductor measures torch.compile too.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import torch
from torch import nn

from .clock import alternate, machine, table

LAYERS = 75
TRAINING = "training, 2 parameters"


def example(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (torch.relu(x + w) * 2).sum(-1)


class Scales(nn.Module):
    """A chain of 75 scales and shifts: 150 parameters, little arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.bias


def named(values: dict[str, torch.Tensor]) -> torch.Tensor:
    return example(values["x"], values["w"])


def over_pairs(f: Callable) -> Callable[[], object]:
    """Calls with another pair of tensor objects every time."""
    pairs = itertools.cycle([(torch.randn(64, 128), torch.randn(64, 128)) for _ in range(4)])  # few, so that they stay in the cache as the kernel's do
    return lambda: f(*next(pairs))


def kernel(compiled: object, held: list, *inputs: torch.Tensor) -> Callable[[], object]:
    """The native code alone; `held` keeps what its table points to."""
    import tensorplay as tp
    from tensorplay.stax.runtime import launch

    program = tp.explain(compiled).versions[-1].program
    entry = launch.entry_of(program.artifact, program.source.entries[0])
    names = [b.name for b in program.plan.loops.inputs]
    tensors = [dict(zip(names, inputs)).get(slot, torch.empty(64)) for slot in program.plan.slots]
    lease = program.arena.take()
    launch.launch(entry, lease.table, 1, tuple(range(len(tensors))), *tensors)
    held.append((lease, tensors))
    return lambda: launch.launch(entry, lease.table, 1, ())


def calls(inductor: bool, held: list) -> dict[str, dict[str, Callable[[], object]]]:
    """The functions to time, by kind of call."""
    import tensorplay as tp

    x, w, y = torch.randn(64, 128), torch.randn(64, 128), torch.randn(16)
    ours, module = tp.compile(example, strict_native=True), Scales().eval()
    ours_module = tp.compile(module, strict_native=True)
    assert torch.allclose(ours(x, w), example(x, w), atol=1e-4) and torch.allclose(ours_module(y), module(y))
    native = kernel(ours, held, x, w)
    version = tp.explain(ours_module).versions[-1]
    inputs = version.read((y,), {})
    pair = {"x": x, "w": w}
    ours_named, training = tp.compile(named, strict_native=True), Scale()
    ours_training = tp.compile(training, strict_native=True)
    with torch.enable_grad():
        assert torch.allclose(ours_named(pair), example(x, w), atol=1e-4) and torch.allclose(ours_training(y), training(y))
    step = tp.explain(ours_training).versions[-1]
    given = step.read((y,), {})
    found: dict[str, dict[str, Callable[[], object]]] = {
        "same tensors": {"kernel": native, "eager": lambda: example(x, w), "TensorPlay": lambda: ours(x, w)},
        "new tensors": {"kernel": native, "eager": over_pairs(example), "TensorPlay": over_pairs(ours)},
        "by keyword": {"kernel": native, "eager": lambda: example(x=x, w=w), "TensorPlay": lambda: ours(x=x, w=w)},
        "in a dictionary": {"kernel": native, "eager": lambda: named(pair), "TensorPlay": lambda: ours_named(pair)},
        "150 parameters": {
            "kernel": lambda: version.program.trusted(*inputs), "eager": lambda: module(y), "TensorPlay": lambda: ours_module(y),
        },
        TRAINING: {"kernel": lambda: step.program.trusted(*given), "eager": lambda: training(y), "TensorPlay": lambda: ours_training(y)},
    }  # fmt: skip
    if inductor:
        theirs, theirs_named = torch.compile(example), torch.compile(named)
        theirs_module, theirs_training = torch.compile(module), torch.compile(training)
        found["same tensors"]["torch.compile"] = lambda: theirs(x, w)
        found["new tensors"]["torch.compile"] = over_pairs(theirs)
        found["by keyword"]["torch.compile"] = lambda: theirs(x=x, w=w)
        found["in a dictionary"]["torch.compile"] = lambda: theirs_named(pair)
        found["150 parameters"]["torch.compile"] = lambda: theirs_module(y)
        found[TRAINING]["torch.compile"] = lambda: theirs_training(y)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--inductor", action="store_true", help="measure torch.compile too")
    options.add_argument("--rounds", type=int, default=11)
    chosen = options.parse_args()
    rows, held = [], []
    with torch.no_grad():
        kinds = calls(chosen.inductor, held)
    for kind, peers in kinds.items():
        with torch.set_grad_enabled(kind == TRAINING):
            times = alternate(peers, chosen.rounds, 5e-3, time.thread_time)
        base = times["kernel"]
        rows += [
            [kind, name, f"{t.best * 1e6:.2f}", f"{t.median * 1e6:.2f}", f"{(t.best - base.best) * 1e6:.2f}", f"{(t.median - base.median) * 1e6:.2f}"]
            for name, t in times.items()
        ]
    print(machine())
    print(table(["call", "peer", "best us", "median us", "over the kernel, best", "median"], rows))


if __name__ == "__main__":
    main()
