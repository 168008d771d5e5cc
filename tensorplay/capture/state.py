"""The non-tensor values that a trace may have used as constants, each with the place it was read from.

In: what the function reaches, and the code that ran (None where that is not known).  Out: rows (source, value).
Always: scalars that the arguments' signature covers are left out; an attribute or a global counts only where code
that ran names it, a default or a closure cell only where its function ran, so that the state stays in proportion.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from ..key.sources import Attribute, Cell, Item, Size, Source, TypeOf
from .reach import Reach, code_names, is_installed_file


def state(reach: Reach, ran: set[types.CodeType] | None) -> tuple[tuple[Source, Any], ...]:
    """Rows in the order in which the walk met them."""
    names = reach.names if ran is None else set().union(*map(code_names, ran))
    rows: list[tuple[Source, Any]] = []
    for scalar in reach.scalars:
        if scalar.name and scalar.name not in names:
            continue
        if scalar.code is not None and ran is not None and scalar.code not in ran:
            continue
        if not _private(scalar.source):
            rows.append((scalar.source, scalar.value))
    for found in reach.objects.values():
        value, source = found.value, found.source
        if found.keyed or _private(source):
            continue
        named = not isinstance(source, Attribute) or source.name in names
        if isinstance(value, torch.nn.Module):
            if isinstance(source, (Attribute, Item)):
                rows.append((TypeOf(source), type(value)))
        elif isinstance(value, (list, dict, set, tuple)):
            if named and not isinstance(value, tuple):
                rows.append((Size(source), len(value)))
        elif isinstance(value, types.FunctionType):
            if named and _rebindable(source) and (ran is None or value.__code__ in ran):
                rows.append((source, value))
        elif isinstance(value, type) and isinstance(source, Cell):
            rows.append((source, value))
    return tuple(rows)


def ties(reach: Reach, ran: set[types.CodeType] | None) -> tuple[tuple[Source, Source], ...]:
    """Pairs of places that hold one tensor, module, container or object, where code that ran may have read the first
    of them: the trace knows the object by the second place alone."""
    names = reach.names if ran is None else set().union(*map(code_names, ran))
    return tuple(
        (twin.source, twin.first)
        for twin in reach.twins
        if (not twin.name or twin.name in names) and not _private(twin.source)
    )


def _private(source: Source) -> bool:
    """Whether the place is bookkeeping of torch.nn.Module, which only torch's own call path reads."""
    while isinstance(source, (Attribute, Item, Size)):
        if isinstance(source, Attribute) and source.name in _BOOKKEEPING:
            return True
        source = source.owner
    return False


_BOOKKEEPING = frozenset(torch.nn.Module().__dict__) - {"training"}


def _rebindable(source: Source) -> bool:
    """Whether the place of a function is the user's own: an attribute of an object, a closure cell, a global."""
    if isinstance(source, Cell):
        return True
    if isinstance(source, Attribute):
        return not isinstance(getattr(source.owner, "value", None), type)
    if isinstance(source, Item):
        namespace = getattr(source.owner, "value", None)
        return type(namespace) is dict and not is_installed_file(namespace.get("__file__") or "")
    return False
