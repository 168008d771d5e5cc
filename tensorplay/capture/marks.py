"""Marks on functions and modules, and what a program may ask about compilation.

In: a function or module.  Out: the same, which a capture treats as the mark says; outside of captures nothing changes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..errors import UnsupportedError
from .running import capturing, recorder

F = TypeVar("F", bound=Callable[..., Any])
LEAVES: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # modules that stay one node
SUBSTITUTES: dict[Any, Any] = {}  # functions written in C -> what is captured in their place


def is_compiling() -> bool:
    """True only while a function of this thread is being captured."""
    return capturing()


def is_exporting() -> bool:
    """Always False: captured graphs are compiled, not exported."""
    return False


def is_dynamo_compiling() -> bool:
    """Always False: nothing here is traced by torch._dynamo."""
    return False


def allow_in_graph(fn: Any) -> Any:
    """Keeps a function as one node of the graph, which calls it; it takes and returns tensors. Of a list, each one.

    What the function computes is compiled with the rest; only capture does not look inside.
    """
    if isinstance(fn, (list, tuple)):
        return [allow_in_graph(f) for f in fn]
    return _whole(fn, "")


def disable(fn: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    """Runs a function, and whatever it calls, as it stands, also where a compiled function calls it: one node that
    calls it. `reason` stands beside that node. Without a function, a decorator."""
    if not recursive:
        raise UnsupportedError("disable(recursive=False): what a disabled function calls is not captured apart from it")
    if fn is None:
        return functools.partial(disable, reason=reason)
    return leaf(fn) if isinstance(fn, torch.nn.Module) else _whole(fn, reason or "")


def nonstrict_trace(fn: F) -> F:
    """Keeps a function as one node whose operators are compiled with the rest, whatever Python it is written in.

    Its result may be nested; what is no tensor in it is a constant of the captured graph.
    """

    @functools.wraps(fn)
    def traced(*args: Any, **kwargs: Any) -> Any:
        running = recorder()
        if running is None:
            return fn(*args, **kwargs)
        found: list[tuple[list[Any], Any]] = []

        @functools.wraps(fn)
        def flat(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
            found[:] = [pytree.tree_flatten(fn(*args, **kwargs))]
            return [leaf for leaf in found[0][0] if isinstance(leaf, torch.Tensor)]

        made = iter(running.opaque(flat, args, kwargs))
        leaves, tree = found.pop()
        return pytree.tree_unflatten([next(made) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tree)

    return traced  # type: ignore[return-value]


def _whole(fn: Any, reason: str) -> Any:
    if isinstance(fn, type) or not callable(fn):
        raise TypeError(f"a function or method is needed, not {fn!r}")

    @functools.wraps(fn)
    def opaque(*args: Any, **kwargs: Any) -> Any:
        running = recorder()
        return fn(*args, **kwargs) if running is None else running.opaque(fn, args, kwargs, reason)

    return opaque


def nested_compile_region(
    fn: Any = None, *, options: Any = None, max_reuse_entries: int = 8, reuse_hash_fn: Any = None
) -> Any:
    """Returns the function: kernels of equal text are built once, wherever they come from, without a mark.

    The arguments are those of `torch.compiler.nested_compile_region`, and say nothing that changes a result.
    """
    return nested_compile_region if fn is None else fn


def cudagraph_mark_step_begin() -> None:
    """Does nothing: results are never taken back, so that no step has to be marked."""


def substitute_in_graph(
    original_fn: Any, *, can_constant_fold_through: bool = False, skip_signature_check: bool = False
) -> Callable[[F], F]:
    """Captures the decorated function where `original_fn`, a function written in C, is called through its module.

    Needed only for a function that computes with tensors where capture cannot see it; everything else is captured as
    it runs. A function written in Python is never replaced, and what is constant is folded in any case.
    """
    if not callable(original_fn):
        raise TypeError(f"substitute_in_graph takes a function, not {original_fn!r}")

    def register(traceable: F) -> F:
        if not skip_signature_check:
            _check_signature(original_fn, traceable)
        if not isinstance(original_fn, types.FunctionType):
            SUBSTITUTES[original_fn] = traceable
        return traceable

    return register


def _check_signature(original: Any, traceable: Any) -> None:
    try:
        wanted = inspect.signature(original)
    except (TypeError, ValueError):  # C functions need not have one
        return
    shape = [[(p.name, p.kind) for p in inspect.signature(f).parameters.values()] for f in (original, traceable)]
    if shape[0] != shape[1]:
        raise TypeError(f"signature of {traceable.__qualname__} is not {wanted}, that of {original!r}; skip_signature_check=True allows it")


def assume_constant_result(fn: F) -> F:
    """Takes what a function returns while it is captured for a constant; what the function read is no part of the key."""

    @functools.wraps(fn)
    def constant(*args: Any, **kwargs: Any) -> Any:
        running = recorder()
        return fn(*args, **kwargs) if running is None else running.assumed(fn, args, kwargs)

    return constant  # type: ignore[return-value]


def leaf(module: torch.nn.Module) -> torch.nn.Module:
    """Keeps a module as one call_module node instead of entering it. Returns the module."""
    LEAVES.add(module)
    return module


class _Eager(TorchFunctionMode):
    """Under it compiled functions run as they stand, because something sees each operator."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def disable_capture() -> Iterator[None]:
    """Compiled functions that are called inside run eagerly."""
    with _Eager():
        yield
