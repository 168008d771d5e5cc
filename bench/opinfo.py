"""Every sample of PyTorch's operator database through tp.compile on the CPU: wrong results, crashes, hangs.

    python -m bench.opinfo [--workers 2] [--out FOLDER] [--dtypes float32 ...] [--ops REGEX] [--every K] [--seconds N]
                           [--inputs samples|enlarged|noncontiguous|reference|errors] [--backward]
                           [--backend graph|ops|loops|kernels]

Each worker is a process of its own, which takes a few operators at a time; a crash or a hang is the sample's result, not
the end of the run. All results go to one file of JSON lines in FOLDER, named by what runs, so a run that was stopped, or
that ended after --seconds, resumes where it stopped. At the end (or with --report) it prints how many samples passed, and
which operators are native and which fall back. With --backward outputs and gradients are compared, for float32 and float64.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

DTYPES = ("float32", "int64", "bool", "bfloat16")
SECONDS = 180  # a sample that takes longer is a hang
TOGETHER = 192  # programs in one compilation
SHARE = 12  # operators that a worker takes at a time, fewer towards the end


def units(dtypes: list[str], pattern: str, backward: bool = False) -> list[str]:
    """'index:name:dtype' of every operator and dtype that the database has samples for."""
    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    out = []
    for k, op in enumerate(op_db):
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        if re.search(pattern, name) and (op.supports_autograd or not backward):
            out += [f"{k}:{name}:{d}" for d in dtypes if op.supports_dtype(getattr(torch, d), "cpu")]
    return out


# ---- one worker --------------------------------------------------------------------------------------------------


def worker(chosen: argparse.Namespace, orders: IO[str], put: Callable[..., None]) -> None:
    """Takes lines of {unit: samples that are known} from `orders` until they end; tells each step and each result."""
    import torch

    torch.set_num_threads(1)
    for order in orders:
        batch: list[tuple[str, int, Any, Any]] = []
        for unit, known in json.loads(order).items():
            for found in samples(unit, set(known), chosen, put):
                batch.append(found)
                if len(batch) == TOGETHER:
                    attempt(batch, chosen, put)
                    batch = []
            batch.append((unit, -1, None, None))
        attempt(batch, chosen, put)
        put(outcome="idle")


def samples(unit: str, known: set[int], chosen: argparse.Namespace, put: Callable[..., None]) -> Iterator[tuple[str, int, Any, Any]]:
    """(unit, number, operator, sample) of every sample that is wanted and not known yet."""
    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    from .trial import inputs_of

    index, _, dtype = unit.split(":")
    op = op_db[int(index)]
    put(unit=unit, sample=-2, outcome="started")
    torch.default_generator.manual_seed(0)
    try:
        every = list(enumerate(inputs_of(op, chosen.inputs, getattr(torch, dtype), chosen.backward)))
    except Exception as failure:
        put(unit=unit, sample=-2, outcome="skipped", detail=f"no samples: {type(failure).__name__}: {failure}"[:200])
        every = []
    for k, sample in every:
        if not (k % chosen.every or k in known):
            yield unit, k, op, sample


def attempt(wanted: list[tuple[str, int, Any, Any]], chosen: argparse.Namespace, put: Callable[..., None]) -> None:
    """Runs the samples, their kernels built together. A sample of number -1 says that its unit ends here."""
    from .levels import BACKENDS, Batch
    from .trial import GradientTrial, Trial

    def guarded(unit: str, k: int, step: Callable[[], Any]) -> Any:
        put(unit=unit, sample=k, outcome="started")
        try:
            return step()
        except Exception as failure:
            put(unit=unit, sample=k, outcome="failed", detail=f"{type(failure).__name__}: {failure}"[:400])
            return None

    kind, batch, trials = GradientTrial if chosen.backward else Trial, Batch(), {}
    for unit, k, op, sample in wanted:
        if k >= 0:
            native = chosen.backend == "kernels"
            trial = kind(op, sample, batch if native else BACKENDS[chosen.backend])
            if not native or guarded(unit, k, lambda: trial.run(trial.compiled)) is not None:  # noqa: B023
                trials[unit, k] = trial
    put(outcome="building")
    batch.build()
    for unit, k, _, _ in wanted:
        if k < 0:
            put(unit=unit, sample=k, outcome="end", every=chosen.every)
        elif (unit, k) in trials:
            found = guarded(unit, k, trials.pop((unit, k)).result)
            if found is not None:
                put(unit=unit, sample=k, **{name: value for name, value in found.items() if value})


# ---- the parent ----------------------------------------------------------------------------------------------------


def read(path: pathlib.Path) -> list[dict]:
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:  # the line that was being written when the run was killed
            continue
    return records


class Worker:
    """A process, the units that it has, and the step that it is at."""

    def __init__(self, chosen: argparse.Namespace, errors: IO[bytes]) -> None:
        command = [sys.executable, "-m", "bench.opinfo", "--worker", "--every", str(chosen.every), "--backend", chosen.backend, "--inputs", chosen.inputs]
        command += ["--backward"] if chosen.backward else []
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        self.units: list[str] = []
        self.step: dict = {}
        self.since = time.time()
        self.rest = b""

    def give(self, order: dict[str, list[int]]) -> None:
        self.units = list(order)
        assert self.process.stdin
        self.process.stdin.write((json.dumps(order) + "\n").encode())
        self.process.stdin.flush()

    def heard(self) -> list[dict] | None:
        """The records that came, None where the process has ended."""
        assert self.process.stdout
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        *lines, self.rest = (self.rest + data).split(b"\n")
        self.since = time.time()
        return [json.loads(line) for line in lines] if data else None

    def stop(self) -> int:
        self.process.kill()
        return self.process.wait()


class Run:
    """The units that are left, shared out to workers; results are appended to `path` as they come."""

    def __init__(self, chosen: argparse.Namespace, path: pathlib.Path) -> None:
        self.chosen, self.path = chosen, path
        self.known: dict[str, set[int]] = collections.defaultdict(set)
        ended: dict[str, list[int]] = collections.defaultdict(list)  # a unit that ended with every n-th sample has every 2n-th
        for r in read(path):
            if r["outcome"] == "end":
                ended[r["unit"]].append(r["every"])
            self.known[r["unit"]].add(r["sample"])
        todo = [u for u in units(chosen.dtypes, chosen.ops, chosen.backward) if not any(chosen.every % n == 0 for n in ended[u])]
        self.left = collections.deque(todo)
        self.deaths: collections.Counter[str] = collections.Counter()

    def share(self) -> dict[str, list[int]]:
        n = max(1, min(SHARE, len(self.left) // (4 * self.chosen.workers)))
        return {u: sorted(self.known[u]) for u in [self.left.popleft() for _ in range(min(n, len(self.left)))]}

    def go(self) -> None:
        until = time.time() + (self.chosen.seconds or float("inf"))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as out, self.path.with_suffix(".stderr").open("wb") as errors, selectors.DefaultSelector() as watch:

            def add() -> None:
                if self.left:
                    made = Worker(self.chosen, errors)
                    made.give(self.share())
                    watch.register(made.process.stdout, selectors.EVENT_READ, made)  # type: ignore[arg-type]

            def put(record: dict) -> None:
                self.known[record["unit"]].add(record["sample"])
                out.write(json.dumps(record) + "\n")
                out.flush()

            def lost(gone: Worker, outcome: str) -> None:
                """Another takes over what the worker had, without the sample that it died of."""
                watch.unregister(gone.process.stdout)  # type: ignore[arg-type]
                code = gone.stop()
                if gone.step.get("outcome") == "started":
                    put({"unit": gone.step["unit"], "sample": gone.step["sample"], "outcome": outcome, "detail": str(code)})
                    if gone.step["sample"] < 0:  # it died while it made its samples
                        put({"unit": gone.step["unit"], "sample": -1, "outcome": "end", "every": self.chosen.every})
                        gone.units.remove(gone.step["unit"])
                for unit in gone.units:
                    self.deaths[unit] += 1
                    if self.deaths[unit] <= 20:
                        self.left.appendleft(unit)
                    else:
                        put({"unit": unit, "sample": 0, "outcome": outcome, "detail": f"20 workers were lost with this operator; the last: {code}"})
                add()

            for _ in range(self.chosen.workers):
                add()
            while watch.get_map() and time.time() < until:
                for key, _ in watch.select(timeout=1):
                    one: Worker = key.data
                    records = one.heard()
                    if records is None:
                        lost(one, "crash")
                        continue
                    for r in records:
                        one.step = r
                        if r["outcome"] == "idle":
                            one.units = []
                            if self.left:
                                one.give(self.share())
                            else:
                                watch.unregister(one.process.stdout)  # type: ignore[arg-type]
                                one.stop()
                        elif r["outcome"] not in ("started", "building"):
                            put(r)
                            if r["outcome"] == "end":
                                one.units.remove(r["unit"])
                for one in [key.data for key in watch.get_map().values()]:
                    if time.time() - one.since > SECONDS:
                        lost(one, "hang")
            for one in [key.data for key in watch.get_map().values()]:
                self.left.extend(one.units)
                one.stop()


def report(path: pathlib.Path) -> dict[str, int]:
    records = [r for r in read(path) if r["outcome"] != "end"]
    ran = [r for r in records if r["sample"] >= 0 and r["outcome"] != "skipped"]
    counts = collections.Counter(r["outcome"] for r in records if r["sample"] >= 0 or r["outcome"] != "skipped")
    fallbacks: dict[str, set[str]] = collections.defaultdict(set)
    operators = {r["unit"].split(":")[1] for r in ran}
    for r in ran:
        for reason in r.get("fallbacks", []):
            fallbacks[r["unit"].split(":")[1]].add(reason)
    print(f"{len(ran)} samples: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    if any("trained" in r for r in ran):
        print(f"{sum(r.get('trained', False) for r in ran)} ran as compiled training regions")
    print(f"{len(operators)} operators, {len(operators) - len(fallbacks)} native on every sample, {len(fallbacks)} fall back on some")
    for name, reasons in sorted(fallbacks.items()):
        print(f"  {name}: {sorted(reasons)[0]}")
    for r in records:
        if r["outcome"] in ("wrong", "failed", "crash", "hang"):
            print(f"{r['outcome']}: {r['unit']} sample {r['sample']}: {r.get('detail', '')}")
    return dict(counts)


def main() -> None:
    from .levels import BACKENDS

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/opinfo"))
    options.add_argument("--dtypes", nargs="*")
    options.add_argument("--ops", default="")
    options.add_argument("--every", type=int, default=1, help="only every k-th sample of an operator")
    options.add_argument("--seconds", type=float, default=0.0, help="stop after so long")
    options.add_argument("--backend", choices=list(BACKENDS), default="kernels", help="the level that runs")
    options.add_argument("--inputs", choices=("samples", "enlarged", "noncontiguous", "reference", "errors"), default="samples")
    options.add_argument("--backward", action="store_true", help="gradients too")
    options.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--report", action="store_true", help="only print what stands")
    chosen = options.parse_args()
    chosen.dtypes = chosen.dtypes or list(("float32", "float64") if chosen.backward else DTYPES)
    if chosen.worker:
        with os.fdopen(os.dup(1), "w") as told:  # what operators print goes elsewhere
            os.dup2(2, 1)

            def put(**record: object) -> None:
                told.write(json.dumps(record) + "\n")
                told.flush()

            worker(chosen, sys.stdin, put)
        return
    path = chosen.out / f"{chosen.inputs}-{chosen.backend}{'-backward' * chosen.backward}.jsonl"
    left = 0
    if not chosen.report:
        run = Run(chosen, path)
        run.go()
        left = len(run.left)
    bad = report(path)
    if left:
        print(f"{left} operators and dtypes are left; the same command goes on")
    sys.exit(bool(left or sum(bad.get(k, 0) for k in ("wrong", "failed", "crash", "hang"))))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
