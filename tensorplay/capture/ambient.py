"""Modes of execution that a function switches while it runs: grad mode, autocast, default dtype.

In: the state of this thread.  Out: a tuple, and the calls that turn one tuple into another.
Always: the calls are ordinary functions with plain arguments, so that they can stand in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_DEVICES = ("cpu", "cuda")


def ambient() -> tuple:
    """(grad mode, default dtype, autocast of each device)."""
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        *[(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES],
    )


def set_autocast(device: str, enabled: bool, dtype: torch.dtype) -> None:
    """Switches autocast for one kind of device."""
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    torch.clear_autocast_cache()


def changes(before: tuple, after: tuple) -> list[tuple[Callable, tuple[Any, ...]]]:
    """The calls that lead from one state to another."""
    calls: list[tuple[Callable, tuple[Any, ...]]] = []
    if before[0] != after[0]:
        calls.append((torch._C._set_grad_enabled, (after[0],)))
    if before[1] != after[1]:
        calls.append((torch.set_default_dtype, (after[1],)))
    for device, old, new in zip(_DEVICES, before[2:], after[2:]):
        if old != new:
            calls.append((set_autocast, (device, *new)))
    return calls


SETTERS = frozenset((torch._C._set_grad_enabled, torch.set_default_dtype, set_autocast))


def restore(state: tuple) -> None:
    """Puts the state back."""
    for call, args in changes(ambient(), state):
        call(*args)
