"""What runs during one capture: the code that executes, and calls into C that read or change the world outside.

In: callbacks for a frame whose code, or function, may be new, for state that was read, and for refusing.
Out: `ran`, the code that ran; `every`, whether attribute names were computed; `names`, those that could be told.
Always: the callbacks come before the code or the call runs; a profiler that was set keeps seeing everything, and one
that cannot be chained is left alone (`watching` is False, and the static walk stands in).
"""

from __future__ import annotations

import dis
import functools
import io
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from ..key.sources import Environment, Result, Root, Source
from .kinds import OURS, file_of, is_installed_file, is_library_file, is_torch_file

# calls into these modules depend on, or change, what is outside of the program; names that are harmless
OUTSIDE: dict[str, tuple[str, frozenset[str]]] = {
    "time": ("uses the clock", frozenset(("gmtime", "mktime", "strftime", "strptime"))),
    "posix": ("asks the operating system", frozenset(("fspath", "getpid", "cpu_count", "urandom_is_patched"))),
    "nt": ("asks the operating system", frozenset(("fspath", "getpid", "cpu_count"))),
    "_random": ("draws from Python's random module", frozenset()),
    "_io": ("uses a file", frozenset(("StringIO", "BytesIO", "text_encoding"))),
    "_socket": ("uses the network", frozenset()),
    "select": ("waits for input", frozenset()),
    "sys": (
        "uses the interpreter's own state",
        frozenset(("intern", "exc_info", "getsizeof", "_getframe", "is_finalizing", "exception", "getdefaultencoding",
                   "getfilesystemencoding", "getfilesystemencodeerrors", "audit", "unraisablehook", "excepthook",
                   "displayhook", "_getframemodulename")),
    ),
    "_uuid": ("draws random bytes", frozenset()),
    "_queue": ("uses a queue", frozenset()),
    "gc": ("asks the garbage collector", frozenset(("collect", "is_tracked"))),
}  # fmt: skip
_NAMED = {"getattr", "hasattr", "setattr", "delattr"}  # builtins that take an attribute's name
_ALL_NAMES = {"vars", "dir", "globals"}  # builtins that give every name
_LISTING = {"dir": "the names of an object and its classes", "globals": "all globals of a module"}
# calls of the program's own code that depend on what no key holds
_ASKING = {
    "locked": "asks whether a lock is held, which a graph does not repeat",
    "get_ident": "asks which thread runs, which a graph does not repeat",
    "__subclasses__": "asks for the subclasses of a class, which the key does not hold",
    "initial_seed": "reads the seed of a generator, which a graph does not repeat",
}
_CLOCK_METHODS = {"now", "utcnow", "today"}
_IDENTITY = "asks for the identity of an object, which the key does not hold"
# files whose calls into C are their own affair: reading source lines for a message, importing
_QUIET_FILES = ("<frozen importlib", "<frozen zipimport", "<frozen posixpath", "<frozen genericpath", "<frozen os")
_QUIET_NAMES = frozenset(("warnings.py", "linecache.py", "traceback.py", "tokenize.py", "inspect.py"))
_BACKENDS = os.path.join(os.path.dirname(torch.__file__), "backends") + os.sep
_RECORD = logging.LogRecord.__init__.__code__  # the time in a record is the time when it was made
_MISSING = object()

QUIET, NORMAL, SETTINGS = range(3)


def _attention(code: types.CodeType) -> int:
    """How closely calls into C from this code are looked at."""
    filename = code.co_filename
    if filename.startswith(_BACKENDS):
        return SETTINGS
    if is_torch_file(filename) or filename.startswith(_QUIET_FILES) or code is _RECORD:
        return QUIET
    return QUIET if os.path.basename(filename) in _QUIET_NAMES else NORMAL


def _own(frame: types.FrameType) -> bool:
    """Whether the program's own code runs in the frame, not an installed package's."""
    return not is_installed_file(file_of(frame.f_code, frame.f_globals))


class Execution:
    """Watches one run on one thread."""

    def __init__(
        self,
        first: Callable[[types.FrameType, bool], bool],
        named: Callable[[str], None],
        computed: Callable[[types.FrameType, bool], None],
        read: Callable[[Source, Any], None],
        refuse: Callable[[str], None],
    ) -> None:
        self.first, self.named, self.computed, self.read, self.refuse = first, named, computed, read, refuse
        self.ran: dict[types.CodeType, int] = {}  # with the attention that each deserves
        self.every = False
        self.names: set[str] = set()
        self.watching = False
        self.paused = False
        self._settings: set[Any] = set()
        self._import: types.FrameType | None = None  # the outermost import that is under way
        self._shared: set[types.CodeType] = set()  # code that several functions with state of their own may hold
        self._seen: dict[tuple[types.CodeType, int], None] = {}

    @property
    def codes(self) -> set[types.CodeType]:
        """The code of the function and its libraries that ran, without our own."""
        return set(self.ran)

    @contextmanager
    def watch(self) -> Iterator[None]:
        outer = sys.getprofile()
        if outer is not None and not isinstance(outer, (types.FunctionType, types.MethodType)):
            yield
            return
        on_event = self._on_event
        if outer is not None:
            chained = outer

            def both(frame: types.FrameType, event: str, argument: Any) -> None:
                chained(frame, event, argument)
                on_event(frame, event, argument)

            sys.setprofile(both)
        else:
            sys.setprofile(on_event)
        self.watching = True
        try:
            yield
        finally:
            sys.setprofile(outer)

    def _on_event(self, frame: types.FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if self.paused:
            return
        if self._import is not None:
            if event == "return" and frame is self._import:
                self._import = None
        elif event == "call":
            if code.co_name == "_find_and_load" and code.co_filename.startswith("<frozen importlib"):
                self._import = frame  # what a module's own code does, it does once
                return
            if (code, id(frame.f_globals)) not in self._seen:
                self._seen[code, id(frame.f_globals)] = None
                if file_of(code, frame.f_globals).startswith(OURS):
                    return
                self.ran.setdefault(code, _attention(code))
                if self.first(frame, True):
                    self._shared.add(code)
                if "__dict__" in code.co_names and _own(frame):
                    self.every = True  # its keys are names that code may compute
                    self.computed(frame, False)
            elif code in self._shared:
                self.first(frame, False)
            if code in _WATCHED:
                _WATCHED[code](self, frame)
        elif event == "c_call":
            attention = self.ran.get(code)
            if attention is None:  # a frame that was open before the watch began
                attention = QUIET
            if attention:
                self._c_call(frame, argument, attention)

    def _c_call(self, frame: types.FrameType, function: Any, attention: int) -> None:
        owner = getattr(function, "__self__", None)
        name = function.__name__
        if isinstance(owner, types.ModuleType) or owner is None:
            module = owner.__name__ if owner is not None else function.__module__
            if module == "builtins":
                self._builtin(frame, name)
            elif module == "_thread" and name in _ASKING:
                self._asked(frame, name)
            elif module in OUTSIDE:
                self._outside(module, name)
            elif module is not None and module.startswith("torch._C"):
                self._setting(function, name, attention)
            return
        kind = owner if isinstance(owner, type) else type(owner)
        if name in _ASKING:
            self._asked(frame, name)
        if name == "apply" and issubclass(kind, torch.autograd.Function):
            self.refuse("uses a reference to Function.apply that was taken before, which capture cannot see on this torch")
        module = kind.__module__
        if isinstance(owner, io.IOBase):
            self._outside("_io", name)
        elif module in ("random", "_random"):
            self._outside("_random", name)
        elif module in OUTSIDE:
            self._outside(module, name)
        elif module == "datetime" and owner is kind and name in _CLOCK_METHODS:
            self.refuse("uses the clock, which a graph does not repeat")

    def _outside(self, module: str, name: str) -> None:
        reason, harmless = OUTSIDE[module]
        if name not in harmless:
            self.refuse(f"{module.lstrip('_')}.{name}() {reason}, which a graph does not repeat")

    def _builtin(self, frame: types.FrameType, name: str) -> None:
        if name in _NAMED:
            found = attribute_name(frame)
            if found is None:
                self.every = True
            else:
                self.names.add(found)
            if _own(frame):
                self.computed(frame, True) if found is None else self.named(found)
        elif name in _ALL_NAMES:
            self.every = True
            if _own(frame):
                self.computed(frame, name == "dir")
                if name in _LISTING:
                    self.refuse(f"{name}() lists {_LISTING[name]}, which the key does not hold")
        elif name == "id" and self.ran.get(frame.f_code) == NORMAL and not is_library_file(frame.f_code.co_filename):
            self.refuse(f"id() {_IDENTITY}")
        elif name in ("open", "input", "breakpoint"):
            self.refuse(f"{name}() uses a file, which a graph does not repeat")

    def _asked(self, frame: types.FrameType, name: str) -> None:
        if _own(frame):
            self.refuse(f"{name}() {_ASKING[name]}")

    def _setting(self, function: Any, name: str, attention: int) -> None:
        """Settings of torch that the function reads are state; those that it changes cannot stand in a graph."""
        if function in self._settings:
            return
        if name == "get_autocast_dtype":
            self.read_autocast()
        if name.startswith(("_get_", "get_num_")) and (attention == SETTINGS or name.startswith("get_num_")):
            try:
                value = function()
            except TypeError:
                return
            if isinstance(value, (bool, int, float, str, type(None))):
                self._settings.add(function)
                self.read(Result(Root(function, f"torch._C.{name}")), value)
        elif (name.startswith(("set_num_", "_set_")) and attention == SETTINGS) or name.startswith("set_num_"):
            self.refuse(f"{name}() changes a setting of the whole process")

    def read_autocast(self) -> None:
        if torch.get_autocast_dtype in self._settings:
            return
        self._settings.add(torch.get_autocast_dtype)
        for device in ("cpu", "cuda"):
            ask = functools.partial(torch.get_autocast_dtype, device)
            self.read(Result(Root(ask, f"torch.get_autocast_dtype({device!r})")), ask())

    def read_level(self, logger: logging.Logger, *level: Any) -> None:
        """What a logger lets through is state: a graph logs nothing, and nothing may be missing."""
        if (logger, *level) not in self._settings and all(type(item) is int for item in level):
            self._settings.add((logger, *level))
            ask = functools.partial(logger.isEnabledFor, *level) if level else logger.getEffectiveLevel
            name = f"logging.getLogger({logger.name!r}).{'isEnabledFor' if level else 'getEffectiveLevel'}"
            self.read(Result(Root(ask, f"partial({name}, {level[0]})" if level else name)), ask())


def attribute_name(frame: types.FrameType) -> str | None:
    """The attribute's name in a call of getattr and its like that the frame is making; None where it cannot be told.

    Read from the instructions before the call: a constant, a variable, or attributes of a variable.
    """
    instructions = _instructions(frame.f_code)
    at = next((k for k, i in enumerate(instructions) if i.offset == frame.f_lasti), None)
    if at is None:
        return None
    while at >= 0 and instructions[at].opname not in ("CALL", "CALL_FUNCTION", "CALL_KW"):
        at -= 1
    if at < 0 or type(instructions[at].arg) is not int:
        return None
    count = instructions[at].arg
    position: int | None = at - 1
    for index in range(count - 1, 0, -1):  # arguments from the last one to the name
        value, position = _argument(frame, instructions, position)
        if position is None:
            return None
        if index == 1:
            return value if type(value) is str else None
    return None


_SKIPPED = ("PRECALL", "CACHE", "EXTENDED_ARG", "NOP", "KW_NAMES")
_VARIABLES = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_NAME", "LOAD_CLASSDEREF")
_Read = tuple[Any, int | None]
_UNKNOWN: _Read = (_MISSING, None)


def _argument(frame: types.FrameType, instructions: list[dis.Instruction], position: int) -> _Read:
    """The value of the argument whose instructions end at `position`, and where those of the one before it end."""
    while position >= 0 and instructions[position].opname in _SKIPPED:
        position -= 1
    if position < 0:
        return _UNKNOWN
    item = instructions[position]
    name, before = item.opname, position - 1
    if name == "LOAD_ATTR":
        value, before = _argument(frame, instructions, before)  # type: ignore[assignment]
        return _plain_attribute(value, item.argval), before
    if name in ("LOAD_CONST", "LOAD_SMALL_INT"):
        return item.argval, before
    if name in _VARIABLES:
        return frame.f_locals.get(item.argval, _MISSING), before
    if name == "LOAD_GLOBAL":
        return frame.f_globals.get(item.argval, _MISSING), before
    if name == "FORMAT_SIMPLE" or (name == "FORMAT_VALUE" and item.arg == 0):
        value, before = _argument(frame, instructions, before)  # type: ignore[assignment]
        return value if type(value) is str else _MISSING, before
    where: int | None
    if name == "BINARY_SUBSCR" or (name == "BINARY_OP" and item.argrepr == "[]"):
        key, where = _argument(frame, instructions, before)
        if where is None:
            return _UNKNOWN
        value, where = _argument(frame, instructions, where)
        plain = type(value) in (list, tuple, dict) and type(key) in (int, str)
        try:
            return value[key] if plain else _MISSING, where
        except LookupError:
            return _MISSING, where
    if name == "BUILD_STRING" and item.arg is not None:
        parts: list[Any] = []
        where = before
        for _ in range(item.arg):
            if where is None:
                return _UNKNOWN
            value, where = _argument(frame, instructions, where)
            parts.append(value)
        return "".join(reversed(parts)) if all(type(p) is str for p in parts) else _MISSING, where
    return _UNKNOWN


def _plain_attribute(value: Any, name: str) -> Any:
    """An attribute that lies in the object itself, so that reading it runs no code."""
    held = getattr(value, "__dict__", None)
    if type(held) is dict and name in held:
        return held[name]
    member = getattr(type(value), name, None)
    return member.__get__(value) if isinstance(member, types.MemberDescriptorType) else _MISSING


def _instructions(code: types.CodeType) -> list[dis.Instruction]:
    found = _LISTS.get(code)
    if found is None:
        found = _LISTS[code] = list(dis.get_instructions(code))
    return found


_LISTS: dict[types.CodeType, list[dis.Instruction]] = {}


def _reads_variable(execution: Execution, frame: types.FrameType) -> None:
    key = frame.f_locals.get("key")
    if isinstance(key, str):
        execution.read(Environment(key), os.environ.get(key))


def _reads_environment(execution: Execution, frame: types.FrameType) -> None:
    execution.refuse("reads the whole environment of the process")


def _writes_environment(execution: Execution, frame: types.FrameType) -> None:
    execution.refuse("changes the environment of the process")


def _asks_for_level(execution: Execution, frame: types.FrameType) -> None:
    execution.read_level(frame.f_locals["self"], frame.f_locals["level"])


def _asks_for_effective_level(execution: Execution, frame: types.FrameType) -> None:
    if frame.f_back is None or frame.f_back.f_code is not logging.Logger.isEnabledFor.__code__:
        execution.read_level(frame.f_locals["self"])


def _handles_a_record(execution: Execution, frame: types.FrameType) -> None:
    execution.refuse("hands a record to a handler of logging, past its logger, which a graph does not repeat")


def _asks_for_errors(execution: Execution, frame: types.FrameType) -> None:
    execution.read(Result(Root(numpy.geterr, "numpy.geterr")), numpy.geterr())


def _asked_by_the_program(reason: str) -> Callable[[Execution, types.FrameType], None]:
    """Refuses a function of a library that code of the program calls itself; libraries ask for their own sake."""

    def refuse(execution: Execution, frame: types.FrameType) -> None:
        caller = frame.f_back
        if caller is not None and _own(caller):
            execution.refuse(f"{frame.f_code.co_name}() {reason}, which a graph does not repeat")

    return refuse


_PATHS = (os.path.exists, os.path.lexists, os.path.isfile, os.path.isdir, os.path.islink, os.path.getsize, os.path.getmtime)
_THREADS = (threading.current_thread, threading.active_count, threading.enumerate)
_FINALIZER: Any = (weakref.finalize.alive.fget, *map(vars(weakref.finalize).get, ("__init__", "__call__", "detach", "peek")))  # type: ignore[attr-defined]
_ENVIRON: Any = type(os.environ)
_WATCHED: dict[types.CodeType, Callable[[Execution, types.FrameType], None]] = {
    _ENVIRON.__getitem__.__code__: _reads_variable,
    _ENVIRON.__setitem__.__code__: _writes_environment,
    _ENVIRON.__delitem__.__code__: _writes_environment,
    _ENVIRON.__iter__.__code__: _reads_environment,
    _ENVIRON.copy.__code__: _reads_environment,
    logging.Logger.isEnabledFor.__code__: _asks_for_level,
    logging.Logger.getEffectiveLevel.__code__: _asks_for_effective_level,
    logging.Handler.handle.__code__: _handles_a_record,  # loggers do so after the capture (messages.py)
    numpy.geterr.__code__: _asks_for_errors,
    torch.autocast.__init__.__code__: lambda execution, frame: execution.read_autocast(),  # what it takes where none is given
    **{f.__code__: _asked_by_the_program("uses a finalizer") for f in _FINALIZER},
    torch.initial_seed.__code__: _asked_by_the_program("reads the seed of the generator"),
    **{f.__code__: _asked_by_the_program("asks the operating system") for f in _PATHS if hasattr(f, "__code__")},
    **{f.__code__: _asked_by_the_program("asks which thread runs") for f in _THREADS},
}
