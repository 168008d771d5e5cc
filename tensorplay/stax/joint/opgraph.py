"""The operator-level graph: what the retrace hands to lowering."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


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
