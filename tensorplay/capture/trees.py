"""Arguments and results of calls as trees: their tensors, their leaves, their metadata.

In: nested lists, tuples, dictionaries and slices.  Out: flat lists, or the same structure with leaves replaced.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import fx

from ..stax.loops.nodes import Spec

# what generated source can spell
LITERALS = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
     types.EllipsisType)
)  # fmt: skip


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a call's arguments or result, in containers two deep and more."""
    found: list[torch.Tensor] = []
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
    return found


def leaves(value: Any) -> list[Any]:
    found, stack = [], [value]
    while stack:
        item = stack.pop()
        if isinstance(item, (list, tuple)):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, slice):
            stack.extend((item.start, item.stop, item.step))
        else:
            found.append(item)
    return found


def holds_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return isinstance(value, (list, tuple)) and any(holds_tensor(v) for v in value)


def bake(value: Any, numbers: dict[fx.Node, Any]) -> Any:
    """The argument with numbers in place of the nodes that were read as numbers."""
    if isinstance(value, fx.Node):
        return numbers.get(value, value)
    if isinstance(value, (list, tuple)):
        return type(value)([bake(v, numbers) for v in value])
    if isinstance(value, dict):
        return {k: bake(v, numbers) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(bake(value.start, numbers), bake(value.stop, numbers), bake(value.step, numbers))
    return value


def spec(value: Any) -> Any:
    """Metadata that outlives the value."""
    if isinstance(value, torch.Tensor):
        return Spec.of(value) if value.layout is torch.strided and not value.is_nested else None
    if isinstance(value, (list, tuple)) and holds_tensor(value):
        return tuple(spec(v) if holds_tensor(v) else None for v in value)
    return None


def is_plain(value: Any) -> bool:
    """Whether a result is made of Python scalars only, and so can be a gate."""
    return all(type(v) in LITERALS for v in leaves(value))
