"""Whether a captured graph takes part in autograd: the one place that says so.

In: a captured graph and its tensors.  Out: True where a result of the graph may need a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

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


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
