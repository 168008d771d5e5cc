"""Python effects: what a call changed in objects that existed before it.

In: the objects that the function reaches.  Out: the differences after the call, and a way back.
Always: `restore` leaves every watched object as the snapshot found it; an unchanged object is not touched.
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import pickle
import random
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from ..key.signature import module_of
from ..key.sources import Root, Source, element, elements
from .kinds import BUFFERS, hazard, is_followed, is_variable
from .reach import Found, Reach

_HEAP_TYPE = 1 << 9
_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class Kept:
    """One watched object: its elements at the time of the snapshot, how to read them again and how to put them back.

    part: what of the object at `source` the elements are, where a recipe can write them: `writes.PARTS`.
    """

    source: Source | str
    owner: Any
    content: Any
    read: Callable[[Any], Any]
    put: Callable[[Any, Any], None]
    part: str = ""

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

    def name(self, key: Any) -> str:
        """An element as the user would write it."""
        return f"{self.source}, {_named(key)}"

    def restore(self) -> None:
        if self.changed():
            self.put(self.owner, self.content)


def _is(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in (int, str, float, bytes) and a == b)


def _read_dict(owner: dict) -> dict:
    return {key: element(owner, key) for key in elements(owner)}


def _put_dict(owner: dict, content: dict) -> None:
    base = collections.OrderedDict if isinstance(owner, collections.OrderedDict) else dict
    base.clear(owner)
    for key, item in content.items():
        base.__setitem__(owner, key, item)


def _put_list(owner: Any, content: list) -> None:
    kind = list if isinstance(owner, list) else collections.deque
    kind.clear(owner)
    kind.extend(owner, content)


def _read_list(owner: Any) -> list:
    return [*elements(owner)]


def _read_set(owner: set) -> set:
    return {*elements(owner)}


def _put_set(owner: set, content: set) -> None:
    set.clear(owner)
    set.update(owner, content)


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


def _slots(value: Any) -> list[types.MemberDescriptorType]:
    return [
        member
        for cls in type(value).__mro__
        if cls.__flags__ & _HEAP_TYPE
        for member in cls.__dict__.values()
        if isinstance(member, types.MemberDescriptorType)
    ]


def _read_slots(value: Any) -> dict[Any, Any]:
    found = {}
    for member in _slots(value):
        with contextlib.suppress(AttributeError):
            found[member] = member.__get__(value)
    return found


def _put_slots(value: Any, content: dict[Any, Any]) -> None:
    for member in _slots(value):
        if member in content:
            member.__set__(value, content[member])
        else:
            with contextlib.suppress(AttributeError):
                member.__delete__(value)


def _read_class(cls: type) -> dict[str, Any]:
    return {name: item for name, item in cls.__dict__.items() if not name.startswith("__") and name != "_abc_impl"}


def _put_class(cls: type, content: dict[str, Any]) -> None:
    for name in _read_class(cls).keys() - content.keys():
        type.__delattr__(cls, name)
    for name, item in content.items():
        if cls.__dict__.get(name) is not item:
            type.__setattr__(cls, name, item)


def _put_buffer(owner: Any, content: dict[str, bytes]) -> None:
    if isinstance(owner, numpy.ndarray):
        owner[...] = numpy.frombuffer(content["content"], owner.dtype).reshape(owner.shape)
    elif isinstance(owner, array.array):
        owner[:] = array.array(owner.typecode, content["content"])
    else:
        owner[:] = content["content"]


def _put_variable(owner: Any, content: dict[str, Any]) -> None:
    value = content["value"]
    if value is _MISSING:  # its default, which an empty context shows
        value = None
        with contextlib.suppress(LookupError):
            value = contextvars.Context().run(owner.get)
    owner.set(value)


def _stateful(value: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]] | None:
    """How to read and put back the hidden state of a generator of random numbers."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return (lambda r: {"state": pickle.dumps(r.getstate())}), (lambda r, c: r.setstate(pickle.loads(c["state"])))
    bits = value.bit_generator if module_of(type(value)).startswith("numpy.random") and hasattr(value, "bit_generator") else value
    if module_of(type(bits)).startswith("numpy.random") and hasattr(bits, "state"):
        return (
            lambda g: {"state": pickle.dumps(getattr(g, "bit_generator", g).state)},
            lambda g, c: setattr(getattr(g, "bit_generator", g), "state", pickle.loads(c["state"])),
        )
    return None


class Snapshot:
    """The elements of everything mutable that the function reaches; `extend` adds what the walk found since."""

    def __init__(self, reach: Reach) -> None:
        self.reach = reach
        self.kept: list[Kept] = []
        self._objects = self._classes = self._tensors = 0
        self._globals: dict[int, dict[str, Any]] = {}
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []  # draws are repeated by the graph
        self.extend()

    def extend(self) -> None:
        reach = self.reach
        for found in list(reach.objects.values())[self._objects :]:
            self._keep(found)
        for cls in list(reach.classes)[self._classes :]:
            self.kept.append(Kept(cls.__qualname__, cls, _read_class(cls), _read_class, _put_class))
        for tensor, source in list(reach.tensors.values())[self._tensors :]:
            self.kept.append(Kept(source, tensor.__dict__, dict(tensor.__dict__), dict, _put_dict, "__dict__"))
        self._objects, self._classes, self._tensors = len(reach.objects), len(reach.classes), len(reach.tensors)
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            self._generators += [(g, g.get_state()) for g in reach.generators[len(self._generators) :]]
        for key, (namespace, names) in reach.globals.items():
            content = self._globals.get(key)
            if content is None:
                content = self._globals[key] = {}
                read, put = _names(content)
                name = f"globals of {namespace.get('__name__', '?')}"
                self.kept.append(Kept(Root(namespace, name), namespace, content, read, put, "items"))
            for name in names - content.keys():
                content[name] = namespace.get(name, _MISSING)

    def _keep(self, found: Found) -> None:
        value, source = found.value, found.source
        hidden = _stateful(value)
        if hidden is not None:
            self.kept.append(Kept(source, value, hidden[0](value), *hidden))
        elif isinstance(value, BUFFERS):
            if not hazard(value):
                self.kept.append(Kept(source, value, _read_buffer(value), _read_buffer, _put_buffer))
            return
        elif is_variable(value):
            self.kept.append(Kept(source, value, _read_variable(value), _read_variable, _put_variable))
        elif isinstance(value, dict):
            self.kept.append(Kept(source, value, _read_dict(value), _read_dict, _put_dict, "items"))
        elif isinstance(value, (list, collections.deque)):
            self.kept.append(Kept(source, value, _read_list(value), _read_list, _put_list, "items"))
        elif isinstance(value, set):
            self.kept.append(Kept(source, value, _read_set(value), _read_set, _put_set))
        elif isinstance(value, types.FunctionType):
            if value.__closure__:
                self.kept.append(Kept(source, value, _read_cells(value), _read_cells, _put_cells, "__closure__"))
        elif isinstance(value, type):
            return
        held = getattr(value, "__dict__", None)
        if type(held) is dict:
            self.kept.append(Kept(source, held, dict(held), dict, _put_dict, "__dict__"))
            if isinstance(value, torch.nn.Module):
                for table in _TABLES:
                    if held.get(table):
                        self.kept.append(Kept(source, held[table], dict(held[table]), dict, _put_dict, table))
        if is_followed(value) and _slots(value):
            self.kept.append(Kept(source, value, _read_slots(value), _read_slots, _put_slots))

    def differences(self) -> list[str]:
        """What is not as it was, as the user would write it."""
        return [kept.name(key) for kept in self.kept for key in kept.changed()]

    def restore(self) -> None:
        for kept in self.kept:
            kept.restore()

    def rewind(self) -> None:
        """Puts the generators of random numbers back, as they were before the run."""
        for generator, state in self._generators:
            generator.set_state(state)


_MISSING = object()


def _named(key: Any) -> str:
    return f"a {type(key).__name__}" if isinstance(key, torch.Tensor) else getattr(key, "__name__", None) or repr(key)


def _read_buffer(value: Any) -> dict[str, bytes]:
    return {"content": value.tobytes() if not isinstance(value, bytearray) else bytes(value)}


def _read_variable(value: Any) -> dict[str, Any]:
    return {"value": value.get(_MISSING)}


def _names(content: dict[str, Any]) -> tuple[Callable[[dict], dict], Callable[[dict, dict], None]]:
    """Reads and puts back the names in `content` of a dictionary of globals."""

    def read(namespace: dict) -> dict:
        return {name: namespace.get(name, _MISSING) for name in content}

    def put(namespace: dict, content: dict) -> None:
        for name, item in content.items():
            if item is not _MISSING:
                namespace[name] = item
            else:
                namespace.pop(name, None)

    return read, put
