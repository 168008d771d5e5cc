"""Random programs against eager: how many differ, and the first few that do.

    python -m bench.fuzz [--programs 1000] [--first 0] [--level graph|loops|kernels]
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import fx

import tensorplay as tp
from tests.fuzz.programs import check


def loops_backend(graph: fx.GraphModule, samples: Sequence[torch.Tensor], **options: object) -> Callable:
    """A back end that stops at the loop level and interprets it: no compiler runs."""
    from tensorplay.stax.codegen.detect import detect
    from tensorplay.stax.joint.retrace import retrace
    from tensorplay.stax.loops.interpret import interpret_plan
    from tensorplay.stax.loops.lower import lower
    from tensorplay.stax.loops.verify import verify
    from tensorplay.stax.schedule.schedule import schedule

    plan = schedule(verify(lower(retrace(graph, samples))), detect())
    return lambda *inputs: tuple(interpret_plan(plan, inputs))


BACKENDS = {"graph": "eager", "loops": loops_backend, "kernels": "stax"}


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
