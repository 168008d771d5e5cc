"""Where a value is read from at each call: paths from the arguments, the function or a module to a value.

In: nothing.  Out: `Source`, which reads its value anew at every call and prints as the user would write it.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class Source:
    """`get(args, kwargs)` reads the value as the function itself would; raises LookupError or AttributeError if gone."""

    def get(self, args: tuple, kwargs: dict) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Argument(Source):
    """A positional argument."""

    position: int

    def get(self, args: tuple, kwargs: dict) -> Any:
        return args[self.position]

    def __str__(self) -> str:
        return f"inputs[0][{self.position}]"


@dataclass(frozen=True)
class Keyword(Source):
    """A keyword argument."""

    keyword: str

    def get(self, args: tuple, kwargs: dict) -> Any:
        return kwargs[self.keyword]

    def __str__(self) -> str:
        return f"inputs[1][{self.keyword!r}]"


@dataclass(frozen=True, eq=False)
class Root(Source):
    """An object known at compile time: the compiled module, a function, a dictionary of globals."""

    value: Any
    name: str

    def get(self, args: tuple, kwargs: dict) -> Any:
        return self.value

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Cell(Source):
    """A closure variable of a function."""

    function: Source
    name: str

    def get(self, args: tuple, kwargs: dict) -> Any:
        function = self.function.get(args, kwargs)
        position = function.__code__.co_freevars.index(self.name)
        return function.__closure__[position].cell_contents

    def __str__(self) -> str:
        return f"{self.name} (closure of {self.function})"


@dataclass(frozen=True)
class Attribute(Source):
    """An attribute, read with getattr."""

    owner: Source
    name: str

    def get(self, args: tuple, kwargs: dict) -> Any:
        return getattr(self.owner.get(args, kwargs), self.name)

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}"


_PLAIN = (collections.OrderedDict, dict, list, tuple, collections.deque, set, frozenset)


def _plain(container: Any) -> Any:
    """The class whose methods tell what a container itself holds: those of a subclass may tell something else, and act."""
    kind = type(container)
    return kind if kind in _PLAIN else next((base for base in _PLAIN if isinstance(container, base)), kind)


def element(container: Any, key: Any) -> Any:
    if isinstance(container, dict):
        found = dict.get(container, key, container)  # a defaultdict makes nothing
        if found is container and dict.get(container, key) is not container:
            raise KeyError(key)
        return found
    return _plain(container).__getitem__(container, key)


def size(container: Any) -> int:
    return _plain(container).__len__(container)


def elements(container: Any) -> Iterator[Any]:
    """The elements, or the keys, in order."""
    return _plain(container).__iter__(container)


def is_plain(container: Any) -> bool:
    return type(container) in _PLAIN


@dataclass(frozen=True)
class Item(Source):
    """An element of a list, tuple or dictionary (a global is an item of the dictionary of globals)."""

    owner: Source
    key: Any

    def get(self, args: tuple, kwargs: dict) -> Any:
        return element(self.owner.get(args, kwargs), self.key)

    def __str__(self) -> str:
        key = f"<{type(self.key).__name__}>" if isinstance(self.key, torch.Tensor) else repr(self.key)
        return f"{self.owner}[{key}]"


@dataclass(frozen=True)
class Size(Source):
    """The number of elements of a container."""

    owner: Source

    def get(self, args: tuple, kwargs: dict) -> Any:
        return size(self.owner.get(args, kwargs))

    def __str__(self) -> str:
        return f"len({self.owner})"


@dataclass(frozen=True)
class TypeOf(Source):
    """The class of an object."""

    owner: Source

    def get(self, args: tuple, kwargs: dict) -> Any:
        return type(self.owner.get(args, kwargs))

    def __str__(self) -> str:
        return f"type({self.owner})"


@dataclass(frozen=True)
class Method(Source):
    """What a method without arguments returns."""

    owner: Source
    name: str

    def get(self, args: tuple, kwargs: dict) -> Any:
        return getattr(self.owner.get(args, kwargs), self.name)()

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}()"


@dataclass(frozen=True)
class Keys(Source):
    """The keys of a dictionary in order."""

    owner: Source

    def get(self, args: tuple, kwargs: dict) -> Any:
        return (*elements(self.owner.get(args, kwargs)),)

    def __str__(self) -> str:
        return f"keys of {self.owner}"


@dataclass(frozen=True)
class Result(Source):
    """What a callable without arguments returns: the referent of a weak reference, a setting of torch."""

    owner: Source

    def get(self, args: tuple, kwargs: dict) -> Any:
        return self.owner.get(args, kwargs)()

    def __str__(self) -> str:
        return f"{self.owner}()"


@dataclass(frozen=True)
class Variable(Source):
    """The value of a context variable; None where it has none."""

    owner: Source

    def get(self, args: tuple, kwargs: dict) -> Any:
        return self.owner.get(args, kwargs).get(None)

    def __str__(self) -> str:
        return f"{self.owner}.get()"


@dataclass(frozen=True)
class Defined(Source):
    """Whether a dictionary of globals defines a name that the function took from the builtins."""

    owner: Source
    name: str

    def get(self, args: tuple, kwargs: dict) -> Any:
        return self.name in self.owner.get(args, kwargs)

    def __str__(self) -> str:
        return f"{self.name!r} in {self.owner}"


@dataclass(frozen=True)
class Filled(Source):
    """Whether a functools.lru_cache still holds what it held: it has missed at least that often since it was cleared."""

    owner: Source
    misses: int

    def get(self, args: tuple, kwargs: dict) -> Any:
        return self.owner.get(args, kwargs).cache_info().misses >= self.misses

    def __str__(self) -> str:
        return f"{self.owner} was not cleared"


@dataclass(frozen=True)
class Environment(Source):
    """A variable of the process's environment; None where it is not set."""

    name: str

    def get(self, args: tuple, kwargs: dict) -> Any:
        return os.environ.get(self.name)

    def __str__(self) -> str:
        return f"os.environ[{self.name!r}]"


@dataclass(frozen=True)
class Names(Source):
    """Every name that a module holds: attributes, parameters, buffers, submodules, in order."""

    owner: Source

    def get(self, args: tuple, kwargs: dict) -> Any:
        return self.of(self.owner.get(args, kwargs))

    @staticmethod
    def of(module: Any) -> tuple:
        held = module.__dict__
        return (*held, *held["_parameters"], *held["_buffers"], *held["_modules"])

    def __str__(self) -> str:
        return f"names in {self.owner}"


@dataclass(frozen=True)
class Members(Source):
    """The names that a class itself defines, in order, without what Python adds to a class that is used."""

    owner: Source

    def get(self, args: tuple, kwargs: dict) -> Any:
        return self.of(self.owner.get(args, kwargs))

    @staticmethod
    def of(cls: Any) -> tuple:
        return tuple([name for name in cls.__dict__ if name not in ADDED])

    def __str__(self) -> str:
        return f"names in class {self.owner}"


ADDED = frozenset((
    "__annotations__", "__annotations_cache__", "__annotate__", "__annotate_func__", "__slotnames__", "__abstractmethods__",
    "_abc_impl", "__weakref__", "__dict__",
))  # fmt: skip
