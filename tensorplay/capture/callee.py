"""The function object that a frame runs, which CPython keeps in the frame and does not show.

In: a frame.  Out: the function, or None where the layout of frames is another one than those known here.
Always: what is found is a function with the frame's own code; nothing is written.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
import types
from typing import cast

_WORD = ctypes.sizeof(ctypes.c_void_p)
_INNER = 3 * _WORD  # in a frame: behind reference count, type and the frame that called it
_PLACES = {(3, 11): 0, (3, 12): 2 * _WORD, (3, 13): 2 * _WORD, (3, 14): 2 * _WORD}  # of the function in the inner frame
_PLACE = _PLACES.get(sys.version_info[:2])
_KNOWN = sys.implementation.name == "cpython" and not any(map(sysconfig.get_config_var, ("Py_GIL_DISABLED", "Py_TRACE_REFS")))


def callee(frame: types.FrameType) -> types.FunctionType | None:
    """The function that a frame runs; code of a module or class body, too, runs in one that nobody holds."""
    if _PLACE is None or not _KNOWN:
        return None
    word = ctypes.c_void_p.from_address
    inner = word(id(frame) + _INNER).value
    address = word(inner + _PLACE).value if inner else None
    if not address:
        return None
    address &= -2  # a tag in the last bit
    if word(address + _WORD).value != id(types.FunctionType):
        return None
    function = cast(types.FunctionType, ctypes.cast(address, ctypes.py_object).value)
    return function if function.__code__ is frame.f_code else None
