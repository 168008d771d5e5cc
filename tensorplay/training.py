"""Whether a captured graph takes part in autograd, and what the caller may choose about that.

In: a captured graph and its tensors.  Out: True where a result of the graph may need a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

PARTITIONS = ("minimum", "default")
_GRAD_MODE = {"_set_grad_enabled", "set_grad_enabled", "enable_grad"}
_TAPE = {"backward", "requires_grad_", "grad", "_set_requires_grad"}


def trains(graph: fx.GraphModule, samples: Sequence[torch.Tensor]) -> bool:
    """Grad mode is on, or turned on inside, while an input requires grad."""
    enabled = torch.is_grad_enabled()
    for node in graph.graph.nodes:
        if node.op in ("call_function", "call_method"):
            enabled |= _name(node) in _GRAD_MODE and True in node.args
    return enabled and any(t.requires_grad for t in samples)


def has_tape(graph: fx.GraphModule) -> bool:
    """Whether the graph itself differentiates, or makes a tensor that requires grad."""
    calls = (n for n in graph.graph.nodes if n.op in ("call_function", "call_method"))
    return any(_name(n) in _TAPE or n.kwargs.get("requires_grad") is True for n in calls)


@contextlib.contextmanager
def hooks_aside() -> Iterator[None]:
    """Takes the caller's hooks on saved tensors away: they are for what the call saves, not for what compiling it does."""
    graph: Any = torch._C._autograd
    hooks = []
    while (top := graph._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        graph._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            graph._push_saved_tensors_default_hooks(pack, unpack)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def check_budget(options: Mapping[str, Any]) -> None:
    """Refuses a wrong choice of what forward saves."""
    name, budget = options.get("partition", PARTITIONS[0]), options.get("memory_budget")
    if name not in PARTITIONS:
        raise ValueError(f"options['partition'] is {' or '.join(map(repr, PARTITIONS))}, not {name!r}")
    if budget is not None and (not isinstance(budget, (int, float)) or not 0 <= budget <= 1):
        raise ValueError(f"memory_budget is a fraction from 0 to 1 of what the default partition saves, not {budget!r}")
