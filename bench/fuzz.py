"""Random programs against eager: how many differ, and the first few that do.

    python -m bench.fuzz [--programs 1000] [--first 0] [--level graph|loops|kernels]
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch

import tensorplay as tp
from tests.fuzz.programs import check

from .levels import BACKENDS


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--programs", type=int, default=1000)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--level", choices=list(BACKENDS), default="loops")
    options.add_argument("--show", type=int, default=3)
    chosen = options.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    start, bad = time.perf_counter(), []
    for seed in range(chosen.first, chosen.first + chosen.programs):
        found = check(seed, lambda f: tp.compile(f, backend=BACKENDS[chosen.level], recompile_limit=64))
        if found:
            bad.append(seed)
            if len(bad) <= chosen.show:
                print(found, "\n", flush=True)
    print(f"{chosen.programs} programs at level {chosen.level}: {len(bad)} differ {bad[:20]}, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
