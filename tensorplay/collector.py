"""The garbage collector rests while a version is built.

A build makes many objects that live on, and each full collection that they set off walks everything that torch and the
model hold as well, which takes longer than building a small program.
"""

from __future__ import annotations

import gc
import threading

_LOCK = threading.Lock()
_inside = 0  # builds that are open, of every thread
_was_on = False


class Rest:
    """No collection by itself while one is open, in whichever thread; the last that closes leaves the collector as it was."""

    def __enter__(self) -> Rest:
        global _inside, _was_on
        with _LOCK:
            if not _inside:
                _was_on = gc.isenabled()
                gc.disable()
            _inside += 1
        return self

    def __exit__(self, *error: object) -> None:
        global _inside
        with _LOCK:
            _inside -= 1
            if not _inside and _was_on:
                gc.collect(0)  # what the build made is young no longer; else its number sets off a collection here and now
                gc.enable()
