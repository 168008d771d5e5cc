"""How the scripts measure: peers alternately in one process, medians, spread (section 13)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of one peer over the rounds."""

    best: float
    median: float
    quartiles: tuple[float, float]


def alternate(
    peers: dict[str, Callable[[], object]], rounds: int = 11, least: float = 2e-3, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Timing]:
    """Runs the peers in turn, `rounds` times each, in reversed order every other round.

    A sample repeats its peer until it lasts `least` seconds, so that a call of microseconds is measured too.
    clock: `time.process_time` for work of one thread on a machine that has other work.
    """
    repeats = {}
    for name, run in peers.items():
        run()
        start = clock()
        run()
        repeats[name] = max(1, int(least / max(clock() - start, 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in peers}
    for k in range(rounds):
        for name in list(peers) if k % 2 == 0 else reversed(list(peers)):
            run, n = peers[name], repeats[name]
            start = clock()
            for _ in range(n):
                run()
            samples[name].append((clock() - start) / n)
    out = {}
    for name, values in samples.items():
        q = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
        out[name] = Timing(min(values), statistics.median(values), (q[0], q[2]))
    return out


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def machine() -> str:
    """One line that says what the figures were measured on."""
    import platform

    import torch

    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as f:
            name = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), name)
    except OSError:
        pass
    return (
        f"{name}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, torch {torch.__version__},"
        f" Python {platform.python_version()}"
    )
