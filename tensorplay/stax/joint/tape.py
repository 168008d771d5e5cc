"""Operators of a graph that differentiates inside: a whole training step, a gradient penalty (sections 3, 5.1).

In: a captured graph with calls of torch.autograd.grad, or that makes tensors require grad, and the tensors to run it on.
Out: an `OpGraph` in which the operators of backward stand where autograd ran them.
Always: as for `retrace`; a graph with a result that requires grad has a joint graph instead (None).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from ...errors import UnsupportedError
from .differentiate import TapeRecorder, check_inputs
from .functional import functionalize
from .numbers import gather
from .opgraph import OpGraph, runnable
from .retrace import Run, attempts, generators, grad_mode_kept, modes_kept, sweep


def taped(graph: fx.GraphModule, samples: Sequence[Tensor]) -> OpGraph | None:
    """The operators that the graph calls and that autograd calls for it; None where a result requires grad."""
    return attempts(_Taped, graph, samples)


class _Taped(Run):
    recorder_type = TapeRecorder
    recorder: TapeRecorder

    def result(self) -> OpGraph | None:  # type: ignore[override]
        recorder, graph = self.recorder, self.recorder.graph
        undoing = generators({t.device for t in self.samples})
        inputs = [t.requires_grad_(s.requires_grad) for t, s in zip(self.inputs, self.samples, strict=True)]
        self.inputs = inputs
        with modes_kept(), grad_mode_kept():
            self.bind_inputs()
            try:
                leaves = self.execute()
                check_inputs(inputs, self.samples)
                if any(isinstance(x, Tensor) and x.requires_grad and not any(x is t for t in inputs) for x in leaves):
                    if not any(t.requires_grad for t in inputs):
                        raise UnsupportedError("returns a tensor that it made require grad")
                    return None
                graph.output(tuple([recorder.load(x) for x in leaves]))
            finally:
                recorder.release()
                for undo in undoing:
                    undo()
        if recorder.written or any(isinstance(x, Tensor) and x.untyped_storage()._cdata in recorder.lifted for x in leaves):
            functionalize(graph)
        _unshare(graph)
        sweep(graph)
        gather(graph)
        return OpGraph(runnable(recorder.constants, graph))


def _unshare(graph: fx.Graph) -> None:
    """A copy of a value that nothing else reads is that value: autograd, too, takes a gradient that only it holds."""
    output = graph.output_node()
    for node in output.all_input_nodes:
        source = node.args[0] if node.target is torch.ops.aten.clone.default and len(node.args) == 1 else None
        if not isinstance(source, fx.Node) or node.kwargs or list(source.users) != [node]:
            continue
        made = source.op == "call_function" and isinstance(source.target, torch._ops.OpOverload) and not source.target.is_view
        if made and source.meta["spec"] == node.meta["spec"]:
            node.replace_all_uses_with(source)
