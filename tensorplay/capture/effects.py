"""Python effects: what a call changed in objects that existed before it.

In: the objects that the function reaches.  Out: the differences after the call, and a way back.
Always: `restore` leaves every watched object as the snapshot found it; an unchanged object is not touched.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..key.sources import Source
from .reach import Found, Reach

_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class Kept:
    """One watched object: its elements at the time of the snapshot, how to read them again and how to put them back."""

    source: Source | str
    owner: Any
    content: Any
    read: Callable[[Any], Any]
    put: Callable[[Any, Any], None]

    def changed(self) -> list[Any]:
        """The keys or positions whose element is another object now."""
        now, then = self.read(self.owner), self.content
        if isinstance(then, dict):
            if len(now) == len(then) and all(map(_is, now.values(), then.values())) and list(now) == list(then):
                return []
            missing = object()
            return [k for k in {**then, **now} if not _is(now.get(k, missing), then.get(k, missing))] or ["order"]
        if isinstance(then, set):
            return [] if now == then else list(now ^ then)
        if len(now) == len(then) and all(map(_is, now, then)):
            return []
        return [k for k in range(max(len(now), len(then))) if k >= min(len(now), len(then)) or not _is(now[k], then[k])]

    def restore(self) -> None:
        if self.changed():
            self.put(self.owner, self.content)


def _is(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in (int, str, float) and a == b)


def _read_dict(owner: dict) -> dict:
    return {key: item for key, item in dict.items(owner)}


def _put_dict(owner: dict, content: dict) -> None:
    base = collections.OrderedDict if isinstance(owner, collections.OrderedDict) else dict
    base.clear(owner)
    for key, item in content.items():
        base.__setitem__(owner, key, item)


def _put_list(owner: Any, content: list) -> None:
    owner.clear()
    owner.extend(content)


def _put_set(owner: set, content: set) -> None:
    owner.clear()
    owner.update(content)


def _read_cells(function: types.FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            found[name] = None
    return found


def _put_cells(function: types.FunctionType, content: dict[str, Any]) -> None:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        cell.cell_contents = content[name]


def _slots(value: Any) -> list[str]:
    names = []
    for cls in type(value).__mro__:
        for name, member in cls.__dict__.items():
            if isinstance(member, types.MemberDescriptorType) and cls.__module__ != "builtins":
                names.append(name)
    return names


def _read_slots(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}


def _put_slots(value: Any, content: dict[str, Any]) -> None:
    for name in _slots(value):
        if name in content:
            object.__setattr__(value, name, content[name])
        elif hasattr(value, name):
            object.__delattr__(value, name)


class Snapshot:
    """The elements of everything mutable that the function reaches."""

    def __init__(self, reach: Reach) -> None:
        self.kept: list[Kept] = []
        for found in reach.objects.values():
            self._keep(found)
        for namespace, names in reach.globals.values():
            read, put = _names(names)
            self.kept.append(Kept(f"globals of {namespace.get('__name__', '?')}", namespace, read(namespace), read, put))

    def _keep(self, found: Found) -> None:
        value, source = found.value, found.source
        if isinstance(value, dict):
            self.kept.append(Kept(source, value, _read_dict(value), _read_dict, _put_dict))
        elif isinstance(value, (list, collections.deque)):
            self.kept.append(Kept(source, value, list(value), list, _put_list))
        elif isinstance(value, set):
            self.kept.append(Kept(source, value, set(value), set, _put_set))
        elif isinstance(value, types.FunctionType):
            if value.__closure__:
                self.kept.append(Kept(source, value, _read_cells(value), _read_cells, _put_cells))
            return
        elif isinstance(value, type):
            return
        held = getattr(value, "__dict__", None)
        if type(held) is dict:
            self.kept.append(Kept(source, held, dict(held), dict, _put_dict))
            if isinstance(value, torch.nn.Module):
                for table in _TABLES:
                    if held.get(table):
                        self.kept.append(Kept(source, held[table], dict(held[table]), dict, _put_dict))
        elif getattr(type(value), "__slots__", None) is not None and _slots(value):
            self.kept.append(Kept(source, value, _read_slots(value), _read_slots, _put_slots))

    def differences(self) -> list[str]:
        """What is not as it was, as the user would write it."""
        return [f"{kept.source}, {key!r}" for kept in self.kept for key in kept.changed()]

    def restore(self) -> None:
        for kept in self.kept:
            kept.restore()


def _names(used: set[str]) -> tuple[Callable[[dict], dict], Callable[[dict, dict], None]]:
    """Reads and puts back these names of a dictionary of globals."""
    names = sorted(used)

    def read(namespace: dict) -> dict:
        return {name: namespace[name] for name in names if name in namespace}

    def put(namespace: dict, content: dict) -> None:
        for name in names:
            if name in content:
                namespace[name] = content[name]
            else:
                namespace.pop(name, None)

    return read, put
