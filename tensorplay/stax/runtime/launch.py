"""The step from Python into native code: pointers of tensors into a table, and the table to an entry.

In: an entry, a table, the slots to fill and their tensors.  Out: the entry's code (0, or 1 + the failed check).
Always: the interpreter's lock is free while the entry runs; the number of threads is torch's own.
With the extension `tensorplay._native` a launch is one C call; without it, ctypes does the same.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch

from ...native import native
from ..artifacts.build import Artifact

launch_native = None if native is None else native.launch  # without it a launch takes some microseconds more

Table = Any  # an address for the extension, a ctypes array without it
_FORKED = False


def _after_fork() -> None:
    global _FORKED
    _FORKED = True
    if native is not None:
        native.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def threads() -> int:
    """torch's number of threads; one in a forked child, where the parent's pool of threads is gone."""
    return 1 if _FORKED else torch.get_num_threads()


def array(slots: int) -> ctypes.Array:
    """A pointer table of null pointers."""
    return (ctypes.c_void_p * max(slots, 1))()


def table_of(pointers: ctypes.Array) -> Table:
    """What `launch` takes as a table."""
    return pointers if launch_native is None else ctypes.addressof(pointers)


def entry_of(artifact: Artifact, name: str) -> Any:
    """What `launch` takes as an entry."""
    return artifact.entries[name] if launch_native is None else artifact.address(name)


def launch_ctypes(entry: Any, table: Any, threads: int, slots: tuple[int, ...], *tensors: torch.Tensor) -> int:
    """Fills `table[slots[i]]` with the pointer of `tensors[i]` and calls the entry."""
    for slot, tensor in zip(slots, tensors, strict=True):
        table[slot] = tensor.data_ptr()
    return entry(table, threads)


def _empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


def _as_strided(t: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    return t.as_strided(size, stride, t.storage_offset() + offset)


# An uninitialized CPU tensor, and a view of one that nobody else sees, without a walk through the dispatcher: a third and
# two thirds of the time. Private names of torch.
empty_cpu: Callable[..., torch.Tensor] = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", _empty_strided)
view_cpu: Callable[..., torch.Tensor] = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", _as_strided)

launch: Callable[..., int] = launch_ctypes if launch_native is None else launch_native
