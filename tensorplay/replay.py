"""The data gates of one version on other inputs (algorithm 3.1).

In: what capture found.  Out: a function from the placeholders' tensors to the entries of the gates' values.
Always: it writes nothing of the caller's, runs on torch, and leaves grad mode and its like as it found them; it
raises where a gate cannot be computed, which counts as different.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .capture import ambient
from .capture.captured import Captured
from .capture.gates import value_of
from .key.signature import Entry, entry

Replay = Callable[[Sequence[torch.Tensor]], tuple[Entry, ...]]


def replayer(captured: Captured) -> Replay | None:
    """The replay of a captured function's gates; None where it has none."""
    if captured.replay is None or not captured.gates:
        return None
    forward = captured.replay.forward
    kinds = [gate.kind for gate in captured.gates]
    targets = {node.target for node in captured.replay.graph.nodes}
    grad = torch.autograd.grad in targets
    switches = bool(targets & ambient.SETTERS)

    def replayed(inputs: Sequence[torch.Tensor]) -> tuple[Entry, ...]:
        state = ambient.ambient() if switches else None
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(grad)
        try:
            return tuple([entry(value_of(k, x)) for k, x in zip(kinds, forward(*inputs), strict=True)])
        finally:
            torch._C._set_grad_enabled(before)
            if state is not None:
                ambient.restore(state)

    return replayed
