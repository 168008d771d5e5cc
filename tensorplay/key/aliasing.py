"""Which tensors are the same object, and which share memory: q_i that no single argument's entry shows.

In: the arguments, or the tensors that a version reads.  Out: small comparable tuples, () in the ordinary case.
Always: a version built for distinct tensors serves only distinct ones; `ties` are pairs of places that held one
tensor while the version was built, so that it serves only calls where they still do.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType, MethodType
from typing import Any

import torch

from .signature import Entry, tensors
from .sources import Argument, Attribute, Cell, Item, Keyword, Root, Source

_FLAT = (torch.Tensor, torch.nn.Parameter)


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
    found, open_ = [], []
    for start, k in spans:
        open_ = [(end, j) for end, j in open_ if end > start]
        found += [(min(j, k), max(j, k)) for _, j in open_ if j in written or k in written]
        open_.append((start + sizes[k], k))
    return tuple(sorted(found))


def ties(
    fn: Any, args: tuple, kwargs: dict[str, Any], owners: Sequence[tuple[Source, torch.nn.Module]],
    inputs: Sequence[Source], values: Sequence[torch.Tensor],
) -> tuple[tuple[Source, Source], ...]:  # fmt: skip
    """Other places that hold a tensor of `values` just now, each beside the place that the version reads it from."""
    read_from = {id(t): (k, s) for k, (s, t) in enumerate(zip(inputs, values))}
    places: list[tuple[Source, Any]] = [(Argument(k), x) for k, x in enumerate(args)]
    places += [(Keyword(name), x) for name, x in kwargs.items()]
    for source, module in owners:
        for table in (module._parameters, module._buffers):
            places += [(Attribute(source, name), t) for name, t in table.items()]
    function = fn.__func__ if isinstance(fn, MethodType) else fn
    if isinstance(function, FunctionType):
        root, names = Root(function, function.__name__), function.__globals__
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            try:
                places.append((Cell(root, name), cell.cell_contents))
            except ValueError:  # an empty cell
                continue
        table = Root(names, "globals")
        places += [(Item(table, n), names[n]) for n in function.__code__.co_names if n in names]
    found = []
    for source, value in places:
        if isinstance(value, torch.Tensor) and id(value) in read_from:
            mine = read_from[id(value)][1]
            if str(mine) != str(source):
                found.append((source, mine))
    return tuple(found)
