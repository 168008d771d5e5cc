"""What a function can reach: its arguments, module tree, closures, globals, and the objects that hang on them.

In: the function and the arguments of one call, then the code that runs.  Out: `Reach`: for every tensor, container
and object the `Source` that reads it anew at each call, the constants found on the way, and state that cannot be read.
Always: nothing is called and no property runs; only what a name in reachable code could name is followed from
globals and classes; the globals of library code (torch, numpy, the standard library) are not entered.
"""

from __future__ import annotations

import abc
import builtins
import collections
import decimal
import enum
import functools
import gc
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..key.signature import _slots
from ..key.sources import (
    Argument,
    Attribute,
    Cell,
    Defined,
    Filled,
    Item,
    Keys,
    Keyword,
    Result,
    Root,
    Source,
    Variable,
    elements,
)
from .callee import callee
from .kinds import (
    BUFFERS,
    DESCRIPTORS,
    IMMUTABLE,
    LRU,
    MAPPINGS,
    REFERENCES,
    SCALARS,
    SEQUENCES,
    VIEWS,
    code_names,
    decimals,
    file_of,
    hazard,
    imported,
    is_followed,
    is_inert,
    is_installed_class,
    is_installed_file,
    is_library_class,
    is_library_file,
    is_library_module,
    is_own,
    is_variable,
    may_import,
    members,
    nested,
    source_file,
)

_SHARED = (type, types.FunctionType, types.MethodType, types.ModuleType)  # many places hold them; state has its own rows
_LIMIT = 100_000  # objects followed; beyond it the program is refused rather than half seen
_NAMESPACE = vars(builtins)
_BUILTINS = frozenset(_NAMESPACE)
_MEMBER = frozenset(("_name_", "__objclass__", "_sort_order_"))  # what every member of an enumeration has, for good


@dataclass(frozen=True)
class Place:
    """What must have run for a place to have been read: code that names `name`; `code`; or whatever read `inside`.

    space: the identity of the namespace of a module that holds the place: computed names reach into few of them.
    """

    name: str = ""
    code: types.CodeType | None = None
    inside: Found | None = None
    space: int = 0


@dataclass(frozen=True)
class Scalar:
    """A constant that was found: where, its value, and what must have run to see it."""

    source: Source
    value: Any
    place: Place


@dataclass(frozen=True)
class Twin:
    """A second place that holds an object which the walk had met before, and the first place."""

    source: Source
    first: Source
    place: Place


@dataclass(eq=False)
class Found:
    """An object on the walk: what it is, where it is read, and every place that holds it.

    `keyed`: its constants are no state, because the arguments' signature covers them or a package owns them.
    """

    value: Any
    source: Source
    keyed: bool
    places: list[Place] = field(default_factory=list)


class TooMuch(Exception):
    """The function reaches more objects than capture follows."""


_ANYWAY = Place()


class Reach:
    """The walk and what it found.  `tensors` and `objects` map identities; the objects are kept alive meanwhile."""

    def __init__(self, fn: Any, args: tuple, kwargs: dict) -> None:
        self.tensors: dict[int, tuple[torch.Tensor, Source]] = {}
        self.objects: dict[int, Found] = {}
        self.scalars: list[Scalar] = []
        self.twins: list[Twin] = []
        self.generators: list[torch.Generator] = []
        self.hazards: list[tuple[Place, Source, str]] = []  # state that cannot be read
        self.opened: set[int] = set()  # identities of the namespaces of modules that may be read by computed names
        self._held_modules: list[types.ModuleType] = []  # those that objects hold
        self.named: set[str] = set()  # names that objects hold, such as those of an attrgetter
        self.names: set[str] = {"forward", "__call__"}
        self.globals: dict[int, tuple[dict, set[str]]] = {}  # the dictionaries of globals and the names used from them
        self.classes: dict[type, None] = {}  # classes of the program
        self._waiting: dict[str, list[tuple[Any, Source, Source, type]]] = {}
        self._classes: set[type] = set()
        self._codes: set[tuple[types.CodeType, int]] = set()
        self._owned: set[types.CodeType] = set()  # code of functions met
        self._inner: set[types.CodeType] = set()  # nested in code met: of functions that the call makes
        self._queue: collections.deque[Found] = collections.deque()
        self._modules: dict[int, tuple[types.ModuleType, Source]] = {}  # of the program; code met later names more of them
        self._roots: dict[int, Root] = {}
        self.root = Root(fn, getattr(fn, "__name__", type(fn).__name__))
        for k, value in enumerate(args):
            self._push(value, Argument(k), _ANYWAY, True)
        for name, value in kwargs.items():
            self._push(value, Keyword(name), _ANYWAY, True)
        self._push(fn, self.root, _ANYWAY, False)
        self._run()

    def source_of(self, value: Any) -> Source | None:
        """Where an object that existed before the call is read from."""
        if isinstance(value, torch.Tensor):
            entry = self.tensors.get(id(value))
            return entry[1] if entry is not None and entry[0] is value else None
        found = self.objects.get(id(value))
        return found.source if found is not None and found.value is value else None

    @property
    def size(self) -> tuple[int, ...]:
        """Grows with all that the walk meets."""
        return len(self.objects), len(self.tensors), len(self.classes), len(self._codes)

    def add_frame(self, frame: types.FrameType) -> bool:
        """Follows code that is about to run, and the function that holds it, which the walk may not have found.

        Returns whether the next frame of this code may belong to another function with state of its own.
        """
        code, filename = frame.f_code, file_of(frame.f_code, frame.f_globals)
        own = (code.co_argcount or code.co_kwonlyargcount) and not is_installed_file(filename)  # default arguments
        apart = bool(own or code.co_freevars) and code not in self._inner and not is_library_file(filename)
        if apart:
            function = callee(frame)
            holders = [function] if function is not None else gc.get_referrers(code) if code not in self._owned else []
            self._owned.add(code)
            for holder in holders:
                if isinstance(holder, types.FunctionType) and holder.__code__ is code and id(holder) not in self.objects:
                    self._push(holder, self._root(holder, holder.__name__), _ANYWAY, False)
        self._code(code, frame.f_globals)
        if not is_installed_file(filename):
            self._computed(code_names(code))
        self._run()
        return apart

    def unseen(self) -> None:
        """No frame will be shown: whatever the walk found may run."""
        self._computed(self.names)
        self._run()

    def root_of(self, cls: type) -> Root:
        return self._root(cls, cls.__qualname__)

    def _root(self, value: Any, name: str) -> Root:
        return self._roots.setdefault(id(value), Root(value, name))

    # ---- the walk ------------------------------------------------------------------------------------------------

    def _push(self, value: Any, source: Source, place: Place, keyed: bool) -> None:
        kind = type(value)
        if kind in SCALARS or isinstance(value, IMMUTABLE):
            self._constant(value, source, place, keyed)
        elif isinstance(value, torch.Tensor):
            first = self.tensors.setdefault(id(value), (value, source))[1]
            if first is not source:
                self.twins.append(Twin(source, first, place))
            elif getattr(value, "__dict__", None):
                self._held(value.__dict__, source, False)
        elif value is _NAMESPACE or value is sys.modules:
            return  # of the interpreter; a capture itself changes it while it runs
        elif id(value) in self.objects:
            self.objects[id(value)].places.append(place)
            if not keyed and not isinstance(value, _SHARED):
                self.twins.append(Twin(source, self.objects[id(value)].source, place))
            elif not keyed:
                self._shared(value, source, place)
        else:
            reason = hazard(value)
            if reason:
                self.hazards.append((place, source, reason))
            self.objects[id(value)] = found = Found(value, source, keyed, [place])
            self._queue.append(found)
            if not keyed:
                self._shared(value, source, place)

    def _constant(self, value: Any, source: Source, place: Place, keyed: bool) -> None:
        if not keyed:
            self.scalars.append(Scalar(source, value, place))
        if isinstance(value, types.BuiltinFunctionType):
            owner = value.__self__
            if owner is not None and not isinstance(owner, (types.ModuleType, type)):
                self._push(owner, Attribute(source, "__self__"), place, False)
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif isinstance(value, decimal.Decimal):
            self._decimals(place)
        elif isinstance(value, enum.Enum):
            for name in value.__dict__.keys() - _MEMBER:
                item = value.__dict__[name]
                if not isinstance(item, enum.Enum):
                    self._push(item, Attribute(source, name), Place("value" if name == "_value_" else name), False)
        elif type(value).__module__ == "operator" and hasattr(value, "__reduce__"):
            self.named.update(n for n in value.__reduce__()[1] if isinstance(n, str) for n in n.split("."))

    def _decimals(self, place: Place) -> None:
        self.scalars.append(Scalar(Result(self._root(decimals, "decimal.getcontext")), decimals(), place))

    def _shared(self, value: Any, source: Source, place: Place) -> None:
        """Functions, classes and modules by identity, at every place of the program's own that holds one."""
        if not _rebindable(source):
            return
        if isinstance(value, types.FunctionType):
            code = value.__code__ if is_installed_file(source_file(value)) else None
            self.scalars.append(Scalar(source, value, replace(place, code=code or place.code)))
        elif isinstance(value, (type, types.ModuleType)):
            self.scalars.append(Scalar(source, value, place))

    def _run(self) -> None:
        while self._queue:
            found = self._queue.popleft()
            if len(self.objects) > _LIMIT:
                raise TooMuch(f"the function reaches more than {_LIMIT} objects, last {found.source}")
            self._expand(found)

    def _expand(self, found: Found) -> None:
        value, source, keyed = found.value, found.source, found.keyed
        inside = Place(inside=found)
        if isinstance(value, torch.nn.Module):
            self._module(value, source)
        elif isinstance(value, types.FunctionType):
            self._function(value, source)
        elif isinstance(value, types.MethodType):
            self._push(value.__self__, Attribute(source, "__self__"), inside, False)
            self._push(value.__func__, Attribute(source, "__func__"), inside, False)
        elif isinstance(value, functools.partial):
            for name in ("func", "args", "keywords"):
                self._push(getattr(value, name), Attribute(source, name), inside, False)
        elif isinstance(value, LRU):
            self._push(value.__wrapped__, Attribute(source, "__wrapped__"), inside, False)
            if not is_installed_file(source_file(value.__wrapped__)):
                self._push(True, Filled(source, value.cache_info().misses), inside, False)
        elif isinstance(value, MAPPINGS):
            for key, item in list(value.items() if isinstance(value, types.MappingProxyType) else dict.items(value)):
                self._push(item, Item(source, key), inside, keyed)
            self._elements(value, source, inside, keyed)
            if type(value) not in MAPPINGS:
                self._attributes(value, source, keyed)
        elif isinstance(value, (set, frozenset)):
            self._elements(value, source, inside, keyed)
            if type(value) not in (set, frozenset):
                self._attributes(value, source, keyed)
        elif isinstance(value, (*SEQUENCES, collections.deque)):
            for k, item in enumerate(elements(value)):
                self._push(item, Item(source, k), inside, keyed)
            if type(value) not in (list, tuple):
                self._attributes(value, source, keyed)
        elif isinstance(value, VIEWS):
            self._push(value.mapping, Attribute(source, "mapping"), inside, False)
        elif isinstance(value, REFERENCES):
            self._push(value(), Result(source), inside, False)
        elif is_variable(value):
            self._push(value.get(None), Variable(source), inside, False)
        elif isinstance(value, type):
            self._class(value, source, constructed=True)
            if isinstance(value, abc.ABCMeta):  # a class that is registered later changes what isinstance answers
                token = abc.get_cache_token
                self.scalars.append(Scalar(Result(self._root(token, "abc.get_cache_token")), token(), inside))
        elif isinstance(value, types.ModuleType):
            self._held_modules.append(value)
            self._namespace(value, source, frozenset())
        elif isinstance(value, BUFFERS):
            return
        elif is_followed(value):
            self._attributes(value, source, keyed)

    def _elements(self, value: Iterable[Any], source: Source, inside: Place, keyed: bool) -> None:
        """Elements of a set and keys of a dictionary, which are compared as a whole: what hangs on them is state."""
        for k, item in enumerate(elements(value)):
            if isinstance(item, enum.Enum):
                self._constant(item, Item(Keys(source), k), inside, True)
            elif not is_inert(item):
                self._push(item, Item(Keys(source), k), inside, keyed)

    def _module(self, module: torch.nn.Module, source: Source) -> None:
        held = module.__dict__
        for table in ("_parameters", "_buffers", "_modules"):
            for name, item in held.get(table, {}).items():
                self._push(item, Attribute(source, name), Place(name) if item is None else _ANYWAY, False)
        self._held({k: v for k, v in held.items() if k not in ("_parameters", "_buffers", "_modules")}, source, False)
        self._class(type(module), source, constructed=False)

    def _held(self, held: dict, source: Source, keyed: bool) -> None:
        for name, item in list(held.items()):
            if type(name) is str:
                self._push(item, Attribute(source, name), Place(name), keyed)

    def _attributes(self, value: Any, source: Source, keyed: bool) -> None:
        held = getattr(value, "__dict__", None)
        if type(held) is dict:
            self._held(held, source, keyed)
        self._held({n: getattr(value, n) for n in _slots(type(value)) or () if hasattr(value, n)}, source, keyed)
        self._class(type(value), source, constructed=False)

    def _class(self, cls: type, source: Source, constructed: bool) -> None:
        """Registers the functions of a class; each is entered once some code names it."""
        if cls in self._classes:
            return
        self._classes.add(cls)
        if type(cls) is not type and not is_library_class(type(cls)):
            self._class(type(cls), source, constructed=True)
        seen: set[str] = set()
        for base in cls.__mro__:
            library = is_library_class(base)
            if base is torch.nn.Module or base is object or (library and not issubclass(base, torch.nn.Module)):
                continue
            if not library:
                self.classes[base] = None
            held = Attribute(self.root_of(base), "__dict__")
            for name, member in list(base.__dict__.items()):
                # read through the most derived class, so that a new member of a class between hides it
                through = base if name in seen else cls
                owner = self.root_of(through)
                seen.add(name)
                direct, static = Attribute(owner, name), Item(held, name)
                if isinstance(member, DESCRIPTORS):
                    dunder = name.startswith("__") and name.endswith("__") and not library
                    if name in self.names or (dunder and (constructed or name not in ("__init__", "__new__"))):
                        self._member(member, direct, static, name, base)
                    else:
                        self._waiting.setdefault(name, []).append((member, direct, static, base))
                elif library or name.startswith("__") or isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType):
                    continue
                elif isinstance(member, torch.Tensor) or not is_installed_class(base):
                    self._push(member, static if hasattr(type(member), "__get__") else direct, Place(name), False)

    def _member(self, member: Any, direct: Source, static: Source, name: str, base: type | None) -> None:
        """A member of a class; without `base` one of the program's own."""
        place, own = Place(name), base is None or not is_installed_class(base)
        if isinstance(member, types.FunctionType):
            self._push(member, direct, _ANYWAY, False)
            if base is None or not is_library_class(base):
                self.scalars.append(Scalar(direct, member, Place(name, member.__code__)))
            return
        if own:
            self.scalars.append(Scalar(static, member, place))
        for part in ("fget", "func", "__func__"):
            function = getattr(member, part, None)
            if function is not None:
                self._push(function, Attribute(static, part), _ANYWAY, False)
                return

    def _function(self, function: types.FunctionType, source: Source) -> None:
        code, filename = function.__code__, source_file(function)
        self._owned.add(code)
        self._code(code, function.__globals__)
        ran = Place(code=code)
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            try:
                value = cell.cell_contents
            except ValueError:  # not yet assigned
                continue
            self._push(value, Cell(source, name), ran, is_library_file(filename) and type(value) in SCALARS)
            if isinstance(value, types.ModuleType) and not is_library_file(filename):
                self._absent(value, Cell(source, name), name, code)
        if is_installed_file(filename):
            return
        self.scalars.append(Scalar(Attribute(source, "__code__"), code, ran))
        for k, value in enumerate(function.__defaults__ or ()):
            self._push(value, Item(Attribute(source, "__defaults__"), k), ran, False)
        for name, value in (function.__kwdefaults__ or {}).items():
            self._push(value, Item(Attribute(source, "__kwdefaults__"), name), ran, False)
        self._held(function.__dict__, source, False)

    def _code(self, code: types.CodeType, namespace: dict) -> None:
        if (code, id(namespace)) in self._codes:
            return
        self._codes.add((code, id(namespace)))
        self._inner.update(item for item in nested(code) if item is not code)
        names = code_names(code)
        self._members(names)
        filename = file_of(code, namespace)
        if is_library_file(filename):
            return
        for module, source in list(self._modules.values()):
            self._namespace(module, source, names)
        installed = is_installed_file(filename)
        owner = self._root(namespace, f"globals of {namespace.get('__name__', '?')}")
        self._imports(code, namespace, names)
        used = self.globals.setdefault(id(namespace), (namespace, set()))[1]
        for name in names - used:
            used.add(name)
            place = Place(name, space=id(namespace))
            if name not in namespace:
                if not installed and (name in _BUILTINS or "NameError" in names):
                    self.scalars.append(Scalar(Defined(owner, name), False, place))
                if name in _NAMESPACE and (type(_NAMESPACE[name]) in SCALARS or is_own(_NAMESPACE[name])):
                    self._push(_NAMESPACE[name], Item(self._root(_NAMESPACE, "builtins"), name), place, False)
                continue
            value = namespace[name]
            if (type(value) in SCALARS or isinstance(value, IMMUTABLE)) and (installed or name.startswith("__")):
                continue
            if value is decimal or value is decimal.Decimal:
                self._decimals(place)
            if isinstance(value, types.ModuleType):
                self._namespace(value, Item(owner, name), names)
                self._absent(value, Item(owner, name), name, code)
            elif isinstance(value, type) and not is_library_class(value):
                self._push(value, Item(owner, name), place, False)
            elif not isinstance(value, type) and (
                not isinstance(value, types.FunctionType) or not is_library_file(source_file(value))
            ):
                self._push(value, Item(owner, name), place, installed)
                continue
            if not installed and not name.startswith("__"):  # what belongs to a library is known by its identity alone
                self.scalars.append(Scalar(Item(owner, name), value, place))

    def _absent(self, module: types.ModuleType, source: Source, alias: str, code: types.CodeType) -> None:
        """What a module of the program does not hold, though code reads it: it is handled, or `__getattr__` answers."""
        if is_library_module(module):
            return
        for name in {name for owner, name in members(code) if owner in (alias, "")} - module.__dict__.keys():
            held = Attribute(source, "__dict__")
            self.scalars.append(Scalar(Defined(held, name), False, Place(name)))
            if "__getattr__" in module.__dict__:
                self._push(module.__dict__["__getattr__"], Attribute(source, "__getattr__"), Place(name), False)
            else:
                self.scalars.append(Scalar(Defined(held, "__getattr__"), False, Place(name)))

    def _members(self, names: Iterable[str]) -> None:
        """The members of classes with these names, and those that the program put on classes of torch."""
        for name in set(names) - self.names:
            self.names.add(name)
            for cls in (torch.Tensor, torch.nn.Module):
                member = cls.__dict__.get(name)
                if member is not None and (type(member) in SCALARS or is_own(member)) and not name.startswith("__"):
                    self._added(member, cls, name)
            for member in self._waiting.pop(name, ()):
                self._member(*member[:3], name, member[3])

    def _added(self, member: Any, cls: type, name: str) -> None:
        direct, static = Attribute(self.root_of(cls), name), Item(Attribute(self.root_of(cls), "__dict__"), name)
        if isinstance(member, DESCRIPTORS):
            self._member(member, direct, static, name, None)
        else:
            self._push(member, direct, Place(name), False)

    def add_name(self, name: str) -> None:
        """A name that code hands to `getattr` and its like."""
        self._members([name])
        for module, source in list(self._modules.values()):
            self._namespace(module, source, frozenset((name,)))
        self._run()

    def any_name(self, frame: types.FrameType, members: bool) -> None:
        """Code that runs computes names: of modules that it can hold, and, with `members`, of classes."""
        if members:
            self._members(list(self._waiting))
        names, pending = code_names(frame.f_code), [*self._held_modules, *frame.f_locals.values()]
        pending += [frame.f_globals.get(name) for name in names]
        pending += [sys.modules.get(full) for full in imported(frame.f_code, frame.f_globals)]
        if may_import(names):
            pending += [module for module, _ in self._modules.values()]
        while pending:
            module = pending.pop()
            if not isinstance(module, types.ModuleType) or is_library_module(module) or id(module.__dict__) in self.opened:
                continue
            self.opened.add(id(module.__dict__))
            pending += [module.__dict__.get(name) for name in names]
            source = self._modules.get(id(module), (module, self._root(module, module.__name__)))[1]
            self._namespace(module, source, frozenset(module.__dict__))
        self._run()

    def _imports(self, code: types.CodeType, namespace: dict, names: frozenset[str]) -> None:
        """Modules that import statements inside the code name."""
        for full in imported(code, namespace):
            parts = full.split(".")
            for k in range(len(parts)):
                self._loaded(".".join(parts[: k + 1]), names)

    def _computed(self, names: Iterable[str]) -> None:
        """Code with these names, if it computes the name of a module that it imports, may mean any of the program."""
        names = frozenset(names)
        if may_import(names):
            for name in list(sys.modules):
                self._loaded(name, names)

    def _loaded(self, name: str, names: frozenset[str]) -> None:
        module, source = sys.modules.get(name), Item(self._root(sys.modules, "sys.modules"), name)
        if isinstance(module, types.ModuleType):
            self._namespace(module, source, names)
        elif module is not None:
            self._push(module, source, _ANYWAY, False)

    def _namespace(self, module: types.ModuleType, source: Source, names: frozenset[str]) -> None:
        """The members of an imported module that some code may name; libraries are left out."""
        if is_library_module(module):
            for name in names & module.__dict__.keys():
                value = module.__dict__[name]
                if isinstance(value, types.ModuleType) and is_library_module(value):
                    if f"{module.__name__}.{name}" == value.__name__:
                        self._namespace(value, Attribute(source, name), names - {name})
                elif isinstance(value, (types.FunctionType, type)) and is_own(value):
                    self._push(value, Attribute(source, name), Place(name), False)
            return
        if id(module) not in self._modules:
            self._modules[id(module)] = (module, source)
            names |= self.names
        held = module.__dict__
        used = self.globals.setdefault(id(held), (held, set()))[1]
        for name in names - used:
            if not name.startswith("__"):
                used.add(name)
            if name in held and not name.startswith("__"):
                if isinstance(held[name], types.ModuleType):
                    self._namespace(held[name], Attribute(source, name), names)
                else:
                    self._push(held[name], Attribute(source, name), Place(name, space=id(held)), False)


def _rebindable(source: Source) -> bool:
    """Whether a place of functions and classes is the program's own: an attribute, a closure cell, an element, a global."""
    if isinstance(source, (Cell, Attribute)):
        return True
    if isinstance(source, Item) and not isinstance(source.owner, Keys):
        namespace = getattr(source.owner, "value", None)
        return type(namespace) is not dict or not is_installed_file(namespace.get("__file__") or "")
    return False


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
