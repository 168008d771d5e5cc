"""How the caller's result is made from the flat outputs of the graph.

In: the result of the captured call.  Out: a recipe, and the nodes whose values it needs.
Always: tensors of the arguments come back as themselves; objects that existed before the call come back by identity,
read from where the function would read them; objects that the call made are made anew at every call, with shared
parts shared; the recipe holds no tensor.
"""

from __future__ import annotations

import collections
import enum
import functools
import gc
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import fx

from ..collector import Rest
from ..key.sources import Source
from .effects import Kept
from .gradients import written
from .kinds import SCALARS
from .numbers import is_kept
from .writes import Put

_IMMUTABLE = (
    type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum, numpy.generic, range,
    types.EllipsisType, types.NotImplementedType, torch.Generator,
)  # fmt: skip


@dataclass(frozen=True)
class Out:
    """The k-th output of the graph."""

    k: int


@dataclass(frozen=True)
class Spent:
    """The k-th output of the graph as a value whose history a backward inside of the call has used up."""

    k: int


@dataclass(frozen=True)
class Old:
    """Something that existed before the call."""

    source: Source


@dataclass(frozen=True, eq=False)
class Constant:
    """The same value at every call."""

    value: Any


@dataclass(frozen=True)
class Make:
    """An object to be made anew: its class, its elements and its attributes, as numbers of other steps."""

    cls: Any
    kind: str  # tuple, list, dict, set, deque, object: what holds the elements
    keys: tuple[int, ...] = ()
    items: tuple[int, ...] = ()
    attributes: tuple[tuple[str, int], ...] = ()
    extra: Any = None  # default_factory of a defaultdict, maxlen of a deque


@dataclass(frozen=True)
class Rebuild:
    """The steps in an order in which tuples follow their elements; the result is the step `root`. Writes come last."""

    steps: tuple[Any, ...]
    order: tuple[int, ...]
    root: int
    writes: tuple[Put, ...] = ()

    def plain(self) -> Any:
        """The number of the output that the result is, the numbers where it is a tuple of outputs, else this recipe."""
        root = self.steps[self.root]
        if self.writes:
            return self
        if type(root) is Out:
            return root.k
        if type(root) is Make and root.cls is tuple and not root.attributes:
            items = [self.steps[k] for k in root.items]
            if all(type(item) is Out for item in items):
                return tuple(item.k for item in items)
        return self

    def __call__(self, outputs: Sequence[Any], args: tuple, kwargs: dict) -> Any:
        made: list[Any] = [None] * len(self.steps)
        later = []
        for k in self.order:
            step = self.steps[k]
            kind = type(step)
            if kind is Out:
                made[k] = outputs[step.k]
            elif kind is Constant:
                made[k] = step.value.copy() if isinstance(step.value, numpy.ndarray) else step.value
            elif kind is Old:
                made[k] = step.source.get(args, kwargs)
            elif kind is Spent:
                made[k] = _spent(outputs[step.k])
            elif step.kind == "tuple":
                made[k] = _make_tuple(step, [made[i] for i in step.items])
                if step.attributes:
                    later.append(k)
            else:
                made[k] = _make_empty(step)
                later.append(k)
        for k in later:
            _fill(made[k], self.steps[k], made)
        for write in self.writes:
            write.put(args, kwargs, made[write.value])
        return made[self.root]


class _UsedUp(torch.autograd.Function):
    """Makes a value require grad whose history is gone."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "Trying to backward through the graph a second time (or directly access saved tensors after they have already "
            "been freed): backward() was called inside of the compiled function. Specify retain_graph=True there."
        )


def _spent(value: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return _UsedUp.apply(torch.empty((), requires_grad=True), value)


def _make_tuple(step: Make, items: list[Any]) -> Any:
    if step.cls is tuple:
        return tuple(items)
    if hasattr(step.cls, "_make"):
        return step.cls._make(items)
    if issubclass(step.cls, frozenset):
        return step.cls(items)
    try:  # a structure sequence such as torch.return_types.max
        return step.cls(items)
    except TypeError:
        return tuple.__new__(step.cls, items)


def _make_empty(step: Make) -> Any:
    if step.kind == "list" and step.cls is list:
        return []
    if step.kind == "dict" and step.cls is dict:
        return {}
    if issubclass(step.cls, collections.defaultdict):
        made = collections.defaultdict.__new__(step.cls)
        made.default_factory = step.extra
        return made
    if step.kind == "deque":
        return collections.deque(maxlen=step.extra) if step.cls is collections.deque else step.cls((), step.extra)
    return step.cls.__new__(step.cls)


def _fill(target: Any, step: Make, made: list[Any]) -> None:
    items = [made[k] for k in step.items]
    if step.kind == "list":
        list.extend(target, items)
    elif step.kind == "set":
        set.update(target, items)
    elif step.kind == "deque":
        target.extend(items)
    elif step.kind == "dict":
        put = collections.OrderedDict.__setitem__ if isinstance(target, collections.OrderedDict) else dict.__setitem__
        for key, item in zip(step.keys, items):
            put(target, made[key], item)
    for name, k in step.attributes:
        held = getattr(target, "__dict__", None)
        if held is not None and name not in _slots(step.cls):
            held[name] = made[k]
        else:
            object.__setattr__(target, name, made[k])


class Newborn:
    """Knows which objects were made while it was open: the collector rests, so they are of its youngest generation."""

    def __enter__(self) -> Newborn:
        self.rest = Rest().__enter__()
        self.older = gc.get_objects(0)  # held, so that no new object takes the place of one that dies
        self.early: set[int] = set()  # made before someone asked for a collection, which made them older
        self.ids: set[int] | None = None
        gc.callbacks.append(self.collected)
        return self

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self.collected)
        self.rest.__exit__()
        del self.older

    def collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.early.update(id(o) for o in gc.get_objects(0))

    def __contains__(self, value: Any) -> bool:
        if not gc.is_tracked(value):
            return True  # holds no object that could tell; a container of plain values, or an object without any
        if self.ids is None:
            self.ids = ({id(o) for o in gc.get_objects(0)} | self.early) - {id(o) for o in self.older}
        return id(value) in self.ids


def plan(
    result: Any, recorder: Any, newborn: Newborn, effects: Sequence[tuple[Kept, Any, Any]] = ()
) -> tuple[Rebuild, list[Any], list[Any]]:
    """The recipe for `result` and what is left in other objects, the output nodes that it reads, and what it consists of."""
    builder = _Builder(recorder, newborn)
    root = builder.add(result)
    writes = [Put(owner, "grad", "grad", builder.add(value)) for owner, value in written(recorder)]
    writes += [Put(kept.source, kept.part, key, builder.add(value)) for kept, key, value in effects]  # type: ignore[arg-type]
    return Rebuild(tuple(builder.steps), tuple(builder.order()), root, tuple(writes)), builder.outputs, builder.parts


@functools.lru_cache(256)
def _slots(cls: type) -> list[str]:
    return [
        name
        for base in cls.__mro__
        for name, member in base.__dict__.items()
        if isinstance(member, types.MemberDescriptorType) and isinstance(base, type) and base.__flags__ & (1 << 9)
    ]


class _Builder:
    """Walks a result once; steps are numbered as they are met, and filled in when their parts are."""

    def __init__(self, recorder: Any, newborn: Newborn) -> None:
        self.recorder, self.newborn = recorder, newborn
        self.steps: list[Any] = []
        self.outputs: list[Any] = []
        self._seen: dict[int, int] = {}
        self.parts: list[Any] = []
        self._pending: list[tuple[int, Any]] = []

    def add(self, value: Any) -> int:
        root = self._number(value)
        while self._pending:
            k, item = self._pending.pop()
            self.steps[k] = self._make(item)
        return root

    def order(self) -> list[int]:
        """Tuples after their elements; everything else may come in any order."""
        done: set[int] = set()
        found: list[int] = []
        for start in range(len(self.steps)):
            stack = [(start, False)]
            while stack:
                k, ready = stack.pop()
                if ready:
                    found.append(k)
                elif k not in done:
                    done.add(k)
                    stack.append((k, True))
                    step = self.steps[k]
                    if type(step) is Make and step.kind == "tuple":
                        stack.extend((i, False) for i in step.items)
        return found

    def _number(self, value: Any) -> int:
        found = self._seen.get(id(value))
        if found is not None:
            return found
        k = len(self.steps)
        self._seen[id(value)] = k
        self.parts.append(value)
        self.steps.append(None)
        if isinstance(value, torch.Tensor):
            self.steps[k] = self._tensor(value)
        elif is_kept(value):
            self.steps[k] = Constant(value._value) if value._constant else self._output(value._node)
        elif type(value) in SCALARS:
            self.steps[k] = Constant(value)
        elif isinstance(value, types.FunctionType) and value in self.newborn:
            self.recorder.refuse(f"returns a function made during the call, {value.__qualname__}")
        elif isinstance(value, types.MethodType):
            self.recorder.refuse(f"returns the bound method {value.__qualname__}")
        elif isinstance(value, _IMMUTABLE):
            self.steps[k] = Constant(value)
        elif isinstance(value, numpy.ndarray):
            self.steps[k] = Constant(value.copy())
        else:
            source = self.recorder.reach.source_of(value)
            if source is not None:
                self.steps[k] = Old(source)
            elif value in self.newborn:
                self._pending.append((k, value))
            else:
                self.steps[k] = Constant(value)
        return k

    def _tensor(self, value: torch.Tensor) -> Any:
        node = self.recorder.node_of(value)
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or (value.__dict__ and value in self.newborn):
            self.recorder.refuse(f"returns a tensor with attributes of its own, or of type {type(value).__name__}")
        source = self.recorder.source_of_input(value)
        if source is None and id(value) in self.recorder.grads:
            self.recorder.refuse("returns a tensor whose gradient was set during the call")
        if source is None and value.grad_fn is not None and value.grad_fn in self.recorder.spent:
            self.outputs.append(self.recorder.detached(value))
            return Spent(len(self.outputs) - 1)
        out = self._output(node)
        return out if source is None else Old(source)

    def _output(self, node: fx.Node) -> Out:
        if node not in self.outputs:
            self.outputs.append(node)
        return Out(self.outputs.index(node))

    def _attributes(self, value: Any) -> tuple[tuple[str, int], ...]:
        found = [(name, self._number(item)) for name, item in (getattr(value, "__dict__", None) or {}).items()]
        for name in _slots(type(value)):
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found.append((name, self._number(getattr(value, name))))
        return tuple(found)

    def _make(self, value: Any) -> Make:
        cls, number = type(value), self._number
        if cls.__module__ == "builtins" and cls not in (tuple, list, dict, set, frozenset):
            self.recorder.refuse(f"returns a {cls.__name__} made during the call")
        extra = None
        if isinstance(value, dict):
            keys, items = tuple(number(k) for k in value), tuple(number(v) for v in dict.values(value))
            if isinstance(value, collections.defaultdict):
                extra = value.default_factory
            return Make(cls, "dict", keys, items, self._attributes(value), extra)
        if isinstance(value, (tuple, frozenset)):
            attributes = () if cls in (tuple, frozenset) or hasattr(value, "n_fields") else self._attributes(value)
            return Make(cls, "tuple", (), tuple(number(v) for v in value), attributes)
        if isinstance(value, list):
            return Make(cls, "list", (), tuple(number(v) for v in list.__iter__(value)), self._attributes(value))
        if isinstance(value, set):
            return Make(cls, "set", (), tuple(number(v) for v in value), self._attributes(value))
        if isinstance(value, collections.deque):
            return Make(cls, "deque", (), tuple(number(v) for v in value), (), value.maxlen)
        if not (cls.__flags__ & (1 << 9)) or (cls.__new__ is not object.__new__ and not _plain_new(cls)):
            self.recorder.refuse(f"returns a {cls.__module__}.{cls.__qualname__} made during the call")
        return Make(cls, "object", (), (), self._attributes(value))


def _plain_new(cls: type) -> bool:
    """Whether `cls.__new__(cls)` works: its classes are Python classes over `object`."""
    return all(base is object or base.__flags__ & (1 << 9) for base in cls.__mro__) and _try_new(cls)


def _try_new(cls: Any) -> bool:
    try:
        cls.__new__(cls)
    except Exception:
        return False
    return True
