"""Gradients that a function accumulates while it is captured: `backward`, and what is read from and written to `grad`.

In: the recorder and the call.  Out: nodes that compute gradients, and `Recorder.grads`, what `grad` of a tensor is now.
Always: no `grad` of the caller changes during a capture; the recipe of the result writes it at each call. A gradient
is laid out and accumulated as autograd does it: a new tensor the first time, in place from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..key.sources import Attribute
from ..stax.loops.nodes import dense, row_major
from .history import nodes_of

if TYPE_CHECKING:
    from .recorder import Recorder

Tensor = torch.Tensor


def backward(
    recorder: Recorder, roots: Any, gradients: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
    inputs: Any = None,
) -> None:  # fmt: skip
    """Stands in for torch.autograd.backward."""
    if create_graph:
        recorder.refuse("accumulates gradients that can be differentiated again")
    roots, gradients = _listed(roots), _listed(gradients)
    with torch._C.DisableTorchFunction():
        found, passed = _leaves(recorder, roots)
        leaves = found if inputs is None else _listed(inputs)
        for leaf in leaves:
            _check(recorder, leaf)
    if not leaves:
        with recorder._aside():
            torch.autograd.backward(recorder._substitute(roots), gradients)  # raises what it raises
        return
    given = {"grad_outputs": gradients, "retain_graph": retain_graph, "allow_unused": True}
    grads = recorder.record(torch.autograd.grad, (roots, leaves), {k: v for k, v in given.items() if v is not None})
    if not retain_graph:
        recorder.spent |= passed
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        for leaf, gradient in zip(leaves, grads, strict=True):
            if gradient is not None:
                recorder.grads[id(leaf)] = (leaf, _accumulated(recorder, leaf, gradient))
    finally:
        torch._C._set_grad_enabled(before)


def read(recorder: Recorder, tensor: Tensor) -> Tensor | None:
    """What the function itself left in `grad`; NotImplemented where it did not touch it."""
    found = recorder.grads.get(id(tensor))
    return NotImplemented if found is None else found[1]


def write(recorder: Recorder, tensor: Tensor, value: Any) -> None:
    """Stands in for an assignment to `grad`."""
    with torch._C.DisableTorchFunction():
        probe = tensor.detach()
        probe.grad = value  # raises where the gradient does not fit
    if value is not None:
        recorder.node_of(value)
    recorder.grads[id(tensor)] = (tensor, value)


def written(recorder: Recorder) -> list[tuple[Any, Any]]:
    """(where the tensor is read from, what its `grad` has to be) for tensors that existed before the call."""
    found = []
    for tensor, value in recorder.grads.values():
        source = recorder.source_of_input(tensor) or recorder.reach.source_of(tensor)
        with torch._C.DisableTorchFunction():
            if source is not None and tensor.grad is not value:
                found.append((source, value))
    return found


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, Tensor) else value if value is None else list(value)


def _leaves(recorder: Recorder, roots: Sequence[Tensor]) -> tuple[list[Tensor], set[Any]]:
    """The leaves below the roots in the order in which they are met, as the caller's own tensors; the nodes passed."""
    before = {t.grad_fn for t in (*recorder.samples, *(copy for _, copy in recorder._stand_ins.values()))} - {None}
    found: dict[int, Tensor] = {}
    passed: set[Any] = set()
    for root in recorder._substitute(list(roots)):
        if root.grad_fn is None and root.requires_grad:
            found.setdefault(id(root), root)
        for node in nodes_of(root, passed):
            if node in before:
                recorder.refuse("differentiates a graph that existed before the call")
            if hasattr(node, "variable"):
                found.setdefault(id(node.variable), node.variable)
    return [recorder._original(t) for t in found.values()], passed


def _check(recorder: Recorder, leaf: Tensor) -> None:
    recorder.node_of(leaf)
    if not leaf.is_leaf:
        recorder.refuse("accumulates the gradient of a value that is no leaf")
    unhooked(recorder, [leaf], "accumulates the gradient of a tensor with hooks")
    if any(type(f.value).__name__ == "DistributedDataParallel" for f in recorder.reach.objects.values()):
        recorder.refuse("accumulates gradients that DistributedDataParallel exchanges behind autograd")


def unhooked(recorder: Recorder, inputs: Any, reason: str = "differentiates by a tensor with hooks") -> None:
    """Hooks on gradients are code that no graph holds; that tensors of the caller have none is in the key."""
    with torch._C.DisableTorchFunction():
        for tensor in [t for t in _listed(inputs) if isinstance(t, Tensor)]:
            source = recorder.source_of_input(tensor)
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                hooks = getattr(tensor, name)
                if hooks:
                    recorder.refuse(reason)
                if source is not None:
                    recorder.rows.append((Attribute(source, name), hooks))


def _accumulated(recorder: Recorder, leaf: Tensor, gradient: Tensor) -> Tensor:
    """What autograd makes of the gradient that is there and a new one."""
    old = recorder.gradient(leaf)
    if old is not None:
        if old.requires_grad:
            recorder.refuse("accumulates gradients that can be differentiated again")
        return recorder.record(Tensor.add_, (old, gradient), {})
    stride = leaf.stride() if dense(leaf.shape, leaf.stride()) else row_major(leaf.shape)
    if gradient.stride() == stride:  # a copy, since other rewrites may share the memory of gradients
        return recorder.record(torch.clone, (gradient,), {})
    options = {"dtype": gradient.dtype, "device": gradient.device}
    own = recorder.record(torch.empty_strided, (tuple(leaf.shape), stride), options)
    return recorder.record(Tensor.copy_, (own, gradient), {})
