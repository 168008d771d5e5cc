"""Messages of a function that is being captured: records of logging, and warnings.

In: what the runs of one capture would have shown.  Out: what has to be shown once the capture is over.
Always: nothing is shown while a capture runs; a message of the first call alone (logging behind a cache, a warning
under the default filter) is shown exactly once, whether the graph is used or the function runs eagerly afterwards.
"""

from __future__ import annotations

import collections
import logging
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .kinds import is_library_file

_PLAIN = (type(None), bool, int, float, str, bytes)


@dataclass(frozen=True)
class Message:
    """`site` is the same for a message of another run that comes from the same lines, whatever its text."""

    site: tuple
    show: Callable[[], Any]
    line: str
    logged: bool


class Messages:
    """What the runs of one capture would have shown: `now` by the last one, `earlier` by those before it."""

    def __init__(self) -> None:
        self.earlier: list[Message] = []
        self.now: list[Message] = []

    def begin(self) -> None:
        """Another run: what it repeats counts once."""
        self.earlier, self.now = self._all(), []

    @property
    def logged(self) -> str:
        """The line where the last run logged first."""
        return next((m.line for m in self.now if m.logged), "")

    @property
    def unsettled(self) -> bool:
        """Whether the last run showed something else than those before, so that the next one may, too."""
        return _sites(self.now) != _sites(self.earlier)

    def drop_repeated(self) -> None:
        """Keeps what the last run did not show again: a run to come shows the rest itself."""
        self.earlier, self.now = _beyond(self.earlier, self.now), []

    def show(self) -> None:
        for message in self._all():
            message.show()

    def _all(self) -> list[Message]:
        return [*self.earlier, *_beyond(self.now, self.earlier)]

    @contextmanager
    def held(self, line: Callable[[], str]) -> Iterator[None]:
        """Holds back what this thread logs and warns about; `line` names the line that runs."""
        owner = threading.get_ident()
        handle, show, chosen = logging.Logger.handle, _showing(), _chosen()

        def hold(site: Any, logged: bool, shown: Callable[[], Any]) -> None:
            self.now.append(Message((site, *_lines(sys._getframe(2))), shown, line(), logged))

        def handle_later(logger: logging.Logger, record: logging.LogRecord) -> None:
            if threading.get_ident() != owner:
                return handle(logger, record)
            _settle_text(record)
            return hold((logger.name, record.levelno), True, lambda: handle(logger, record))

        def show_later(message: Any) -> None:
            if threading.get_ident() != owner or _chosen() != chosen:  # the function itself collects its warnings
                return show(message)
            return hold(message.category, False, lambda: show(message))

        logging.Logger.handle = handle_later  # type: ignore[method-assign, assignment]
        if show is not None:
            warnings._showwarnmsg = show_later  # type: ignore[attr-defined]
        try:
            yield
        finally:
            logging.Logger.handle = handle  # type: ignore[method-assign]
            if show is not None:
                warnings._showwarnmsg = show  # type: ignore[attr-defined]


def _showing() -> Any:
    """What the interpreter calls for a warning that passed the filters."""
    return getattr(warnings, "_showwarnmsg", None)


def _chosen() -> tuple:
    return warnings.showwarning, getattr(warnings, "_showwarnmsg_impl", None)


def _settle_text(record: logging.LogRecord) -> None:
    """The text of a record is made now where its parts may change; a part that fails to print is the handler's affair."""
    args = record.args.values() if isinstance(record.args, dict) else record.args or ()
    if type(record.msg) is str and all(type(a) in _PLAIN for a in args):
        return
    try:
        record.msg, record.args = record.getMessage(), None
    except Exception:
        return


def _lines(frame: types.FrameType | None) -> Iterator[tuple[str, int]]:
    """The lines of the program and its packages that lead to a frame; the paths through libraries differ between runs."""
    while frame is not None:
        if not is_library_file(frame.f_code.co_filename):
            yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _sites(messages: list[Message]) -> collections.Counter:
    return collections.Counter(m.site for m in messages)


def _beyond(messages: list[Message], others: list[Message]) -> list[Message]:
    """The messages without those that the others match one by one."""
    left, kept = _sites(others), []
    for message in messages:
        if left[message.site] > 0:
            left[message.site] -= 1
        else:
            kept.append(message)
    return kept
