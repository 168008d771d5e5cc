"""A function of tensors through retrace and lowering, beside eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tensorplay.stax.joint.opgraph import OpGraph
from tensorplay.stax.joint.retrace import retrace
from tensorplay.stax.loops.interpret import interpret
from tensorplay.stax.loops.lower import lower
from tensorplay.stax.loops.nodes import Compute, Extern, Loops
from tensorplay.stax.loops.verify import verify


def opgraph(fn: Callable[..., Any], *inputs: torch.Tensor) -> OpGraph:
    """The operator graph of `fn` on these inputs, with flat outputs."""

    def flat(*xs: torch.Tensor) -> tuple:
        return tuple(pytree.tree_leaves(fn(*xs)))

    graph = fx.Graph()
    call = graph.call_function(flat, tuple(graph.placeholder(f"x{k}") for k in range(len(inputs))))
    graph.output(call)
    with torch.no_grad():
        return retrace(fx.GraphModule(torch.nn.Module(), graph), inputs)


def lowered(fn: Callable[..., Any], *inputs: torch.Tensor) -> Loops:
    return verify(lower(opgraph(fn, *inputs)))


def computes(loops: Loops) -> list[Compute]:
    return [n for n in loops.nodes if isinstance(n, Compute)]


def calls(loops: Loops) -> list[str]:
    """The library operators and fallbacks that the loops call."""
    return [n.target.__name__ for n in loops.nodes if isinstance(n, Extern)]


def copies(inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The inputs in fresh memory of the same layout."""
    out = []
    for t in inputs:
        fresh = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
        span = 1 + sum((n - 1) * st for n, st in zip(t.shape, t.stride())) if t.numel() else 0
        flat = torch.as_strided(fresh, (span,), (1,), 0)
        flat.copy_(torch.as_strided(t, (span,), (1,), t.storage_offset()))
        out.append(fresh)
    return out


def check(fn: Callable[..., Any], *inputs: torch.Tensor, tolerance: float = 0.0, native: bool = True) -> Loops:
    """Values, dtypes, strides, written inputs and aliasing as eager's."""
    mine, theirs = copies(inputs), copies(inputs)
    loops = lowered(fn, *copies(inputs))
    if native:
        assert not calls(loops), calls(loops)
    with torch.no_grad():
        eager = pytree.tree_leaves(fn(*theirs))
    ours = interpret(loops, mine)
    assert len(eager) == len(ours)
    for a, b in zip([*eager, *theirs], [*ours, *mine], strict=True):
        if not isinstance(a, torch.Tensor):
            assert a == b
            continue
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        if tolerance:
            torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            assert torch.equal(a.nan_to_num(12345.0) if a.is_floating_point() else a, b.nan_to_num(12345.0) if b.is_floating_point() else b)
    e, o = [t for t in [*theirs, *eager] if isinstance(t, torch.Tensor)], [t for t in [*mine, *ours] if isinstance(t, torch.Tensor)]
    for i in range(len(e)):
        for j in range(i):
            assert _shares(e[i], e[j]) == _shares(o[i], o[j]), f"tensors {j} and {i} of inputs and outputs"
    return loops


def _shares(a: torch.Tensor, b: torch.Tensor) -> int | None:
    """The distance in memory of two tensors of one storage, None for tensors apart."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or not a.numel() or not b.numel():
        return None
    return (a.data_ptr() - b.data_ptr()) // a.element_size()
