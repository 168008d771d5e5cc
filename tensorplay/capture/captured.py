"""What capture hands on: the graph, where its inputs are read from, what the trace used as a constant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..key.sources import Source


@dataclass(frozen=True)
class Gate:
    """One data gate: the node of the replay graph that computes it, its kind, the value taken, the user's line."""

    kind: str
    node: str
    value: Any
    line: str


@dataclass(frozen=True)
class Captured:
    """One execution of the user's function as a graph (section 3).

    graph: placeholders are tensors only, one for each entry of `inputs`; the output is a flat tuple.
    inputs: where each placeholder's tensor is read from at every call (arguments first, then lifted tensors).
    samples: the tensors that capture ran on, one for each placeholder. They are the caller's own objects, except
        that storages which the function writes were cloned first.
    rebuild: makes the caller's result from the flat outputs of the graph, (outputs, args, kwargs) -> result.
    state: non-tensor values that the trace used as constants, with the place each was read from.
    gates, replay: the data gates in order and the graph that recomputes them from the placeholders (None without gates).
    written: positions of the placeholders whose storage the function writes.
    random: whether it draws from a generator.
    numbers: whether nodes of the graph are Python numbers (`meta["number"]`), which `Tensor.item` reads at each call.
    by_value: whether numbers that the call computed, and that could be such nodes, are constants, since no other value was seen.
    ties: pairs of places that held one object during the capture, of which the trace read only the second.
    """

    graph: fx.GraphModule
    inputs: tuple[Source, ...]
    samples: tuple[torch.Tensor, ...]
    rebuild: Callable[[Sequence[Any], tuple, dict], Any]
    state: tuple[tuple[Source, Any], ...] = ()
    gates: tuple[Gate, ...] = ()
    replay: fx.GraphModule | None = None
    written: tuple[int, ...] = ()
    random: bool = False
    ties: tuple[tuple[Source, Source], ...] = ()
    numbers: bool = False
    by_value: bool = False
