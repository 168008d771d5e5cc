"""Marks on functions and modules, and what a program may ask about compilation.

In: a function or module.  Out: the same, which a capture treats as the mark says; outside of captures nothing changes.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from .running import capturing, recorder

F = TypeVar("F", bound=Callable[..., Any])
LEAVES: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # modules that stay one node


def is_compiling() -> bool:
    """True only while a function of this thread is being captured."""
    return capturing()


def is_exporting() -> bool:
    """Always False: captured graphs are compiled, not exported."""
    return False


def allow_in_graph(fn: F) -> F:
    """Keeps a function as one node of the graph, which calls it; it takes and returns tensors."""

    @functools.wraps(fn)
    def opaque(*args: Any, **kwargs: Any) -> Any:
        running = recorder()
        return fn(*args, **kwargs) if running is None else running.opaque(fn, args, kwargs)

    return opaque  # type: ignore[return-value]


def disable(fn: F) -> F:
    """Runs a function as it stands, also where a compiled function calls it: one node that calls it."""
    return allow_in_graph(fn)


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
