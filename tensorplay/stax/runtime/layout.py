"""Layouts at call time: inputs must have the one that the code was compiled for, library results are brought to it.

In: tensors and the layouts of the plan.  Out: the same tensors, a copy, or a refusal.
Always: strides that address no element (of dimensions of size 1, of empty tensors) never matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...errors import CheckFailed
from ...native import fingerprint, native
from ..loops.nodes import Buffer
from ..schedule.plan import Plan


def settle(result: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """A library result in the layout that the plan was made for."""
    if result.shape != size:
        raise CheckFailed(None, 0)
    if same_layout(size, stride, result.stride()):
        return result
    return torch.empty_strided(size, stride, dtype=result.dtype, device=result.device).copy_(result)


def same_layout(size: tuple[int, ...], stride: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two strides of one size address the same elements."""
    return 0 in size or all(n == 1 or a == b for n, a, b in zip(size, stride, other, strict=True))


def checker(plan: Plan) -> Callable[[Sequence[torch.Tensor]], None]:
    """Refuses inputs that the code was not compiled for: native code would read wild memory."""
    rows = tuple((b.size, b.stride, b.dtype) for b in plan.loops.inputs)
    accepted: tuple[bytes, ...] | None = None  # fingerprints of inputs that need no second look

    def check(inputs: Sequence[torch.Tensor]) -> None:
        nonlocal accepted
        if accepted is not None and native.alike(inputs, accepted):
            return
        if len(inputs) != len(rows):
            raise TypeError(f"this program takes {len(rows)} inputs, not {len(inputs)}")
        for tensor, (size, stride, dtype) in zip(inputs, rows):
            if tensor.shape != size or tensor.stride() != stride or tensor.dtype is not dtype or not tensor.is_cpu:
                for b, given in zip(plan.loops.inputs, inputs):
                    refuse_other(b, given)
                break
        accepted = fingerprints(inputs)

    return check


def fingerprints(tensors: Sequence[torch.Tensor]) -> tuple[bytes, ...] | None:
    """The metadata of tensors as the extension compares it; None where it cannot."""
    found = [fingerprint(t) for t in tensors]
    return None if native is None or None in found else tuple(found)


def refuse_other(b: Buffer, tensor: torch.Tensor) -> None:
    """Raises unless the tensor addresses what the buffer does; strides may differ where nothing is addressed."""
    same = tensor.device == b.device and tensor.dtype == b.dtype and tuple(tensor.shape) == b.size
    if not same or not same_layout(b.size, b.stride, tensor.stride()):
        raise TypeError(
            f"input {b.name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tuple(tensor.stride())} on "
            f"{tensor.device}; this program was compiled for {b.dtype} {b.size} with strides {b.stride} on {b.device}"
        )
