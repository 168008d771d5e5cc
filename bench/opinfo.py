"""Every sample of PyTorch's operator database through tp.compile on the CPU: wrong results, crashes, hangs.

    python -m bench.opinfo [--workers 2] [--out bench/results/opinfo] [--dtypes float32 ...] [--ops regex] [--every k]

Each worker is a process of its own; a crash or a hang is the sample's result, not the end of the run. Results are
appended to one JSON line file a worker, so a run that was stopped resumes where it stopped. At the end (or with
--report) it prints how many samples passed, and which operators are native and which fall back.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import time

from .fuzz import BACKENDS

DTYPES = ("float32", "int64", "bool", "bfloat16")
UNDEFINED = re.compile(r"(new_)?empty(_like|_strided|_permuted)?$")  # values that no two calls share: only metadata counts
SECONDS = 120  # a sample that takes longer is a hang


def units(dtypes: list[str], pattern: str) -> list[str]:
    """'index:name:dtype' of every operator and dtype that the database has samples for."""
    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    out = []
    for k, op in enumerate(op_db):
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        if re.search(pattern, name):
            out += [f"{k}:{name}:{d}" for d in dtypes if op.supports_dtype(getattr(torch, d), "cpu")]
    return out


# ---- one worker --------------------------------------------------------------------------------------------------


def compare(got: object, want: object, tolerance: float | None) -> bool:
    """Same structure, metadata and values; floats within the tolerance of the dtype (None: metadata only)."""
    import torch

    from tensorplay.testing import near

    if isinstance(want, torch.Tensor):
        if not isinstance(got, torch.Tensor) or got.shape != want.shape or got.dtype != want.dtype or got.layout != want.layout:
            return False
        if want.layout != torch.strided or want.is_quantized:
            return compare(got.to_dense(), want.to_dense(), tolerance)
        if want.numel() and got.stride() != want.stride():
            return False
        return tolerance is None or near(got, want, tolerance)
    if isinstance(want, (tuple, list)):
        return type(got) is type(want) and len(got) == len(want) and all(compare(g, w, tolerance) for g, w in zip(got, want))
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(compare(got[k], w, tolerance) for k, w in want.items())
    return type(got) is type(want) and (got == want or got != got)


def sample_result(op: object, sample: object, dtype: object, backend: str) -> dict:
    """Runs one sample eagerly and compiled, twice, from the same generator state, on clones of the inputs."""
    import copy
    import warnings

    import torch
    from torch.utils._pytree import tree_map

    import tensorplay as tp
    from tensorplay.errors import FallbackWarning

    def clone(x: object) -> object:
        return copy.deepcopy(x.detach()) if isinstance(x, torch.Tensor) else x

    def run(function: object) -> tuple:
        leaves = tree_map(clone, (sample.input, tuple(sample.args), dict(sample.kwargs)))
        torch.manual_seed(0)
        try:
            out = function(leaves[0], *leaves[1], **leaves[2])
        except Exception as failure:
            return ("error", type(failure).__name__, str(failure).splitlines()[:1]), leaves
        return ("value", out), leaves

    def function(x: object, *args: object, **kwargs: object) -> object:
        return op.op(x, *args, **kwargs)

    tolerance = None if UNDEFINED.match(op.name) else 3e-2 if dtype == torch.bfloat16 else 2e-5
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        want, want_in = run(function)
        state = torch.get_rng_state()
        compiled = tp.compile(function, backend=BACKENDS[backend])
        outcome = "ok"
        for _ in range(2):
            got, got_in = run(compiled)
            if got[0] == "error" or want[0] == "error":
                same = got[:2] == want[:2]
            else:
                same = compare(got[1], want[1], tolerance) and torch.equal(torch.get_rng_state(), state)
            if not same or not compare(got_in, want_in, tolerance):
                outcome = "wrong"
                break
        about = tp.explain(compiled)
    reasons = sorted({str(f)[:160] for f in about.fallbacks} | {str(w.message)[:160] for w in caught if issubclass(w.category, FallbackWarning)})
    return {"outcome": outcome, "fallbacks": reasons, "kernels": len(about.kernels), "detail": repr((want[:3], got[:3]))[:400] if outcome == "wrong" else ""}


def worker(todo: list[str], out: pathlib.Path, every: int, backend: str) -> None:
    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    torch.set_num_threads(1)
    done = {(r["unit"], r["sample"]) for r in read(out) if r["outcome"] != "started"}
    with out.open("a") as f:

        def put(**record: object) -> None:
            f.write(json.dumps(record) + "\n")
            f.flush()

        for unit in todo:
            index, _, dtype_name = unit.split(":")
            if (unit, -1) in done:
                continue
            dtype, op = getattr(torch, dtype_name), op_db[int(index)]
            torch.manual_seed(0)
            try:
                samples = op.sample_inputs("cpu", dtype)
                for k, sample in enumerate(samples):
                    if k % every or (unit, k) in done:
                        continue
                    put(unit=unit, sample=k, outcome="started")
                    try:
                        put(unit=unit, sample=k, **sample_result(op, sample, dtype, backend))
                    except Exception as failure:
                        put(unit=unit, sample=k, outcome="failed", detail=f"{type(failure).__name__}: {failure}"[:400])
            except Exception as failure:
                put(unit=unit, sample=-2, outcome="skipped", detail=f"no samples: {type(failure).__name__}: {failure}"[:200])
            put(unit=unit, sample=-1, outcome="end")


# ---- the parent ----------------------------------------------------------------------------------------------------


def read(path: pathlib.Path) -> list[dict]:
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:  # the line that a killed worker was writing
            continue
    return records


def supervise(todo: list[list[str]], out: pathlib.Path, chosen: argparse.Namespace) -> None:
    """Keeps one process a shard alive; what was started and never finished is a crash or a hang."""
    out.mkdir(parents=True, exist_ok=True)
    running: dict[int, subprocess.Popen | None] = {}

    def start(k: int) -> subprocess.Popen:
        command = [sys.executable, "-m", "bench.opinfo", "--worker", str(k), "--workers", str(chosen.workers), "--out", str(out),
                   "--ops", chosen.ops, "--every", str(chosen.every), "--backend", chosen.backend, "--dtypes", *chosen.dtypes]  # fmt: skip
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    for k in range(len(todo)):
        running[k] = start(k)
    while any(running.values()):
        time.sleep(1)
        for k, process in running.items():
            if process is None:
                continue
            path = out / f"{k}.jsonl"
            code = process.poll()
            hung = code is None and path.exists() and time.time() - path.stat().st_mtime > SECONDS
            if code is None and not hung:
                continue
            if hung:
                process.kill()
                process.wait()
            records = read(path)
            if (code or hung) and records and records[-1]["outcome"] == "started":
                last = records[-1]
                with path.open("a") as f:
                    f.write(json.dumps({"unit": last["unit"], "sample": last["sample"], "outcome": "hang" if hung else "crash", "detail": str(code)}) + "\n")
                running[k] = start(k)
            else:
                running[k] = None


def report(out: pathlib.Path) -> dict[str, int]:
    records = [r for path in sorted(out.glob("*.jsonl")) for r in read(path) if r["sample"] >= 0 and r["outcome"] != "started"]
    counts = collections.Counter(r["outcome"] for r in records)
    fallbacks: dict[str, set[str]] = collections.defaultdict(set)
    operators = {r["unit"].split(":")[1] for r in records}
    for r in records:
        for reason in r.get("fallbacks", []):
            fallbacks[r["unit"].split(":")[1]].add(reason)
    print(f"{len(records)} samples: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    print(f"{len(operators)} operators, {len(operators) - len(fallbacks)} native on every sample, {len(fallbacks)} fall back on some")
    for name, reasons in sorted(fallbacks.items()):
        print(f"  {name}: {sorted(reasons)[0]}")
    for r in records:
        if r["outcome"] in ("wrong", "failed", "crash", "hang"):
            print(f"{r['outcome']}: {r['unit']} sample {r['sample']}: {r.get('detail', '')}")
    return dict(counts)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench/results/opinfo"))
    options.add_argument("--dtypes", nargs="*", default=list(DTYPES))
    options.add_argument("--ops", default="")
    options.add_argument("--every", type=int, default=1, help="only every k-th sample of an operator")
    options.add_argument("--backend", choices=list(BACKENDS), default="kernels", help="the level that runs")
    options.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options.add_argument("--report", action="store_true", help="only print what stands")
    chosen = options.parse_args()
    if not chosen.report:
        everything = units(chosen.dtypes, chosen.ops)
        shards = [everything[k :: chosen.workers] for k in range(chosen.workers)]
        if chosen.worker is not None:
            worker(shards[chosen.worker], chosen.out / f"{chosen.worker}.jsonl", chosen.every, chosen.backend)
            return
        supervise(shards, chosen.out, chosen)
    bad = report(chosen.out)
    sys.exit(bool(sum(bad.get(k, 0) for k in ("wrong", "failed", "crash", "hang"))))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
