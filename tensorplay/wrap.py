"""Compiled modules: an object that is the original module in everything but its call.

In: a module and its `Compiled`.  Out: an instance of a subclass of the module's own class that shares the module's
attribute dictionary.
Always: reading or writing an attribute, a parameter, a buffer or a mode of the wrapper is reading or writing the
original's; `state_dict` has the original's keys; copies and pickles hold the original and compile anew.
"""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from .compiled import Compiled, Settings

_CLASSES: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()


def wrap(module: nn.Module, function: Compiled) -> nn.Module:
    """The compiled module."""
    wrapper: nn.Module = object.__new__(_class_of(type(module)))
    object.__setattr__(wrapper, "__dict__", module.__dict__)
    object.__setattr__(wrapper, "_tp_compiled", function)
    return wrapper


def original(model: Any) -> Any:
    """The module behind a compiled module; anything else as it is."""
    return model._tp_compiled.fn if hasattr(type(model), "_tp_compiled") else model


def _rewrap(module: nn.Module, settings: Settings) -> nn.Module:
    from .compiled import compiled

    return compiled(module, settings)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self._tp_compiled(*args, **kwargs)


def _reduce(self: Any, protocol: int) -> tuple:
    return _rewrap, (self._tp_compiled.fn, self._tp_compiled.settings)


def _deepcopy(self: Any, memo: dict[int, Any]) -> nn.Module:
    new = memo[id(self)] = _rewrap(copy.deepcopy(self._tp_compiled.fn, memo), self._tp_compiled.settings)
    return new


def _class_of(cls: type) -> type:
    """The subclass of `cls` whose call is compiled, one for each class; it keeps the name, so that it prints alike."""
    found = _CLASSES.get(cls)
    if found is None:
        body = {
            "__slots__": ("_tp_compiled",), "__module__": cls.__module__, "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__, "__call__": _call, "__reduce_ex__": _reduce, "__deepcopy__": _deepcopy,
        }  # fmt: skip
        found = _CLASSES[cls] = type(cls)(cls.__name__, (cls,), body)
    return found
