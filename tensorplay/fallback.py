"""The one fallback path: what runs eagerly, why, and how often.

In: a reason and the user's line.  Out: a counted `Fallback`, one `FallbackWarning` for each reason, or, in strict
mode, the error, raised before any side effect of the function.
"""

from __future__ import annotations

import re
import threading
import warnings
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

from .errors import FallbackWarning, TensorPlayError
from .record import emit


@dataclass
class Fallback:
    """One reason why a function, or a part of it, runs eagerly, and how many calls did so.

    passing: the next call like it may be compiled.
    """

    reason: str
    line: str
    count: int = 0
    passing: bool = False

    def __str__(self) -> str:
        where = f" ({self.line})" if self.line else ""
        return f"{self.reason}{where}, {self.count} calls"


@dataclass
class Fallbacks:
    """The fallbacks of one compiled function, by reason."""

    name: str
    strict: str  # the option that makes a fallback an error: 'strict_native=True', 'fullgraph=True' or ''
    found: dict[tuple[str, str], Fallback] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, reason: str, line: str, error: type[TensorPlayError], cause: BaseException | None = None) -> Fallback:
        """Enters a fallback, or raises `error` in strict mode."""
        if self.strict:
            where = f" at {line}" if line else ""
            raise error(
                f"{self.strict}, and {self.name!r} cannot be compiled as a whole: {reason}{where}. "
                f"Without {self.strict} it runs eagerly there."
            ) from cause
        with self.lock:
            fallback = self.found.get((reason, line))
            if fallback is None:
                fallback = self.found[reason, line] = Fallback(reason, line)
                emit("fallback", self.name, reason=reason, line=line)
                self._warn(reason, line)
        return fallback

    def _warn(self, reason: str, line: str) -> None:
        file, _, number = line.rpartition(":")
        where = f" ({line})" if line else ""
        text = f"{self.name!r} runs eagerly here: {reason}{where}. strict_native=True makes this an error."
        warnings.warn_explicit(text, FallbackWarning, file or "<unknown>", int(number) if number.isdigit() else 0)


def describe(error: BaseException) -> str:
    """A reason as one line: our own errors speak for themselves, others are named by type."""
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, TensorPlayError) and first else f"{type(error).__name__}: {first}".rstrip(": ")


def split_line(text: str) -> tuple[str, str]:
    """'file:line: reason' or 'reason (file:line)' as line and reason; the line is '' where the text names none."""
    if found := re.match(r"(\S[^\n]*?:\d+): ", text):
        return found[1], text[found.end() :]
    if found := re.search(r" \(([^()\n]+:\d+)\)$", text):
        return found[1], text[: found.start()]
    return "", text


def line_of(fn: Any) -> str:
    """'file:line' of the definition of a function, method or module."""
    if isinstance(fn, MethodType):
        fn = fn.__self__ if fn.__name__ == "_call_impl" else fn.__func__  # the call of a module, compiled in place
    function = fn
    if not isinstance(function, FunctionType):
        function = getattr(type(fn), "forward", type(fn).__call__)
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
