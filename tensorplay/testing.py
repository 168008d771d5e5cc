"""Assertions about compiled functions, for users and for our own tests; names of torch.testing pass through.

Thin readings of `tp.explain`: how many versions and compilations, which kernels and graphs, why a call missed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .compiled import Compiled, Version, compiled_of
from .explain import KernelReport, explain


def __getattr__(name: str) -> Any:
    return getattr(torch.testing, name)


# ---- counts and reasons --------------------------------------------------------------------------------------------


def N(cf: Any) -> int:
    """Live versions."""
    return len(compiled_of(cf).live_versions())


def C(cf: Any) -> int:
    """Compilations so far."""
    return compiled_of(cf).compilations


def K(cf: Any) -> list[KernelReport]:
    """Generated kernels of the last version: source, reads, writes, model_bytes."""
    return explain(cf).kernels


def LOG(cf: Any) -> list[str]:
    """Lines of the recompile log."""
    return list(compiled_of(cf).log)


def REASONS(cf: Any) -> list[Any]:
    """Failing guards of the last miss: each has path, condition, expected, actual."""
    return list(compiled_of(cf).reasons)


# ---- representations -----------------------------------------------------------------------------------------------


def _last(cf: Any) -> Version:
    compiled: Compiled = compiled_of(cf)
    if not compiled.versions:
        raise AssertionError(f"{compiled.name!r} has no compiled version: call it first (fallbacks: {compiled.fallbacks})")
    return compiled.versions[-1]


def CAP(cf: Any) -> fx.GraphModule:
    """The captured graph of the last version, before passes."""
    return _last(cf).captured.graph


def FRONT(cf: Any) -> fx.GraphModule:
    """The graph after the front-end passes."""
    return _last(cf).front


def OPG(cf: Any) -> fx.GraphModule:
    """The operator-level graph of the last version."""
    return _last(cf).program.ops.module


def JOINT(cf: Any) -> fx.GraphModule:
    """The joint forward and backward graph of a training region."""
    return _last(cf).program.joint.module


def FW(cf: Any) -> fx.GraphModule:
    """The forward part of a training region."""
    return _last(cf).program.forward.module


def BW(cf: Any) -> fx.GraphModule:
    """The backward part of a training region."""
    return _last(cf).program.backward.module


def saved(cf: Any) -> list[str]:
    """Names that the forward part saves for the backward part."""
    return list(_last(cf).program.saved)


def targets(graph: fx.GraphModule | fx.Graph) -> list[str]:
    """Names of the nodes in order: placeholder or method name, else the bare name of the callable, and 'output'."""
    nodes = graph.nodes if isinstance(graph, fx.Graph) else graph.graph.nodes
    names = []
    for n in nodes:
        if n.op == "output":
            names.append("output")
        elif isinstance(n.target, torch._ops.OpOverload):
            names.append(n.target._schema.name.split("::")[-1])
        elif isinstance(n.target, str):
            names.append(n.target)
        else:
            names.append(getattr(n.target, "__name__", str(n.target)))
    return names


def RUN(cf: Any, level: str, *args: Any, **kwargs: Any) -> Any:
    """Runs the last version at a level: 'graph', 'ops', 'loops', 'plan' or 'kernels'."""
    return _last(cf).run_at(level, args, kwargs)


def tiers() -> tuple[str, ...]:
    """The vector widths that this machine can run."""
    from .stax.codegen.detect import tiers

    return tiers()


# ---- comparisons ---------------------------------------------------------------------------------------------------


def eq(a: Any, b: Any) -> bool:
    """Same structure, shapes, dtypes and bits, NaN equal to NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        a, b = a.detach(), b.detach()
        if not (a.is_floating_point() or a.is_complex()):
            return torch.equal(a, b)
        if a.is_complex():
            return eq(torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj()))
        nan = a.isnan() & b.isnan()
        return bool(((a == b) & (a.signbit() == b.signbit()) | nan).all())
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(eq, a, b))
    return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)))


def near(a: Any, b: Any, tolerance: float) -> bool:
    """Same shapes and dtypes, NaN and signed infinities in the same places, the finite rest within
    tolerance * max(1, its largest value in b)."""
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(near(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if not isinstance(a, Tensor):
        return eq(a, b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach(), b.detach()
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    if a.is_complex():
        return near(torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj()), tolerance)
    finite = b.isfinite()
    if not torch.equal(finite, a.isfinite()) or not eq(a[~finite], b[~finite]):
        return False
    x, y = a[finite].double(), b[finite].double()
    return not x.numel() or (x - y).abs().max().item() <= tolerance * max(1.0, y.abs().max().item())


def sum_bound(x: Tensor, dim: int | Sequence[int] | None = None, order: str = "any") -> Tensor:
    """Bound of the rounding error of a sum over `dim` in the dtype of `x` (section 6.5): n * u * sum |x|.

    order='pairwise' gives the bound of a balanced tree, (log2(n) + 1) * u * sum |x|.
    """
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    n = math.prod(x.shape[d] for d in dims)
    u = torch.finfo(x.dtype).eps / 2
    steps = n if order == "any" else math.log2(max(n, 1)) + 1
    return steps * u * x.double().abs().sum(list(dims))


SPECIALS = {
    "floating": (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1e-40, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan),
    "integer": (0, 1, -1, 2, 7, -128, 127),
}
"""Values that every value test runs on beside ordinary ones: zeros of both signs, a denormal, huge, infinite, NaN."""

