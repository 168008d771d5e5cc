"""What a function leaves in objects that existed before the call, as steps of the recipe that makes its result.

In: the snapshot of a run and what it changed.  Out: `Put`s: where an object is read from, which element gets what.
Always: a write is repeated only where the version serves the next call as well: values computed anew at each call,
into places that stay; a number that counts, a container that grows, a shape that changes is refused.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..key.sources import Source
from .effects import Kept, Snapshot
from .kinds import SCALARS


@dataclass(frozen=True)
class Put:
    """An element of a part of an object that existed before the call, and the step that makes its new value."""

    owner: Source
    part: str
    key: Any
    value: int

    def put(self, args: tuple, kwargs: dict, value: Any) -> None:
        PARTS[self.part](self.owner.get(args, kwargs), self.key, value)


def _attribute(owner: Any, key: str, value: Any) -> None:
    owner.__dict__[key] = value


def _in_table(name: str) -> Callable[[Any, str, Any], None]:
    def put(owner: torch.nn.Module, key: str, value: Any) -> None:
        owner.__dict__[name][key] = value

    return put


def _item(owner: Any, key: Any, value: Any) -> None:
    kind = collections.OrderedDict if isinstance(owner, collections.OrderedDict) else dict
    (kind if isinstance(owner, dict) else type(owner)).__setitem__(owner, key, value)


def _cell(owner: Any, key: str, value: Any) -> None:
    owner.__closure__[owner.__code__.co_freevars.index(key)].cell_contents = value


PARTS: dict[str, Callable[[Any, Any, Any], None]] = {
    "__dict__": _attribute, "__closure__": _cell, "items": _item, "grad": lambda owner, key, value: setattr(owner, key, value),
    **{name: _in_table(name) for name in ("_parameters", "_buffers", "_modules")},
}  # fmt: skip
_MISSING = object()


def lasting(snapshot: Snapshot, passing: set[str] | None = None) -> list[tuple[Kept, Any, Any]] | None:
    """(what, key, new value) of everything that the run changed; None where a graph cannot repeat one of them.

    passing: names of what changed once and not again in the run after, such as a flag that says that a cache is filled;
    None in that run after, which must find every key that it sets.
    """
    found = []
    for kept in snapshot.kept:
        keys = kept.changed()
        if not keys:
            continue
        now = kept.read(kept.owner)
        if kept.part not in PARTS or not isinstance(kept.source, Source) or len(now) < len(kept.content):
            return None
        if len(now) != len(kept.content) and (passing is None or not isinstance(now, dict)):
            return None
        for key in keys:
            old = _element(kept.content, key)
            new = _element(now, key)
            if new is _MISSING or type(key) not in SCALARS or not _stays(old, new, kept.name(key) in (passing or ())):
                return None
            found.append((kept, key, new))
    return found


def _element(content: Any, key: Any) -> Any:
    if isinstance(content, dict):
        return content.get(key, _MISSING)
    return content[key] if type(key) is int and key < len(content) else _MISSING


def _stays(old: Any, new: Any, passing: bool) -> bool:
    """Whether a call that finds the new value may be served like this one, or by one more version."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return old.shape == new.shape and old.dtype == new.dtype and type(old) is type(new)
    if type(old) in SCALARS and old is not None:
        return passing
    return True
