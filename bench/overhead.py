"""What a call costs around its kernel: example 1.1 at (64, 128), in microseconds (row 8.09).

    python -m bench.overhead [--inductor] [--rounds 11]

`program` is the back end's callable, `entry` the native code alone on a filled pointer table; the wrapper's cost is
the difference between `compiled` and `entry`. Peers run alternately in one process.
"""

from __future__ import annotations

import argparse

import torch

from .clock import alternate, machine, table


def example(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (torch.relu(x + w) * 2).sum(-1)


def peers(inductor: bool, held: list) -> dict[str, object]:
    """The functions to time; `held` keeps what they point to."""
    import tensorplay as tp
    from tensorplay.stax.runtime import launch

    x, w, out = torch.randn(64, 128), torch.randn(64, 128), torch.empty(64)
    compiled = tp.compile(example, strict_native=True)
    assert torch.allclose(compiled(x, w), example(x, w), atol=1e-4)
    program = tp.explain(compiled).versions[-1].program
    name = program.source.entries[0]
    tensors = [{"primals_1": x, "primals_2": w}.get(slot, out) for slot in program.plan.slots]
    lease = program.arena.take()  # keeps the table alive, as `tensors` keeps what it points to
    entry = launch.entry_of(program.artifact, name)
    launch.launch(entry, lease.table, 1, tuple(range(len(tensors))), *tensors)
    found = {
        "eager": lambda: example(x, w),
        "compiled": lambda: compiled(x, w),
        "program": lambda: program(x, w),
        "entry": lambda: launch.launch(entry, lease.table, 1, ()),
    }
    held.append((lease, tensors))
    if inductor:
        theirs = torch.compile(example)
        theirs(x, w)
        found["torch.compile"] = lambda: theirs(x, w)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--inductor", action="store_true", help="measure torch.compile too")
    options.add_argument("--rounds", type=int, default=11)
    chosen = options.parse_args()
    with torch.no_grad():
        held: list = []
        times = alternate(peers(chosen.inductor, held), chosen.rounds, least=5e-3)
    base = times["entry"].median
    rows = [
        [name, f"{t.best * 1e6:.2f}", f"{t.median * 1e6:.2f}", f"{(t.median - base) * 1e6:.2f}"]
        for name, t in times.items()
    ]
    print(machine())
    print(table(["peer", "best us", "median us", "over the kernel us"], rows))


if __name__ == "__main__":
    main()
