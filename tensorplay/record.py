"""Where compile events go: nowhere by default, into a list under `with record() as events`."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """One thing that the compiler did, such as a compilation, a recompilation reason or a fallback."""

    kind: str
    name: str
    data: dict[str, Any] = field(default_factory=dict)


_LISTENERS: contextvars.ContextVar[tuple[list[Event], ...]] = contextvars.ContextVar("listeners", default=())


@contextlib.contextmanager
def record() -> Iterator[list[Event]]:
    """Collects the events of this thread (and of tasks started from it) while it is open."""
    events: list[Event] = []
    token = _LISTENERS.set((*_LISTENERS.get(), events))
    try:
        yield events
    finally:
        _LISTENERS.reset(token)


def emit(kind: str, name: str, **data: Any) -> None:
    for events in _LISTENERS.get():
        events.append(Event(kind, name, data))
