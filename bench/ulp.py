"""Largest error of each mathematical function in units in the last place, over random points and special ones.

    python -m bench.ulp [--points 1000000] [--isa avx512 avx2 portable] [names ...]

The reference is numpy in the next wider type (float64 for float32, long double for float64); where numpy lacks a
function, torch in float64. Points: spread over the exponents of the function's domain, and ordinary ones.
"""

from __future__ import annotations

import argparse
import ctypes

import numpy
import torch

from tensorplay.stax.artifacts.build import build
from tensorplay.stax.codegen.cpp.emit import emit
from tensorplay.stax.codegen.detect import detect, tiers
from tensorplay.stax.expr import load, make, var
from tensorplay.stax.loops.nodes import Buffer, Compute, Loops, Pointwise, Ref
from tensorplay.stax.schedule.plan import Kernel, Memory, Plan

NAMES = {
    "exp": "exp", "log": "log", "tanh": "tanh", "erf": "", "sigmoid": "", "exp2": "exp2", "expm1": "expm1", "log2": "log2",
    "log10": "log10", "log1p": "log1p", "sin": "sin", "cos": "cos", "tan": "tan", "asin": "arcsin", "acos": "arccos",
    "atan": "arctan", "sinh": "sinh", "cosh": "cosh", "asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh",
    "erfc": "", "lgamma": "", "sqrt": "sqrt", "rsqrt": "",
}  # fmt: skip
CPU = torch.device("cpu")


def points(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Ordinary numbers, then numbers of every exponent."""
    g = torch.Generator().manual_seed(0)
    ordinary = torch.randn(n // 2, generator=g, dtype=torch.float64) * 8
    span = 37 if dtype == torch.float32 else 300
    exponent = torch.rand(n - n // 2, generator=g, dtype=torch.float64) * 2 * span - span
    sign = torch.randint(0, 2, (n - n // 2,), generator=g) * 2 - 1
    return torch.cat([ordinary, 10.0**exponent * sign]).to(dtype)


def wide(name: str, x: torch.Tensor) -> numpy.ndarray:
    """The function in a wider type."""
    y = x.double().numpy() if x.dtype == torch.float32 else x.numpy().astype(numpy.longdouble)
    with numpy.errstate(all="ignore"):
        if NAMES[name]:
            return getattr(numpy, NAMES[name])(y)
        if name == "sigmoid":
            return 1 / (1 + numpy.exp(-y))
        if name == "rsqrt":
            return 1 / numpy.sqrt(y)
        return getattr(torch, name)(x.double()).numpy()


def ulp(got: torch.Tensor, want: numpy.ndarray) -> float:
    """The largest error, in spacings of the rounded result; infinite on a wrong NaN or infinity."""
    y = got.numpy()
    with numpy.errstate(all="ignore"):
        rounded = want.astype(y.dtype)
        clear = numpy.isfinite(rounded) & numpy.isfinite(y)
        wrong = ~clear & ~((y == rounded) | (numpy.isnan(y) & numpy.isnan(rounded)))
        largest = numpy.isfinite(want.astype(y.dtype)) != numpy.isfinite(y)
        edge = numpy.abs(want) > numpy.finfo(y.dtype).max * 0.999999  # one rounding decides about infinity
        if bool((wrong & ~(largest & edge)).any()):
            return float("inf")
        return float((numpy.abs(y[clear] - want[clear]) / numpy.spacing(numpy.abs(rounded[clear]))).max(initial=0))


def run(name: str, x: torch.Tensor, isa: str) -> torch.Tensor:
    v = var("x0", len(x))
    a, b = (Buffer(n, x.dtype, CPU, (len(x),), (1,)) for n in ("x", "y"))
    node = Compute((b,), (v,), Pointwise((v,), make(name, (load("x", v, x.dtype),), x.dtype)), (name,))
    loops = Loops((a,), (node,), (Ref("y", b.size, b.stride),))
    target = detect(isa)
    plan = Plan(loops, (Kernel(name, (v,), (), (node,)),), Memory(fresh=("y",)))
    artifact = build(emit(plan, target), target)
    y = torch.empty_like(x)
    table = (ctypes.c_void_p * 2)(x.data_ptr(), y.data_ptr())
    assert artifact.entries["segment_0"](table, 1) == 0
    return y


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", default=list(NAMES))
    options.add_argument("--points", type=int, default=1_000_000)
    options.add_argument("--isa", nargs="*", default=list(tiers()))
    chosen = options.parse_args()
    columns = [(d, isa) for d in (torch.float32, torch.float64) for isa in chosen.isa]
    head = "  ".join(f"{str(d)[-2:]} {isa:>8}" for d, isa in columns)
    print(f"{'function':10} {head}   torch f32   f64")
    for name in chosen.names or list(NAMES):
        cells, eager = [], []
        for dtype in (torch.float32, torch.float64):
            x = points(chosen.points, dtype)
            want = wide(name, x)
            eager.append(f"{ulp(getattr(torch, name)(x), want):9.2f}")
            cells += [f"{ulp(run(name, x, isa), want):11.2f}" for isa in chosen.isa]
        print(f"{name:10} {'  '.join(cells)} {' '.join(eager)}")


if __name__ == "__main__":
    main()
