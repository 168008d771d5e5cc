"""Real models, eval mode under no_grad: is the result within the bound, what is native, how long does it take?

    python -m bench.models [--small] [--inductor] [--dtype float32 bfloat16] [names ...]

error: the largest deviation from float64, for eager and for ours, relative to the largest value of the reference;
the bound is twice eager's own plus 1e-6 (float32) or 2^-8 (bfloat16). Times are medians of alternated rounds: of CPU
time where torch has one thread, of the clock where it has more.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings

import torch

import tensorplay as tp
from tensorplay.testing import C, N

from .clock import alternate, machine, table
from .zoo import MODELS, make, tensors

SLACK = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}


def reference(model: torch.nn.Module, inputs: dict) -> list[torch.Tensor]:
    """The same model and inputs in float64 (experts in plain eager form: grouped matmul has no float64)."""
    exact = copy.deepcopy(model).double()
    if hasattr(exact, "config") and hasattr(exact.config, "_experts_implementation"):
        exact.config._experts_implementation = "eager"
    return tensors(exact(**{k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}))


def error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """Largest deviation over all outputs, each relative to its reference's largest value (at least 1)."""
    worst = 0.0
    for g, w in zip(got, want, strict=True):
        if w.numel() and w.is_floating_point():
            scale = max(1.0, w.abs().max().item())
            worst = max(worst, (g.double() - w).abs().max().item() / scale)
    return worst


def elementwise(run) -> list[str]:
    """Operators that a profile of one call sees called from outside of other operators."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()

    def inside(event) -> bool:
        return event.cpu_parent is not None and (event.cpu_parent.name.startswith("aten::") or inside(event.cpu_parent))

    return sorted({e.name for e in profile.events() if e.name.startswith("aten::") and not inside(e)})


def measure(name: str, dtype: torch.dtype, small: bool, inductor: bool) -> list[str]:
    model, inputs = make(name, dtype, small)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact = reference(model, inputs)
        eager = error(tensors(model(**inputs)), exact)
        compiled = tp.compile(model, strict_native=True)
        start = time.perf_counter()
        first = compiled(**inputs)
        seconds = time.perf_counter() - start
        ours = error(tensors(first), exact)
        again = error(tensors(compiled(**inputs)), exact)
        bound = 2 * eager + SLACK[dtype]
        verdict = "ok" if max(ours, again) <= bound else "OVER"
        about = tp.explain(compiled)
        peers = {"eager": lambda: model(**inputs), "ours": lambda: compiled(**inputs)}
        if inductor:
            torch.compiler.reset()
            peer = torch.compile(model)
            start = time.perf_counter()
            peer(**inputs)
            inductor_seconds = time.perf_counter() - start
            peers["inductor"] = lambda: peer(**inputs)
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        times = alternate(peers, rounds=7 if not small else 5, clock=clock)
    row = [
        name, str(dtype).removeprefix("torch."), f"{eager:.1e}", f"{ours:.1e}", verdict, str(N(compiled)), str(C(compiled)),
        str(len(about.kernels)), str(len(about.externs)), str(len(about.fallbacks)), f"{seconds:.2f}",
        f"{times['eager'].median * 1e3:.1f}", f"{times['ours'].median * 1e3:.1f}",
    ]  # fmt: skip
    if inductor:
        row += [f"{inductor_seconds:.2f}", f"{times['inductor'].median * 1e3:.1f}"]
    return row


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", default=list(MODELS))
    options.add_argument("--small", action="store_true", help="tiny models: coverage, not speed")
    options.add_argument("--inductor", action="store_true", help="measure torch.compile beside")
    options.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    chosen = options.parse_args()
    head = ["model", "dtype", "error eager", "error ours", "bound", "versions", "compiles", "kernels", "library calls",
            "fallbacks", "first call s", "eager ms", "ours ms"]  # fmt: skip
    if chosen.inductor:
        head += ["Inductor first call s", "Inductor ms"]
    rows = []
    for name in chosen.names:
        for dtype in chosen.dtype:
            try:
                rows.append(measure(name, getattr(torch, dtype), chosen.small, chosen.inductor))
            except Exception as failure:  # a model that fails is a row of the table, not the end of it
                rows.append([name, dtype, type(failure).__name__, str(failure).splitlines()[0][:120]] + [""] * (len(head) - 4))
    print(machine())
    print(table(head, rows))


if __name__ == "__main__":
    main()
