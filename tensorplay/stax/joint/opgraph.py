"""The operator-level graph: what the retrace hands to lowering."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass

from torch import fx, nn

from ...source import Sourced


@dataclass(frozen=True)
class OpGraph:
    """A functional graph of operator overloads.

    module: placeholders `primals_1, primals_2, ...` (tensors only, in the order of the captured graph's), then
        `get_attr` for constants, `call_function` with an `OpOverload` or `operator.getitem` as target, and an output
        that is a flat tuple (tensors' nodes, None or Python scalars). No node mutates anything, except the trailing
        `aten.copy_.default(primals_k, value)` that write the final value of a mutated input back.
    Each node has meta['spec']: a `Spec`, for operators with several results a tuple of `Spec`s (None where the
    operator returns None), a Python value where it returns one; meta['line']: 'file:line' of the user's source, or
    ''; meta['ordered']: True where the operator draws random numbers or has an effect. No sample value stays alive.
    recorded: the graph before functionalization, each write one `aten.copy_`; None where nothing was written.
    """

    module: fx.GraphModule
    training: bool = False
    recorded: fx.Graph | None = None

    def __str__(self) -> str:
        return str(self.module.graph)


def runnable(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """An operator graph as a module. Overloads whose name is a word of Python (`aten.random.from`) are read by name."""
    if any(keyword.iskeyword(getattr(n.target, "_overloadname", "")) for n in graph.nodes):
        graph.on_generate_code(lambda _: _spelled)
    return Sourced(root, graph)


def _spelled(lines: list[str]) -> list[str]:
    words = "|".join(keyword.kwlist)
    return [re.sub(rf"(torch\.ops\.\w+\.\w+)\.({words})\(", r"getattr(\1, '\2')(", line) for line in lines]
