"""The data gates of one version on other inputs (algorithm 3.1).

In: what capture found.  Out: `Replay`, called with the placeholders' tensors, which returns the entries of the gates'
values; it raises where a gate cannot be computed, which counts as different.
Always: it runs on torch, writes nothing of the caller's, and leaves grad mode and its like as it found them. On
inputs of the version's own signature the replay graph itself copies what it writes; on others an operator that made
a copy may return its argument (`x.float()`), so there it runs on copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .capture import ambient
from .capture.captured import Captured
from .capture.gates import value_of
from .capture.isolate import isolate
from .key.signature import Entry, entry


class Replay:
    """The replay graph of one version, ready to run."""

    def __init__(self, captured: Captured) -> None:
        assert captured.replay is not None
        graph = captured.replay.graph
        self.forward = captured.replay.forward
        self.kinds = [gate.kind for gate in captured.gates]
        targets = {node.target for node in graph.nodes}
        self.grad = torch.autograd.grad in targets
        self.switches = bool(targets & ambient.SETTERS)
        self.used = [k for k, node in enumerate(n for n in graph.nodes if n.op == "placeholder") if node.users]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[Entry, ...]:
        state = ambient.ambient() if self.switches else None
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self.grad and before)  # the graph switches it where it differentiates
        try:
            return tuple([entry(value_of(k, x)) for k, x in zip(self.kinds, self.forward(*inputs), strict=True)])
        finally:
            torch._C._set_grad_enabled(before)
            if state is not None:
                ambient.restore(state)

    def elsewhere(self, inputs: Sequence[torch.Tensor]) -> tuple[Entry, ...]:
        """The same on inputs of any signature."""
        tensors = list(inputs)
        for k, copy in zip(self.used, isolate([tensors[k] for k in self.used])):
            tensors[k] = copy
        return self(tensors)


def replay_of(captured: Captured) -> Replay | None:
    """The replay of a captured function's gates; None where it has none."""
    return Replay(captured) if captured.gates and captured.replay is not None else None
