"""The back-end contract and its registry (section 1.2).

A back end is called as `backend(graph_module, example_inputs, **options)`, once for each specialization, and returns
a callable that takes the placeholders' tensors and returns the graph's outputs in the graph's own structure.
Python control flow never reaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

Backend = Callable[..., Callable[..., Any]]


def eager(graph: fx.GraphModule, example_inputs: Sequence[torch.Tensor], **options: Any) -> Callable[..., Any]:
    """Runs the captured graph as it is."""
    from .capture import ambient

    if not any(node.target in ambient.SETTERS for node in graph.graph.nodes):
        return graph.forward

    def run(*inputs: torch.Tensor) -> Any:
        before = ambient.ambient()
        try:
            return graph.forward(*inputs)
        finally:
            ambient.restore(before)

    return run


def aot_eager(graph: fx.GraphModule, example_inputs: Sequence[torch.Tensor], **options: Any) -> Callable[..., Any]:
    """Runs the functional operator-level graph on torch."""
    from .errors import CheckFailed
    from .stax.joint.retrace import retrace
    from .stax.joint.tape import taped
    from .stax.runtime.program import on_torch, views
    from .training import has_tape, trains

    ops = taped(graph, example_inputs) if has_tape(graph) else None
    if ops is None and trains(graph, example_inputs):
        from .stax.joint.function import on_torch as train_on_torch

        trained = train_on_torch(graph, example_inputs)
        if trained is not None:
            return trained
    if ops is None:
        ops = retrace(graph, example_inputs)

    class Operators:
        """The operator graph as a program."""

        def __init__(self) -> None:
            self.ops, self.views = ops, views(graph, ops)

        def __call__(self, *inputs: torch.Tensor) -> Any:
            state = torch.get_rng_state()
            try:
                with torch.no_grad(), torch.autocast("cpu", enabled=False):  # no result requires grad, and casts are recorded
                    results = list(self.ops.module(*inputs))
            except CheckFailed:  # nothing of the caller's is written yet
                torch.set_rng_state(state)
                return on_torch(graph, inputs)
            made: dict[Any, torch.Tensor] = {}  # the tensors that eager makes by a view are objects of their own
            for k, view in self.views.items():
                if view not in made:
                    made[view] = results[k].detach() if view.form else torch.ops.aten.alias.default(results[k])
                results[k] = made[view]
            return tuple(results)

        def run(self, level: str, inputs: Sequence[torch.Tensor]) -> Any:
            if level != "ops":
                raise ValueError(f"back end 'aot_eager' has no level {level!r}, only 'graph' and 'ops'")
            return self.ops.module(*inputs)

    return Operators()


def stax(graph: fx.GraphModule, example_inputs: Sequence[torch.Tensor], **options: Any) -> Callable[..., Any]:
    """The compiler: loops, schedule, native kernels."""
    from .stax.pipeline import stax

    return stax(graph, example_inputs, **options)


_BACKENDS: dict[str, Backend] = {"eager": eager, "aot_eager": aot_eager, "stax": stax}


def register_backend(name: str, backend: Backend | None = None) -> Any:
    """Makes `backend` available as `tp.compile(..., backend=name)`; without a back end, a decorator."""
    if backend is None:
        return lambda function: register_backend(name, function)
    if name in _BACKENDS and _BACKENDS[name] is not backend:
        raise ValueError(f"there is a back end {name!r} already; choose another name")
    if not callable(backend):
        raise TypeError(f"a back end is a callable (graph_module, example_inputs, **options), not {backend!r}")
    _BACKENDS[name] = backend
    return backend


def list_backends() -> list[str]:
    """The names that `tp.compile(..., backend=name)` takes."""
    return sorted(_BACKENDS)


def lookup(backend: str | Backend) -> Backend:
    """The back end of a name, or the callable itself."""
    if callable(backend):
        return backend
    if backend in _BACKENDS:
        return _BACKENDS[backend]
    raise ValueError(
        f"no back end {backend!r}: there are {', '.join(list_backends())}, and any callable (graph_module, example_inputs)"
    )


OPTIONS = ("cpu_isa", "decompose", "memory_budget", "numerics", "partition")


def check_options(backend: Backend, options: dict[str, Any]) -> None:
    """Refuses an option that none of our back ends knows; others take what they like."""
    unknown = [name for name in options if name not in OPTIONS]
    if unknown and backend in (eager, aot_eager, stax):
        raise ValueError(f"no option {', '.join(map(repr, unknown))}: there are {', '.join(OPTIONS)}")
