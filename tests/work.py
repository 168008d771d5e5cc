"""How much work something is: counted, so that no test depends on the clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def work(f: Callable[..., Any], *args: Any) -> int:
    """Calls, of Python functions and of C functions, that `f(*args)` makes."""
    count = 0

    def on_event(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    outer = sys.getprofile()
    sys.setprofile(on_event)
    try:
        f(*args)
    finally:
        sys.setprofile(outer)
    return count
