"""Gradients of torch's operator database through a compiled region, against eager's.

    python -m bench.gradients [--ops REGEX] [--every K] [--backend aot_eager|stax] [--dtype float32]

One line for each operator whose gradients are wrong, and a count at the end. Compared are outputs, gradients, which of
them are absent, and dtypes; operators that run on torch as a whole are counted apart.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import tensorplay as tp
from tensorplay.compiled import compiled_of
from tensorplay.testing import near

TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-8, torch.bfloat16: 1e-1}


def leaves(value: object) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def gradients(f, sample):
    """Outputs, gradients of every input, and whether it raised."""
    args, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    fresh = [t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in args]
    x, rest, kwargs = pytree.tree_unflatten(fresh, spec)
    torch.manual_seed(0)
    outs = leaves(f(x, *rest, **kwargs))
    live = [t for t in outs if t.requires_grad]
    if not live:
        return None
    torch.manual_seed(1)
    torch.autograd.backward(live, [torch.randn_like(t) for t in live])
    return [t.detach() for t in outs], [t.grad for t in fresh if isinstance(t, torch.Tensor)]


def alike(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    return a.layout == b.layout and (a.layout is not torch.strided or near(a, b, tolerance))


def compare(got, want, tolerance: float) -> str:
    if len(got[0]) != len(want[0]) or not all(alike(a, b, tolerance) for a, b in zip(got[0], want[0], strict=True)):
        return "outputs"
    for k, (a, b) in enumerate(zip(got[1], want[1], strict=True)):
        if (a is None) != (b is None):
            return f"gradient {k} is {'absent' if a is None else 'there'}"
        if a is not None and not alike(a, b, tolerance):
            return f"gradient {k}"
    return ""


def check(op, dtype: torch.dtype, backend: str, every: int, counts: collections.Counter) -> str:
    def call(x, *args, **kwargs):
        return op.op(x, *args, **kwargs)

    for k, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=True)):
        if k % every:
            continue
        try:
            want = gradients(call, sample)
            again = gradients(call, sample)
        except Exception:
            continue
        if want is None or again is None or compare(again, want, TOLERANCE[dtype]):
            continue
        cf = tp.compile(call, backend=backend)
        try:
            got = gradients(cf, sample)
        except Exception as error:
            return f"sample {k}: {type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"
        program = compiled_of(cf).versions[-1].program if compiled_of(cf).versions else None
        counts["compiled" if hasattr(program, "partition") else "on torch"] += 1
        if got is None or (wrong := compare(got, want, TOLERANCE[dtype])):
            return f"sample {k}: {'nothing requires grad' if got is None else wrong}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default="")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shard", default="0/1", help="k/n: every n-th operator")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    k, n = map(int, options.shard.split("/"))
    warnings.simplefilter("ignore")
    wrong, counts = 0, collections.Counter()
    ops = [op for op in op_db if op.supports_autograd and dtype in op.supported_dtypes("cpu") and re.search(options.ops, op.name)]
    for op in ops[k::n]:
        found = check(op, dtype, options.backend, options.every, counts)
        if found:
            wrong += 1
            print(f"{op.name} {op.variant_test_name}: {found}", flush=True)
    print(f"{len(ops[k::n])} operators, {wrong} wrong, {dict(counts)}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
