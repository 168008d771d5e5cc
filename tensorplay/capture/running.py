"""Which capture is under way on this thread.

In: nothing.  Out: its recorder, or None.
Always: cheap, and imports nothing, so that marks on functions cost nothing outside of a capture.
"""

from __future__ import annotations

import threading
from typing import Any

RUNNING: list[tuple[int, Any]] = []  # thread and recorder, innermost last; the recorder is None before the first run


def recorder() -> Any:
    """The recorder of the capture that runs on this thread."""
    return RUNNING[-1][1] if RUNNING and RUNNING[-1][0] == threading.get_ident() else None


def capturing() -> bool:
    """Whether this thread is inside a capture."""
    return bool(RUNNING) and RUNNING[-1][0] == threading.get_ident()
