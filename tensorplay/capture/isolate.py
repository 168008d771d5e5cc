"""Copies of tensors that keep everything but the storage: size, stride, offset, dtype, aliasing among themselves.

In: tensors of the caller.  Out: stand-ins that may be written without the caller seeing it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .watch import storage_key


def isolate(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Stand-ins for strided tensors; two that shared a storage share one again."""
    storages: dict[int, torch.UntypedStorage] = {}
    found = []
    with torch._C.DisableTorchFunction():
        for t in tensors:
            key = storage_key(t)
            if key not in storages:
                storages[key] = t.untyped_storage().clone()
            found.append(_on(storages[key], t))
    return tuple(found)


def _on(storage: torch.UntypedStorage, t: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        copy = torch.empty(0, dtype=t.dtype, device=t.device)
        copy.set_(storage, t.storage_offset(), t.shape, t.stride())
        if t.is_conj():
            copy = torch._conj(copy)
        if t.is_neg():
            copy = torch._neg_view(copy)
    if t.requires_grad:
        if t.is_leaf:
            copy.requires_grad_()
        else:  # a value with a history: writing it is allowed where writing a leaf is not
            with torch.enable_grad():
                copy.mul_(torch.ones((), dtype=t.dtype, device=t.device, requires_grad=True))
    if isinstance(t, torch.nn.Parameter):
        copy = torch.nn.Parameter(copy.detach(), requires_grad=t.requires_grad)
    return copy
