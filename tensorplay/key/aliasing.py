"""Which tensors are the same object, and which share memory: q_i that no single argument's entry shows.

In: the arguments, or the tensors that a version reads.  Out: small comparable tuples, () in the ordinary case.
Always: a version built for distinct tensors serves only distinct ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .signature import Entry, tensors


def same_objects(args: tuple, kwargs: dict[str, Any], sigma: Entry) -> tuple[int, ...]:
    """The first position of each argument tensor among the argument tensors; () where all are distinct."""
    if not kwargs:
        found = [id(x) for x, e in zip(args, sigma[0]) if e[0] == "tensor"]
        if all(e[0] in ("tensor", "value") for e in sigma[0]):
            return _pattern(found)
    return _pattern([id(t) for t in tensors((args, kwargs))])


def _pattern(ids: list[int]) -> tuple[int, ...]:
    if len(ids) < 2 or len(set(ids)) == len(ids):
        return ()
    first: dict[int, int] = {}
    return tuple(first.setdefault(i, k) for k, i in enumerate(ids))


def extents(inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Bytes from a tensor's pointer to the end of its last element: a function of its entry alone."""
    return tuple(
        (sum((n - 1) * s for n, s in zip(t.shape, t.stride())) + 1) * t.element_size()
        if t.layout is torch.strided and t.numel()
        else 0
        for t in inputs
    )


def overlaps(inputs: Sequence[torch.Tensor], sizes: Sequence[int], written: frozenset[int]) -> tuple[tuple[int, int], ...]:
    """Pairs of inputs of which one is written and whose memory ranges meet."""
    spans = sorted([(t.data_ptr(), k) for k, t in enumerate(inputs) if sizes[k]])
    found: list[tuple[int, int]] = []
    begun: list[tuple[int, int]] = []  # (end, input) of the ranges that reach beyond `start`
    for start, k in spans:
        begun = [(end, j) for end, j in begun if end > start]
        found += [(min(j, k), max(j, k)) for _, j in begun if j in written or k in written]
        begun.append((start + sizes[k], k))
    return tuple(sorted(found))
