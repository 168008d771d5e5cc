"""Random programs against eager: how many differ, and the first few that do.

    python -m bench.fuzz [--programs 1000] [--first 0] [--level graph|loops|kernels] [--workers N] [--resume FILE]

Programs are the numbers from `first` on, dealt out to the workers in blocks. With `--resume` each finished block is
written to FILE, and a second run with the same FILE goes on behind it. The last line is the summary; the exit code is
1 where a program differs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

BLOCK = 25


def block(work: tuple[int, int, str]) -> tuple[int, int, list[tuple[int, str]]]:
    """Runs the programs of one block: its first number, how many, those that differ with what differs."""
    import torch

    import tensorplay as tp
    from tests.fuzz.programs import check

    from .levels import BACKENDS

    first, count, level = work
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    bad = []
    for seed in range(first, first + count):
        try:
            found = check(seed, lambda f, **options: tp.compile(f, backend=BACKENDS[level], recompile_limit=64, **options))
        except Exception as error:  # a program of ours that raises is a finding, not the end of the run
            found = f"seed {seed}: {type(error).__name__}: {error}"
        if found:
            bad.append((seed, found))
    return first, count, bad


def results(todo: list[tuple[int, int, str]], workers: int) -> Iterator[tuple[int, int, list[tuple[int, str]]]]:
    # fresh processes, now and then anew: what hundreds of compiled programs leave behind goes with them
    fresh = {"mp_context": multiprocessing.get_context("spawn"), "max_tasks_per_child": 20}
    with ProcessPoolExecutor(workers, **fresh) as pool:
        for done in as_completed([pool.submit(block, work) for work in todo]):
            yield done.result()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--programs", type=int, default=1000)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--level", choices=["graph", "loops", "kernels"], default="loops")
    options.add_argument("--show", type=int, default=3)
    options.add_argument("--workers", type=int, default=1)
    options.add_argument("--resume", type=Path)
    chosen = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start, last = time.perf_counter(), chosen.first + chosen.programs
    todo = [(first, min(BLOCK, last - first), chosen.level) for first in range(chosen.first, last, BLOCK)]
    ran, bad = 0, []
    if chosen.resume and chosen.resume.exists():
        for line in chosen.resume.read_text().splitlines():
            *work, seeds = json.loads(line)
            if tuple(work) in todo:
                todo.remove(tuple(work))
                ran += work[1]
                bad += seeds
    try:
        for first, count, found in results(todo, chosen.workers):
            ran += count
            for seed, text in found:
                bad.append(seed)
                if len(bad) <= chosen.show:
                    print(text, "\n", flush=True)
            if chosen.resume:
                with chosen.resume.open("a") as file:
                    file.write(json.dumps([first, count, chosen.level, [seed for seed, _ in found]]) + "\n")
    except BrokenProcessPool:
        print("a worker died: with --workers 1 and the same --resume, the first block that is missing there names the program")
        bad.append(-1)
    seconds = time.perf_counter() - start
    print(f"{ran} programs at level {chosen.level}: {len(bad)} differ {sorted(bad)[:20]}, {seconds:.0f} s workers: {chosen.workers}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
