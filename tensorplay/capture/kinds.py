"""What kind of thing a value is, as capture sees it: constant, container, object to follow, or state that it can't see.

In: a value, a class, a source file, a code object.  Out: answers, and the names that a code object may look up.
Always: nothing of the program runs here; what is not known to be harmless has a reason.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import datetime
import decimal
import dis
import enum
import fractions
import functools
import importlib.util
import operator
import os
import pathlib
import re
import sys
import sysconfig
import types
import uuid
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy
import torch

from ..key.signature import followed, module_of

_TORCH = os.path.dirname(torch.__file__) + os.sep
OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
# _pytest: the assertions of every test file name it, and all tests of the session hang on it
_LIBRARIES = frozenset(("torch", "numpy", "tensorplay", "_pytest", "builtins", *sys.stdlib_module_names)) - {"__main__"}

SCALARS = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
)
# never change: their place decides what the function sees
IMMUTABLE = (
    enum.Enum, numpy.generic, numpy.dtype, range, slice, types.BuiltinFunctionType, types.MethodWrapperType, types.CodeType,
    fractions.Fraction, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, uuid.UUID,
    pathlib.PurePath, re.Pattern, types.EllipsisType, types.NotImplementedType, torch.Generator, operator.attrgetter,
    operator.itemgetter, operator.methodcaller, types.MethodDescriptorType, types.WrapperDescriptorType, str, bytes, int, float,
)  # fmt: skip
_FOREIGN: Any = ctypes.c_int.__mro__[-2]  # the class that all data of ctypes have
BUFFERS = (bytearray, memoryview, array.array, numpy.ndarray)
MAPPINGS = (dict, types.MappingProxyType)
SEQUENCES = (list, tuple)
VIEWS: Any = (type({}.keys()), type({}.values()), type({}.items()))
LRU = type(functools.lru_cache(lambda: None))
REFERENCES = (weakref.ref,)
DESCRIPTORS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
LARGE = 1 << 20  # bytes of an array that are still compared at each call
_HEAP_TYPE = 1 << 9


def hazard(value: Any) -> str:
    """Why capture cannot know the state of a value; '' where it can."""
    kind = type(value)
    if isinstance(value, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
        return f"a generator ({value.__qualname__})"
    if isinstance(value, _FOREIGN) or module_of(kind) == "mmap":
        return f"memory that Python does not own ({kind.__name__})"
    if hasattr(kind, "__next__") and (not kind.__flags__ & _HEAP_TYPE or module_of(kind) in _LIBRARIES):
        return f"an iterator ({kind.__name__})"
    if isinstance(value, numpy.ndarray) and (value.nbytes > LARGE or value.dtype.hasobject):
        return "a numpy array that is too large to be compared at each call, or holds objects"
    if isinstance(value, (bytearray, memoryview, array.array)) and len(value) > LARGE:
        return f"a {kind.__name__} that is too large to be compared at each call"
    return ""


def file_of(code: types.CodeType, namespace: dict) -> str:
    """The source file that code belongs to; of generated code, such as a dataclass's methods, that of its module."""
    filename = code.co_filename
    return filename if filename[:1] != "<" or filename.startswith("<frozen") else namespace.get("__file__") or filename


def source_file(function: Any) -> str:
    """The source file of a function; '' of what is none."""
    code = getattr(function, "__code__", None)
    return file_of(code, getattr(function, "__globals__", {})) if isinstance(code, types.CodeType) else ""


@functools.lru_cache(maxsize=4096)
def is_library_file(filename: str) -> bool:
    """Whether a source file belongs to torch, to the standard library, or to this package."""
    if filename.startswith(_TORCH) or filename.startswith(OURS) or filename.startswith("<frozen"):
        return True
    return filename.startswith(_STDLIB) and not any(part in filename for part in _SITE)


@functools.lru_cache(maxsize=4096)
def is_torch_file(filename: str) -> bool:
    """Whether a source file belongs to torch or to this package."""
    return filename.startswith(_TORCH) or filename.startswith(OURS)


@functools.lru_cache(maxsize=4096)
def is_installed_file(filename: str) -> bool:
    """Whether a source file lies among installed packages, so that its global scalars are no state of the program."""
    return any(part in filename for part in _SITE) or is_library_file(filename)


@functools.lru_cache(maxsize=4096)
def is_installed_class(cls: type) -> bool:
    """Whether a class belongs to an installed package."""
    return is_installed_file(getattr(sys.modules.get(module_of(cls)), "__file__", None) or "")


def is_library_class(cls: type) -> bool:
    return module_of(cls).partition(".")[0] in _LIBRARIES


def is_library_module(module: types.ModuleType) -> bool:
    """Whether a module belongs to an installed package; one without a file was made by the program, or is a namespace."""
    filename = module.__dict__.get("__file__") or ""
    return is_installed_file(filename) or module.__name__.partition(".")[0] in _LIBRARIES


def is_followed(value: Any) -> bool:
    """Whether the attributes of an object are part of the program's state."""
    return followed(type(value))


def decimals() -> tuple:
    """What the arithmetic of decimal depends on beside its operands."""
    c = decimal.getcontext()
    traps = tuple(signal.__name__ for signal, trapped in c.traps.items() if trapped)
    return c.prec, c.rounding, c.Emin, c.Emax, c.capitals, c.clamp, traps


def is_inert(value: Any) -> bool:
    """Whether nothing hangs on a value that is compared as a whole."""
    if isinstance(value, (tuple, frozenset)):
        return type(value) in (tuple, frozenset) and all(map(is_inert, value))
    return type(value) in SCALARS or isinstance(value, IMMUTABLE)


def is_variable(value: Any) -> bool:
    return isinstance(value, ContextVar)


@functools.lru_cache(maxsize=4096)
def code_names(code: types.CodeType) -> frozenset[str]:
    """Every name that a code object, or code nested in it, may look up; strings count, because of getattr."""
    names: set[str] = set()
    for item in nested(code):
        names.update(item.co_names)
        names.update(c for c in item.co_consts if type(c) is str and c.isidentifier())
    return frozenset(names)


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those nested in it."""
    pending = [code]
    while pending:
        item = pending.pop()
        yield item
        pending.extend(c for c in item.co_consts if isinstance(c, types.CodeType))


def is_own(value: Any) -> bool:
    """Whether what lies in a namespace of a library was put there by the program."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    if isinstance(value, types.FunctionType):
        return not is_installed_file(source_file(value))
    cls = value if isinstance(value, type) else type(value)
    return not (is_library_class(cls) or is_installed_class(cls))


@functools.lru_cache(maxsize=4096)
def members(code: types.CodeType) -> frozenset[tuple[str, str]]:
    """(name, attribute) of the attributes that a code object reads of what has a name; '' where any name may be meant."""
    found = set()
    for item in nested(code):
        owner = ""
        for instruction in dis.get_instructions(item):
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and owner:
                found.add((owner, instruction.argval))
            if instruction.opname.startswith("LOAD_") and type(instruction.argval) is str:
                owner = instruction.argval
            elif instruction.opname not in ("CACHE", "EXTENDED_ARG", "PUSH_NULL"):
                owner = ""
        if not {"getattr", "hasattr"}.isdisjoint(item.co_names):
            found.update(("", c) for c in item.co_consts if type(c) is str and c.isidentifier())
    return frozenset(found)


_IMPORT_NAME = dis.opmap["IMPORT_NAME"]


@functools.lru_cache(maxsize=4096)
def imports(code: types.CodeType) -> tuple[tuple[str, int], ...]:
    """(module, level) of the import statements in a code object and in those nested in it."""
    found = []
    for item in nested(code):
        level: Any = 0
        if _IMPORT_NAME not in item.co_code[::2]:  # disassembling is slow, and most code imports nothing
            continue
        for instruction in dis.get_instructions(item):
            if instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and type(instruction.argval) is int:
                level = instruction.argval
            elif instruction.opname == "IMPORT_NAME":
                found.append((instruction.argval, level))
    return tuple(found)


def imported(code: types.CodeType, namespace: dict) -> Iterator[str]:
    """The full names of the modules that import statements inside code name."""
    for name, level in imports(code):
        with contextlib.suppress(ImportError, ValueError):
            yield importlib.util.resolve_name("." * level + name, namespace.get("__package__"))


_IMPORTING = ({"import_module"}, {"__import__"}, {"sys", "modules"})  # names in code that may compute a module's name


def may_import(names: frozenset[str]) -> bool:
    """Whether code with these names may compute the name of a module that it imports."""
    return any(names >= importing for importing in _IMPORTING)
