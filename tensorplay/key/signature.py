"""The input signature sigma: what of the arguments' values is in the key (definition 2.2).

In: any Python value.  Out: an *entry*, a nested tuple of comparable leaves.
Always: two values with equal entries may serve the same version; every leaf compares by type and value (1, 1.0 and
True differ, 0.0 and -0.0 differ, NaN equals itself) or by the identity of a weakly held object, so that a reused id
never hits; an entry never keeps a tensor or an argument object alive.

    ('tensor', type, shape, dtype, device, requires_grad, stride, dispatch keys)
    ('value', type, value)                     None, bool, int, float, str, dtype, device, ...
    ('items', type, item, item, ...)           tuple, list, named tuple, set
    ('dict', type, (key, item), ...)           in the dictionary's own order
    ('object', type, identity, ('attribute', name, entry), ...)
"""

from __future__ import annotations

import array
import collections
import contextlib
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import struct
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Callable
from typing import Any

import torch

Entry = tuple
# immutable values of the standard library, which compare by value; their text tells 1.0 from 1.00
_VALUES = (
    fractions.Fraction, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta, uuid.UUID, pathlib.PurePath
)  # fmt: skip
_keys = torch._C._dispatch_keys


class Identity:
    """An object by identity, held weakly where its type allows: equal only to the same living object."""

    __slots__ = ("held", "number")

    def __init__(self, value: Any) -> None:
        self.number = id(value)
        try:
            self.held: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # without weak references the object is kept, so that its id cannot be reused
            self.held = lambda: value

    @property
    def alive(self) -> bool:
        return self.held() is not None

    def __eq__(self, other: object) -> bool:
        if type(other) is not Identity or self.number != other.number:
            return False
        mine = self.held()
        return mine is not None and mine is other.held()

    def __hash__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        value = self.held()
        return "<a deleted object>" if value is None else getattr(value, "__qualname__", f"<{type(value).__name__}>")


def tensor_entry(t: torch.Tensor) -> Entry:
    """Metadata of a tensor; the dispatch keys tell layouts, conjugate, negative and inference tensors apart."""
    try:
        if t.layout is torch.strided:
            return "tensor", type(t), t.shape, t.dtype, t.device, t.requires_grad, t.stride(), _keys(t)
        return "tensor", type(t), t.shape, t.dtype, t.device, t.requires_grad, t.layout, _keys(t)
    except (RuntimeError, NotImplementedError, ValueError):  # nested tensors and parameters without data have no shape
        return "tensor", type(t), (), t.dtype, t.device, t.requires_grad, None, Identity(t)


def _float_entry(x: float) -> Entry:
    if x and x == x:
        return "value", float, x
    return "value", float, repr(x) if x == x else "nan:" + struct.pack("<d", x).hex()


def _complex_entry(x: complex) -> Entry:
    return "value", complex, _float_entry(x.real)[2], _float_entry(x.imag)[2]


def _value_entry(x: Any) -> Entry:
    return "value", type(x), x


def _identity_entry(x: Any) -> Entry:
    return "object", type(x), Identity(x)


def _slice_entry(x: slice) -> Entry:
    return "items", slice, entry(x.start), entry(x.stop), entry(x.step)


_ENTRIES: dict[type, Callable[[Any], Entry]] = {
    torch.Tensor: tensor_entry,
    torch.nn.Parameter: tensor_entry,
    float: _float_entry,
    complex: _complex_entry,
    slice: _slice_entry,
    **dict.fromkeys(
        (types.NoneType, bool, int, str, bytes, range, types.EllipsisType, types.NotImplementedType, torch.dtype,
         torch.device, torch.layout, torch.memory_format),
        _value_entry,
    ),
    **dict.fromkeys(
        (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, torch.Generator), _identity_entry
    ),
}  # fmt: skip


def entry(x: Any) -> Entry:
    """The entry of one value."""
    make = _ENTRIES.get(type(x))
    return make(x) if make is not None else _entry(x, {})


def _entry(x: Any, seen: dict[int, int]) -> Entry:
    """The entry of a container or object; `seen` numbers those met before, so that sharing shows and cycles end."""
    kind = type(x)
    make = _ENTRIES.get(kind)
    if make is not None:
        return make(x)
    if isinstance(x, torch.Tensor):
        return tensor_entry(x)
    if id(x) in seen:
        return "seen", kind, seen[id(x)]
    seen[id(x)] = len(seen)
    if isinstance(x, (tuple, list, collections.deque)):
        return ("items", kind, *[_entry(v, seen) for v in x], *_attributes(x, seen))
    if isinstance(x, (dict, types.MappingProxyType)):
        pairs = [(_entry(k, seen), _entry(v, seen)) for k, v in x.items()]
        return ("dict", kind, *pairs, *_attributes(x, seen))
    if isinstance(x, (set, frozenset)):
        return ("items", kind, *[_entry(v, seen) for v in x], *_attributes(x, seen))
    if isinstance(x, (enum.Enum, type, torch.nn.Module)):  # what the trace reads of a module has sources of its own
        return _identity_entry(x)
    if isinstance(x, (bytearray, memoryview)):
        return "value", kind, bytes(x)
    if isinstance(x, array.array):
        return "value", kind, x.typecode, x.tobytes()
    if isinstance(x, _VALUES):
        return "value", kind, x, repr(x)
    if isinstance(x, int):
        return "value", kind, int.__index__(x)
    if isinstance(x, (str, bytes)):
        return "value", kind, str.__str__(x) if isinstance(x, str) else bytes(x)
    if isinstance(x, float):
        return "value", kind, _float_entry(float(x))[2]
    if module_of(kind) == "numpy" and hasattr(x, "tobytes"):
        if x.dtype.hasobject:
            return ("items", kind, x.shape, *[_entry(v, seen) for v in x.ravel()])
        return "value", kind, str(x.dtype), x.shape, x.tobytes()
    if isinstance(x, types.MethodType):
        return "object", kind, Identity(x.__func__), Identity(x.__self__)
    return ("object", kind, Identity(x), *_attributes(x, seen))


def _attributes(x: Any, seen: dict[int, int]) -> list[Entry]:
    """The attributes of an object of the program, or of a plain Python class of a library."""
    cls: Any = type(x)
    slots = _slots(cls)
    if slots is None:
        return []
    held = getattr(x, "__dict__", None) or {}
    found = [("attribute", name, _entry(v, seen)) for name, v in list(held.items())]
    return found + [("attribute", name, _entry(getattr(x, name), seen)) for name in slots if hasattr(x, name)]


def attributes(x: Any) -> dict[str, Any] | None:
    """The dictionary that holds all that the entry of an object says beside its identity; None for other values."""
    e = _entry(x, {})
    held = getattr(x, "__dict__", None)
    if e[0] != "object" or type(held) is not dict or _slots(type(x)) != () or type(e[2]) is not Identity:
        return None
    own = [base.__dict__["__dict__"] for base in type(x).__mro__ if "__dict__" in base.__dict__]
    weak = type(e[2].held) is weakref.ref
    return held if weak and all(isinstance(member, types.GetSetDescriptorType) for member in own) else None


def module_of(cls: type) -> str:
    """The module that a class names; '' where its `__module__` is a descriptor that serves its instances."""
    name: Any = cls.__module__
    return name if isinstance(name, str) else ""


@functools.lru_cache(maxsize=4096)
def followed(cls: type) -> bool:
    """Whether the attributes of an object of this class are read: those of the program's own classes, and those of
    Python classes of libraries that hold values, not machinery such as locks and loggers."""
    parts = module_of(cls).split(".")
    if parts[0] not in _LIBRARIES or cls in _HOLDING:
        return True
    if parts[0] in _MACHINERY or any(part.startswith("_") for part in parts if part != "__main__"):
        return module_of(cls) in _HOLDERS
    return parts[0] not in ("numpy", "builtins")


@functools.lru_cache(maxsize=4096)
def _slots(cls: type) -> tuple[str, ...] | None:
    """The slots of a class whose objects are read; None for others."""
    if not followed(cls):
        return None
    return tuple(
        name
        for base in cls.__mro__
        for name, member in base.__dict__.items()
        if isinstance(member, types.MemberDescriptorType) and base.__flags__ & (1 << 9)
    )


_MACHINERY = frozenset(
    ("tensorplay", "logging", "asyncio", "multiprocessing", "importlib", "unittest", "socket", "subprocess", "io", "typing",
     "abc", "ast", "contextlib", "warnings", "traceback", "selectors", "tempfile", "re", "random", "zoneinfo", "zipfile", "tarfile",
     "email", "http", "urllib", "ssl")
)  # fmt: skip
_HOLDING = (threading.local, contextlib.nullcontext, contextlib.closing, contextlib.ExitStack)
_HOLDERS = frozenset(("collections", "_collections_abc", "_weakrefset", "concurrent.futures._base"))
_LIBRARIES = frozenset(("torch", "numpy", "tensorplay", "builtins", *sys.stdlib_module_names)) - {"__main__"}


def opaque(x: Any) -> bool:
    """Whether the entry of an object is its identity alone, whatever happens to its attributes."""
    return type(x) in _ENTRIES or isinstance(x, (enum.Enum, type, torch.nn.Module)) or _slots(type(x)) is None


def signature(args: tuple, kwargs: dict[str, Any]) -> Entry:
    """sigma: the entries of the positional arguments, then ('keyword', name, entry) for the others."""
    seen: dict[int, int] = {}
    out = []
    for x in args:
        make = _ENTRIES.get(type(x))
        out.append(make(x) if make is not None else _entry(x, seen))
    if not kwargs:
        return tuple(out), ()
    return tuple(out), tuple([("keyword", name, _entry(x, seen)) for name, x in kwargs.items()])


def identities(x: Any) -> list[Identity]:
    """The weakly held objects of an entry."""
    found, stack = [], [x]
    while stack:
        item = stack.pop()
        if type(item) is Identity:
            found.append(item)
        elif isinstance(item, tuple):
            stack.extend(item)
    return found


def tensors(x: Any) -> list[torch.Tensor]:
    """The tensors that an argument structure holds, in the order of its entry."""
    found: list[torch.Tensor] = []
    stack, seen = [x], set()
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif type(item) not in _ENTRIES and id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, (tuple, list, collections.deque)):
                stack.extend(reversed(item))
            elif isinstance(item, dict):
                stack.extend(reversed(list(item.values())))
    return found


def plain(value: Any) -> bool:
    """Whether `value is expected` already proves equal entries: immutable scalars."""
    return value is None or type(value) in (bool, int, str, float, torch.dtype, torch.device)


def show(leaf: Any) -> str:
    """A leaf of an entry as a person reads it."""
    if isinstance(leaf, type):
        return leaf.__name__
    if isinstance(leaf, torch.Size):
        return str(tuple(leaf))
    if isinstance(leaf, str) and (leaf in ("0.0", "-0.0") or leaf.startswith("nan:")):
        return leaf.split(":")[0]
    return repr(leaf)
