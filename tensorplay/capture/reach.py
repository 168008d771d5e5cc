"""What a function can reach: its arguments, module tree, closures, globals, and the objects that hang on them.

In: the function and the arguments of one call.  Out: `Reach`: for every tensor, container and object the `Source`
that reads it anew at each call, and the scalars found on the way.
Always: nothing is called and no property runs; only what a name in reachable code could name is followed from
globals and classes; library code (torch, numpy, the standard library) is not entered, except for the names that the
methods of torch's modules use.
"""

from __future__ import annotations

import collections
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from ..key.sources import Argument, Attribute, Cell, Item, Keyword, Root, Source

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_LIBRARIES = frozenset(("torch", "numpy", "tensorplay", "builtins", *sys.stdlib_module_names)) - {"__main__"}

SCALARS = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
)
_OPAQUE = (
    types.BuiltinFunctionType, types.MethodWrapperType, types.CodeType, types.FrameType, types.GeneratorType,
    types.MappingProxyType, torch.Generator, numpy.generic, range, slice,
)  # fmt: skip
_FUNCTIONS = (types.FunctionType, types.MethodType, staticmethod, classmethod, property, functools.cached_property)
_SHARED = (type, types.FunctionType, types.MethodType, types.ModuleType)  # many places hold them; state has its own rows
_LIMIT = 100_000  # objects followed; beyond it the program is refused rather than half seen


def is_library_file(filename: str) -> bool:
    """Whether a source file belongs to torch, to the standard library, or to this package."""
    if filename.startswith(_TORCH) or filename.startswith(_OURS) or filename.startswith("<frozen"):
        return True
    return filename.startswith(_STDLIB) and not any(part in filename for part in _SITE)


def is_installed_file(filename: str) -> bool:
    """Whether a source file lies among installed packages, so that its global scalars are no state of the program."""
    return any(part in filename for part in _SITE) or is_library_file(filename)


@functools.lru_cache(maxsize=4096)
def is_installed_class(cls: type) -> bool:
    """Whether a class belongs to an installed package."""
    return is_installed_file(getattr(sys.modules.get(cls.__module__), "__file__", None) or "")


def _is_library_class(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in _LIBRARIES


@functools.lru_cache(maxsize=4096)
def code_names(code: types.CodeType) -> frozenset[str]:
    """Every name that a code object, or code nested in it, may look up; strings count, because of getattr."""
    names: set[str] = set()
    pending = [code]
    while pending:
        item = pending.pop()
        names.update(item.co_names)
        for constant in item.co_consts:
            if isinstance(constant, types.CodeType):
                pending.append(constant)
            elif type(constant) is str and constant.isidentifier():
                names.add(constant)
    return frozenset(names)


@dataclass(frozen=True)
class Scalar:
    """A scalar that was found: where, its value, and what must have run to see it: a code that names `name`, or `code`."""

    source: Source
    value: Any
    name: str
    code: types.CodeType | None


@dataclass(frozen=True)
class Twin:
    """A second place that holds an object which the walk had met before, and the first place."""

    source: Source
    first: Source
    name: str


@dataclass(frozen=True)
class Found:
    """An object on the walk: what it is and where it is read.

    `keyed`: its scalars are no state, because the arguments' signature covers them or a package owns them.
    """

    value: Any
    source: Source
    keyed: bool


class TooMuch(Exception):
    """The function reaches more objects than capture follows."""


class Reach:
    """The walk and what it found.  `tensors` and `objects` map identities; the objects are kept alive meanwhile."""

    def __init__(self, fn: Any, args: tuple, kwargs: dict) -> None:
        self.tensors: dict[int, tuple[torch.Tensor, Source]] = {}
        self.objects: dict[int, Found] = {}
        self.scalars: list[Scalar] = []
        self.twins: list[Twin] = []
        self.names: set[str] = {"forward", "__call__"}
        self.globals: dict[int, tuple[dict, set[str]]] = {}  # the dictionaries of globals and the names used from them
        self._waiting: dict[str, list[tuple[Any, Source]]] = {}
        self._classes: set[type] = set()
        self._codes: set[types.CodeType] = set()
        self._queue: collections.deque[Found] = collections.deque()
        self.root = Root(fn, getattr(fn, "__name__", type(fn).__name__))
        for k, value in enumerate(args):
            self._push(value, Argument(k), "", True)
        for name, value in kwargs.items():
            self._push(value, Keyword(name), "", True)
        self._push(fn, self.root, "", False)
        self._run()

    def source_of(self, value: Any) -> Source | None:
        """Where an object that existed before the call is read from."""
        if isinstance(value, torch.Tensor):
            entry = self.tensors.get(id(value))
            return entry[1] if entry is not None and entry[0] is value else None
        found = self.objects.get(id(value))
        return found.source if found is not None and found.value is value else None

    def add_code(self, code: types.CodeType, namespace: dict) -> None:
        """Follows code that was seen running, which the walk had not found."""
        if code not in self._codes:
            self._code(code, namespace)
            self._run()

    # ---- the walk ------------------------------------------------------------------------------------------------

    def _push(self, value: Any, source: Source, name: str, keyed: bool, code: types.CodeType | None = None) -> None:
        kind = type(value)
        if kind in SCALARS:
            if not keyed:
                self.scalars.append(Scalar(source, value, name, code))
        elif isinstance(value, torch.Tensor):
            first = self.tensors.setdefault(id(value), (value, source))[1]
            if first is not source:
                self.twins.append(Twin(source, first, name))
        elif id(value) in self.objects and not keyed and not isinstance(value, _SHARED):
            self.twins.append(Twin(source, self.objects[id(value)].source, name))
        elif id(value) not in self.objects and not isinstance(value, _OPAQUE):
            self.objects[id(value)] = found = Found(value, source, keyed)
            self._queue.append(found)

    def _run(self) -> None:
        while self._queue:
            found = self._queue.popleft()
            if len(self.objects) > _LIMIT:
                raise TooMuch(f"the function reaches more than {_LIMIT} objects, last {found.source}")
            self._expand(found)

    def _expand(self, found: Found) -> None:
        value, source, keyed = found.value, found.source, found.keyed
        if isinstance(value, torch.nn.Module):
            self._module(value, source)
        elif isinstance(value, types.FunctionType):
            self._function(value, source)
        elif isinstance(value, types.MethodType):
            self._push(value.__self__, Attribute(source, "__self__"), "", keyed)
            self._push(value.__func__, Attribute(source, "__func__"), "", False)
        elif isinstance(value, functools.partial):
            for name in ("func", "args", "keywords"):
                self._push(getattr(value, name), Attribute(source, name), "", False)
        elif isinstance(value, dict):
            for key, item in list(dict.items(value)):
                self._push(item, Item(source, key), "", keyed)
            self._attributes(value, source, keyed)
        elif isinstance(value, (list, tuple, collections.deque)):
            for k, item in enumerate(value):
                self._push(item, Item(source, k), "", keyed)
            if type(value) not in (list, tuple):
                self._attributes(value, source, keyed)
        elif isinstance(value, type):
            self._class(value, source, constructed=True)
        elif not isinstance(value, types.ModuleType) and not _is_library_class(type(value)):
            self._attributes(value, source, keyed)

    def _module(self, module: torch.nn.Module, source: Source) -> None:
        held = module.__dict__
        for table in ("_parameters", "_buffers", "_modules"):
            for name, item in held.get(table, {}).items():
                if item is not None:
                    self._push(item, Attribute(source, name), "", False)
        for name, item in list(held.items()):
            if name not in ("_parameters", "_buffers", "_modules"):
                self._push(item, Attribute(source, name), name, False)
        self._class(type(module), source, constructed=False)

    def _attributes(self, value: Any, source: Source, keyed: bool) -> None:
        held = getattr(value, "__dict__", None)
        if type(held) is dict:
            for name, item in list(held.items()):
                self._push(item, Attribute(source, name), name, keyed)
        for cls in type(value).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                member = cls.__dict__.get(name)
                if isinstance(member, types.MemberDescriptorType) and hasattr(value, name):
                    self._push(getattr(value, name), Attribute(source, name), name, keyed)
        self._class(type(value), source, constructed=False)

    def _class(self, cls: type, source: Source, constructed: bool) -> None:
        """Registers the functions of a class; each is entered once some code names it."""
        if cls in self._classes:
            return
        self._classes.add(cls)
        for base in cls.__mro__:
            library = _is_library_class(base)
            if base is torch.nn.Module or (library and not issubclass(base, torch.nn.Module)):
                continue
            owner = Root(base, base.__qualname__)
            for name, member in list(base.__dict__.items()):
                if isinstance(member, _FUNCTIONS):
                    dunder = name.startswith("__") and name.endswith("__") and not library
                    if name in self.names or (dunder and (constructed or name not in ("__init__", "__new__"))):
                        self._member(member, owner, name)
                    else:
                        self._waiting.setdefault(name, []).append((member, owner))
                elif library or name.startswith("__"):
                    continue
                elif isinstance(member, torch.Tensor) or not is_installed_class(base):
                    self._push(member, Attribute(owner, name), name, False)

    def _member(self, member: Any, owner: Source, name: str) -> None:
        source: Source = Attribute(owner, name)
        if isinstance(member, property):
            if member.fget is not None:
                self._push(member.fget, Attribute(source, "fget"), "", False)
        elif isinstance(member, functools.cached_property):
            self._push(member.func, Attribute(source, "func"), "", False)
        elif isinstance(member, classmethod):
            self._push(member.__func__, Attribute(source, "__func__"), "", False)
        elif isinstance(member, staticmethod):
            self._push(member.__func__, source, "", False)
        elif isinstance(member, types.FunctionType):
            self._push(member, source, "", False)

    def _function(self, function: types.FunctionType, source: Source) -> None:
        code = function.__code__
        self._code(code, function.__globals__)
        if is_library_file(code.co_filename):
            return
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            try:
                value = cell.cell_contents
            except ValueError:  # not yet assigned
                continue
            self._push(value, Cell(source, name), "", False, code)
        if is_installed_file(code.co_filename):
            return
        for k, value in enumerate(function.__defaults__ or ()):
            self._push(value, Item(Attribute(source, "__defaults__"), k), "", False, code)
        for name, value in (function.__kwdefaults__ or {}).items():
            self._push(value, Item(Attribute(source, "__kwdefaults__"), name), "", False, code)
        for name, value in function.__dict__.items():
            self._push(value, Attribute(source, name), name, False)

    def _code(self, code: types.CodeType, namespace: dict) -> None:
        if code in self._codes:
            return
        self._codes.add(code)
        names = code_names(code)
        for name in names - self.names:
            self.names.add(name)
            for member, owner in self._waiting.pop(name, ()):
                self._member(member, owner, name)
        if is_library_file(code.co_filename):
            return
        installed = is_installed_file(code.co_filename)
        owner = Root(namespace, f"globals of {namespace.get('__name__', '?')}")
        used = self.globals.setdefault(id(namespace), (namespace, set()))[1]
        for name in names:
            if name not in namespace:
                continue
            used.add(name)
            value = namespace[name]
            if type(value) in SCALARS and (installed or name.startswith("__")):
                continue
            if isinstance(value, types.ModuleType):
                self._namespace(value, Item(owner, name), names)
            elif isinstance(value, type):
                if not _is_library_class(value):
                    self._push(value, Item(owner, name), name, False)
            elif not isinstance(value, types.FunctionType) or not is_library_file(value.__code__.co_filename):
                self._push(value, Item(owner, name), name, installed)

    def _namespace(self, module: types.ModuleType, source: Source, names: frozenset[str]) -> None:
        """The members of an imported module that some code may name; libraries are left out."""
        filename = getattr(module, "__file__", None) or "<frozen"
        if is_installed_file(filename) or module.__name__.partition(".")[0] in _LIBRARIES:
            return
        held = module.__dict__
        for name in names:
            if name in held and not isinstance(held[name], types.ModuleType) and not name.startswith("__"):
                self._push(held[name], Attribute(source, name), name, False)


def argument_tensors(args: tuple, kwargs: dict, names: list[str]) -> Iterator[tuple[str, torch.Tensor, Source]]:
    """The tensors in the arguments and in plain containers among them, in order, each with a name for its placeholder."""
    stack: list[tuple[str, Any, Source]] = []
    for name, value in reversed(kwargs.items()):
        stack.append((name, value, Keyword(name)))
    for k in reversed(range(len(args))):
        stack.append((names[k] if k < len(names) else f"args_{k}", args[k], Argument(k)))
    open_: set[int] = set()
    while stack:
        name, value, source = stack.pop()
        if isinstance(value, torch.Tensor):
            yield name, value, source
        elif isinstance(value, (list, tuple, dict)) and id(value) not in open_:
            open_.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            stack.extend(reversed([(f"{name}_{key}", item, Item(source, key)) for key, item in items]))
