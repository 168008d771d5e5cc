"""Whether a captured graph takes part in autograd: the one place that says so.

In: what capture found.  Out: True where a result of the graph may need a gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .capture.captured import Captured

_GRAD_MODE = {"_set_grad_enabled", "set_grad_enabled", "enable_grad"}
_TAPE = {"backward", "requires_grad_", "grad", "_set_requires_grad"}


def trains(captured: Captured) -> bool:
    """Grad mode is on, or turned on inside, while an input requires grad; or the graph itself starts a tape."""
    enabled = torch.is_grad_enabled()
    for node in captured.graph.graph.nodes:
        if node.op in ("call_function", "call_method"):
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            enabled |= name in _GRAD_MODE and True in node.args
            if name in _TAPE or node.kwargs.get("requires_grad") is True:
                return True
    return enabled and any(t.requires_grad for t in captured.samples)
