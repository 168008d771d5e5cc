"""Every sample of PyTorch's operator database through tp.compile on the CPU: wrong results, crashes, hangs.

    python -m bench.opinfo [--workers 2] [--out bench/results/opinfo] [--dtypes float32 ...] [--ops regex] [--every k]
                           [--inputs samples|enlarged|noncontiguous|reference|errors] [--backend graph|loops|kernels]

Each worker is a process of its own; a crash or a hang is the sample's result, not the end of the run. Results are
appended to one JSON line file a worker, so a run that was stopped resumes where it stopped. At the end (or with
--report) it prints how many samples passed, and which operators are native and which fall back.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .levels import BACKENDS

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "int64", "bool", "bfloat16")
UNDEFINED = re.compile(r"(new_)?empty(_like|_strided|_permuted)?$")  # values that no two calls share: only metadata counts
EITHER_ZERO = re.compile(r"(clamp(_min|_max)?|f?max(imum)?|f?min(imum)?|a(max|min)|aminmax|nn\.functional\.softshrink)(\..*)?$")  # eager's vector and scalar code differ
SECONDS = 180  # a sample that takes longer is a hang
LARGE = 1 << 16  # elements of an enlarged sample
TOGETHER = 48  # programs in one compilation


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


@dataclasses.dataclass(frozen=True)
class Bound:
    """How far a float may be from eager's: `relative` of its own size and `scale` of its tensor's largest (at least 1)."""

    relative: float
    scale: float


BOUNDS = {
    "float32": Bound(2e-5, 2e-6),  # sums in another order, functions within 4 units in the last place
    "bfloat16": Bound(2**-6, 2**-8),  # one rounding instead of one an operator
    "float64": Bound(1e-12, 1e-14),
}


def equal(got: torch.Tensor, want: torch.Tensor, zeros: bool = True) -> bool:
    """Integers exactly; floats within their bound, NaN, infinities and the signs of `zeros` as eager."""
    import torch

    if not (want.is_floating_point() or want.is_complex()):
        return torch.equal(got, want)
    if want.is_complex():
        return equal(torch.view_as_real(got.resolve_conj()), torch.view_as_real(want.resolve_conj()), zeros)
    bound = BOUNDS.get(str(want.dtype).removeprefix("torch."), BOUNDS["bfloat16"])
    g, w = got.double(), want.double()
    finite = w.isfinite()
    scale = max(1.0, w[finite].abs().max().item() if finite.any() else 0.0)
    near = (g - w).abs() <= bound.relative * w.abs() + bound.scale * scale
    if zeros:
        near &= (g != 0) | (w != 0) | (g.signbit() == w.signbit())
    same = torch.where(finite, near, (g == w) | (g.isnan() & w.isnan()))
    return bool(same.all())


def compare(got: object, want: object, values: bool = True, zeros: bool = True) -> bool:
    """Same structure, metadata and, where asked for, values and signs of zeros."""
    import torch

    if isinstance(want, torch.Tensor):
        if not isinstance(got, torch.Tensor) or got.shape != want.shape or got.dtype != want.dtype or got.layout != want.layout:
            return False
        if want.layout != torch.strided or want.is_quantized:
            return compare(got.to_dense(), want.to_dense(), values, zeros)
        if want.numel() and got.stride() != want.stride():
            return False
        return not values or want.is_meta or equal(got.flatten(), want.flatten(), zeros)  # arithmetic has up to 64 dimensions
    if isinstance(want, (tuple, list)):
        return type(got) is type(want) and len(got) == len(want) and all(compare(g, w, values, zeros) for g, w in zip(got, want))
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(compare(got[k], w, values, zeros) for k, w in want.items())
    return type(got) is type(want) and (got == want or got != got)


class Trial:
    """One sample, run eagerly and compiled from the same generator state on clones of its inputs."""

    def __init__(self, op: Any, sample: Any, backend: Any) -> None:
        import tensorplay as tp

        self.op, self.sample, self.caught = op, sample, []
        self.compiled = tp.compile(self.function, backend=backend)

    def function(self, x: object, *args: object, **kwargs: object) -> object:
        return self.op.op(x, *args, **kwargs)

    def run(self, function: Callable[..., object]) -> tuple:
        """What the function gave, what it left in its arguments, and the generator's state."""
        import torch
        from torch.utils._pytree import tree_map

        def clone(x: object) -> object:
            if not isinstance(x, torch.Tensor):
                return x
            return copy.deepcopy(x.detach()) if x.layout == torch.strided else x.detach().clone()

        leaves = tree_map(clone, (self.sample.input, tuple(self.sample.args), dict(self.sample.kwargs)))
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            try:
                out = ("value", function(leaves[0], *leaves[1], **leaves[2]))
            except Exception as failure:
                out = ("error", type(failure).__name__, str(failure).splitlines()[:1])
        self.caught += caught
        return out, leaves, torch.get_rng_state()

    def result(self) -> dict[str, object]:
        import torch

        import tensorplay as tp
        from tensorplay.errors import FallbackWarning

        asked = not UNDEFINED.match(self.op.name), not EITHER_ZERO.match(self.op.name)
        want, want_in, state = self.run(self.function)
        outcome, detail = "ok", ""
        for _ in range(2):
            got, got_in, now = self.run(self.compiled)
            if got[0] == "error" or want[0] == "error":
                same = got == want  # class and first line
            else:
                same = compare(got[1], want[1], *asked) and torch.equal(now, state)
            if not same or not compare(got_in, want_in, *asked):
                outcome, detail = "wrong", f"eager {want!r:.300} compiled {got!r:.300}"
                break
        about = tp.explain(self.compiled)
        warned = {str(w.message) for w in self.caught if issubclass(w.category, FallbackWarning)}
        reasons = {f.reason for f in about.fallbacks} or warned
        reasons = sorted(r[:200] for r in reasons if not any(other.endswith(f": {r}") for other in reasons))
        return {"outcome": outcome, "fallbacks": reasons, "kernels": len(about.kernels), "calls": len(about.externs), "detail": detail}


def enlarged(sample: Any) -> Any | None:
    """The sample with every dimension longer than 1 several times as long, so that whole vectors are filled; None: too large."""
    import torch

    for factor in (7, 4):
        sizes = []

        def grow(x: object) -> object:
            if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
                return x
            y = x.repeat([factor if n > 1 else 1 for n in x.shape])  # noqa: B023
            sizes.append(y.numel())  # noqa: B023
            return y

        found = sample.transform(grow)
        if max(sizes, default=0) <= LARGE:
            return found
    return None


def inputs_of(op: Any, kind: str, dtype: Any) -> Iterator[Any]:
    """The database's samples; larger ones; strided ones; more sizes and special values; or what the operator must refuse."""
    import torch

    if kind == "errors":
        if dtype == torch.float32 and op.error_inputs_func is not None:  # they choose their own dtypes
            yield from (e.sample_input for e in op.error_inputs("cpu"))
    elif kind == "reference":
        yield from op.reference_inputs("cpu", dtype)
    else:
        for sample in op.sample_inputs("cpu", dtype):
            found = sample.noncontiguous() if kind == "noncontiguous" else enlarged(sample) if kind == "enlarged" else sample
            if found is not None:
                yield found


def worker(todo: list[str], out: pathlib.Path, every: int, level: str, kind: str) -> None:
    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    from .levels import BACKENDS, Batch

    torch.set_num_threads(1)
    done = {(r["unit"], r["sample"]) for r in read(out) if r["outcome"] != "started"}
    ended: dict[str, list[int]] = collections.defaultdict(list)  # a unit that ended with every n-th sample has every 2n-th
    for r in read(out):
        if r["outcome"] == "end":
            ended[r["unit"]].append(r.get("every", 1))
    with out.open("a") as f:

        def put(**record: object) -> None:
            f.write(json.dumps(record) + "\n")
            f.flush()

        def attempt(unit: str, k: int, step: Callable[[], Any]) -> Any:
            put(unit=unit, sample=k, outcome="started")
            try:
                return step()
            except Exception as failure:
                put(unit=unit, sample=k, outcome="failed", detail=f"{type(failure).__name__}: {failure}"[:400])
                return None

        for unit in todo:
            index, _, dtype_name = unit.split(":")
            if any(every % n == 0 for n in ended.get(unit, ())):
                continue
            dtype, op = getattr(torch, dtype_name), op_db[int(index)]
            torch.manual_seed(0)
            try:
                samples = [(k, s) for k, s in enumerate(inputs_of(op, kind, dtype)) if not (k % every or (unit, k) in done)]
            except Exception as failure:
                put(unit=unit, sample=-2, outcome="skipped", detail=f"no samples: {type(failure).__name__}: {failure}"[:200])
                samples = []
            for first in range(0, len(samples), TOGETHER):
                batch = Batch()
                trials = {}
                for k, sample in samples[first : first + TOGETHER]:
                    trial = Trial(op, sample, batch if level == "kernels" else BACKENDS[level])
                    if level == "kernels" and attempt(unit, k, lambda: trial.run(trial.compiled)) is None:  # noqa: B023
                        continue
                    trials[k] = trial
                batch.build()
                for k, trial in trials.items():
                    found = attempt(unit, k, trial.result)
                    if found is not None:
                        put(unit=unit, sample=k, **found)
            put(unit=unit, sample=-1, outcome="end", every=every)


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
                   "--ops", chosen.ops, "--every", str(chosen.every), "--backend", chosen.backend, "--inputs", chosen.inputs, "--dtypes", *chosen.dtypes]  # fmt: skip
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
    options.add_argument("--inputs", choices=("samples", "enlarged", "noncontiguous", "reference", "errors"), default="samples")
    options.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options.add_argument("--report", action="store_true", help="only print what stands")
    chosen = options.parse_args()
    if not chosen.report:
        everything = units(chosen.dtypes, chosen.ops)
        shards = [everything[k :: chosen.workers] for k in range(chosen.workers)]
        if chosen.worker is not None:
            worker(shards[chosen.worker], chosen.out / f"{chosen.worker}.jsonl", chosen.every, chosen.backend, chosen.inputs)
            return
        supervise(shards, chosen.out, chosen)
    bad = report(chosen.out)
    sys.exit(bool(sum(bad.get(k, 0) for k in ("wrong", "failed", "crash", "hang"))))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
