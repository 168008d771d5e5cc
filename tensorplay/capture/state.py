"""The non-tensor values that a trace may have used as constants, each with the place it was read from.

In: what the function reaches, and what ran (None where that is not known).  Out: rows (source, value).
Always: what the arguments' signature covers is left out; a place counts only where something that ran may have read
it: code that names the attribute or global, the function of a default or a closure cell, or what holds the object.
"""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import torch

from ..key.signature import module_of
from ..key.sources import Attribute, Defined, Item, Keys, Members, Names, Size, Source, TypeOf, elements, size
from .kinds import BUFFERS, LRU, MAPPINGS, REFERENCES, code_names, is_followed, is_variable
from .reach import Found, Place, Reach

Row = tuple[Source, Any]
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)


class Seen:
    """What something that ran may have read.  `ran` is None where that is not known; `every` where names were computed."""

    def __init__(self, reach: Reach, ran: set[types.CodeType] | None, every: bool = False, more: set[str] | None = None) -> None:
        self.ran, self.every, self.opened = ran, every, reach.opened
        names = reach.names if ran is None else set().union(*map(code_names, ran))
        self.asked = more or set()  # names handed to getattr and its like
        self.names = names | reach.named | self.asked
        self._objects: dict[Found, bool] = {}

    def place(self, place: Place) -> bool:
        if place.code is not None and self.ran is not None and place.code not in self.ran:
            return False
        if place.name and place.name not in self.names and not (place.space in self.opened if place.space else self.every):
            return False
        return place.inside is None or self.object(place.inside)

    def object(self, found: Found) -> bool:
        """Whether one of an object's places may have been read; iterative, since objects nest deeply."""
        pending = [found]
        while pending:
            item = pending[-1]
            if self._objects.get(item):
                pending.pop()
                continue
            self._objects.setdefault(item, False)  # a cycle alone makes nothing seen
            answer, waiting = False, None
            for place in item.places:
                holder = place.inside
                if holder is None:
                    answer = self.place(place)
                elif holder not in self._objects:
                    waiting = holder
                    break
                else:
                    answer = self._objects[holder] and self.place(replace(place, inside=None))
                if answer:
                    break
            if waiting is not None:
                pending.append(waiting)
                continue
            self._objects[item] = answer
            pending.pop()
        return self._objects[found]


def state(reach: Reach, seen: Seen) -> tuple[Row, ...]:
    """Rows in the order in which the walk met them, each place once."""
    rows: dict[Source, Any] = {}
    for scalar in reach.scalars:
        if seen.place(scalar.place) and not _private(scalar.source):
            rows.setdefault(scalar.source, scalar.value)
    asked = [name for name in seen.asked if not hasattr(torch.Tensor, name)]
    for tensor, source in reach.tensors.values() if asked else ():
        if not isinstance(source, Attribute):
            rows |= {Defined(Attribute(source, "__dict__"), n): False for n in asked if n not in tensor.__dict__}
    classes: dict[type, None] = {}
    for found in reach.objects.values():
        if _private(found.source) or not seen.object(found):
            continue
        classes[type(found.value)] = None
        if isinstance(found.value, type):
            classes[found.value] = None
        if not found.keyed:
            for source, value in _shape(found.value, found.source):
                rows.setdefault(source, value)
    for base in dict.fromkeys(base for cls in classes for base in cls.__mro__ if base in reach.classes):
        rows[Members(reach.root_of(base))] = Members.of(base)  # a new one may hide, or answer, what was looked up
    return tuple(rows.items())


def _shape(value: Any, source: Source) -> list[Row]:
    """What of an object shows beside its elements: its class, its length, the names that it has."""
    if isinstance(value, torch.nn.Module):
        return _module(value, source)
    if isinstance(value, (types.FunctionType, type, types.MethodType, types.ModuleType)):
        return []
    if isinstance(value, (set, frozenset, *BUFFERS)):
        return [(source, value)]
    rows: list[Row] = [(TypeOf(source), type(value))]
    if isinstance(value, MAPPINGS):
        rows.append((Keys(source), (*elements(value),)))
    elif isinstance(value, (list, tuple)) or hasattr(type(value), "rotate"):
        rows.append((Size(source), size(value)))
    elif isinstance(value, LRU) or is_variable(value) or not (is_followed(value) or isinstance(value, REFERENCES)):
        return [(source, value)]
    if type(getattr(value, "__dict__", None)) is dict and is_followed(value):
        rows.append((Keys(Attribute(source, "__dict__")), tuple(value.__dict__)))
    return rows


def _module(module: torch.nn.Module, source: Source) -> list[Row]:
    rows: list[Row] = []
    if isinstance(source, (Attribute, Item)):
        rows.append((TypeOf(source), type(module)))
    if not module_of(type(module)).startswith("torch.") or isinstance(module, _CONTAINERS):
        rows.append((Names(source), Names(source).of(module)))
    return rows


def ties(reach: Reach, seen: Seen) -> tuple[tuple[Source, Source], ...]:
    """Pairs of places that hold one tensor, module, container or object, where code that ran may have read the first
    of them: the trace knows the object by the second place alone."""
    return tuple(
        (twin.source, twin.first) for twin in reach.twins if seen.place(twin.place) and not _private(twin.source)
    )


def _private(source: Source) -> bool:
    """Whether the place is bookkeeping of torch.nn.Module, which only torch's own call path reads."""
    while isinstance(source, (Attribute, Item, Size)):
        if isinstance(source, Attribute) and source.name in _BOOKKEEPING:
            return True
        source = source.owner
    return False


_BOOKKEEPING = frozenset(torch.nn.Module().__dict__) - {"training"}
