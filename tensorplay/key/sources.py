"""Where a value is read from at each call: paths from the arguments, the function or a module to a value.

In: nothing.  Out: `Source`, which reads its value anew at every call and prints as the user would write it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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


@dataclass(frozen=True)
class Item(Source):
    """An element of a list, tuple or dictionary (a global is an item of the dictionary of globals)."""

    owner: Source
    key: Any

    def get(self, args: tuple, kwargs: dict) -> Any:
        return self.owner.get(args, kwargs)[self.key]

    def __str__(self) -> str:
        return f"{self.owner}[{self.key!r}]"


@dataclass(frozen=True)
class Size(Source):
    """The number of elements of a container."""

    owner: Source

    def get(self, args: tuple, kwargs: dict) -> Any:
        return len(self.owner.get(args, kwargs))

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
