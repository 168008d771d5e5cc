"""The type and layout of what a new node computes, without computing it.

In: an operator and arguments in which nodes with meta['spec'] stand for tensors.  Out: a `Spec`, or `Unknown` raised.
Always: what torch gives. The type is that of the operator run on one element; the size and strides follow from the
rule of pointwise operators, and other operators are known on contiguous tensors only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..stax.loops.nodes import Spec, row_major
from .rules import POINTWISE

ROW_MAJOR = frozenset(("masked_fill", "log_sigmoid", "logsigmoid"))  # contiguous, whatever they take
REDUCTIONS = frozenset(("sum", "amax", "mean"))  # called as (tensor, dim, True)


class Unknown(Exception):
    """The layout depends on more than is known here."""


def computed(name: str, target: Any, args: tuple, kwargs: dict[str, Any]) -> Spec:
    """The layout of one call; `target` is a callable, or the name of a method."""
    specs = [n.meta.get("spec") for n in _nodes(args, kwargs)]
    if not specs or not all(isinstance(s, Spec) for s in specs):
        raise Unknown
    first = specs[0]
    number = not isinstance(next(iter((*args, *kwargs.values()))), fx.Node)
    if name in ROW_MAJOR or (number and name in ("pow", "float_power")):
        size = _broadcast([s.size for s in specs])
        return Spec(size, row_major(size), _dtype(target, args, kwargs), first.device)
    if name in POINTWISE:
        size = _broadcast([s.size for s in specs])
        specs = specs[::-1] if name == "rsub" else specs
        full = [s for s in specs if s.size == size]
        lead = next((s for s in specs if len(s.size)), first)
        if not full or (lead is not full[0]) or not all(map(_settled, specs if 1 in size else full[:1])):
            raise Unknown
        dtype = _dtype(target, args, kwargs)
        return Spec(size, lead.stride, dtype, lead.device)
    if not contiguous(first):
        raise Unknown
    if name == "reshape":
        size = _resized(first.numel, args[1:])
    elif name in REDUCTIONS:
        at = args[1] % len(first.size)
        size = (*first.size[:at], 1, *first.size[at + 1 :])
    else:
        raise Unknown
    return Spec(size, row_major(size), first.dtype, first.device)


def _broadcast(sizes: list[tuple[int, ...]]) -> tuple[int, ...]:
    rank = max(map(len, sizes))
    padded = [(1,) * (rank - len(size)) + size for size in sizes]
    return tuple([next((n for n in dims if n != 1), 1) for dims in zip(*padded, strict=True)])


def _nodes(args: tuple, kwargs: dict[str, Any]) -> list[fx.Node]:
    return [a for a in (*args, *kwargs.values()) if isinstance(a, fx.Node)]


def _dtype(target: Any, args: tuple, kwargs: dict[str, Any]) -> torch.dtype:
    def one(node: fx.Node) -> torch.Tensor:
        spec = node.meta["spec"]
        return torch.ones((1,) * len(spec.size), dtype=spec.dtype)

    args, kwargs = fx.map_arg((args, kwargs), one)
    return (getattr(args[0], target)(*args[1:], **kwargs) if isinstance(target, str) else target(*args, **kwargs)).dtype


def _resized(numel: int, shape: tuple[Any, ...]) -> tuple[int, ...]:
    size = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
    if -1 in size:
        at, known = size.index(-1), 1
        for n in size[:at] + size[at + 1 :]:
            known *= n
        size[at] = numel // known
    return tuple(size)


def contiguous(spec: Spec) -> bool:
    return spec.numel == 0 or all(
        n == 1 or a == b for n, a, b in zip(spec.size, spec.stride, row_major(spec.size), strict=True)
    )


def _settled(spec: Spec) -> bool:
    """Whether a pointwise operator keeps the strides: the elements fill a block of memory, in some order of the
    dimensions. Where one has size 1 its stride counts in that order, so that only contiguous tensors are known."""
    if 1 in spec.size:
        return 0 not in spec.size and spec.stride == row_major(spec.size)
    step = 1
    for stride, n in sorted((st, n) for n, st in zip(spec.size, spec.stride, strict=True) if n != 1):
        if stride != step:
            return False
        step *= n
    return 0 not in spec.size
