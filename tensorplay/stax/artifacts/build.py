"""From source to loaded code, at most one compilation for each key on a machine.

In: a `Source` and its `Target`.  Out: an `Artifact` whose entries can be called.
Always: an artifact is built by one process while others wait for it; a damaged one is built again; the code stays
loaded for as long as its `Artifact` lives.
"""

from __future__ import annotations

import ctypes
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import config, record
from ...errors import CompilerError
from ..codegen.target import Source, Target
from . import digest, store, toolchain


@dataclass(frozen=True, eq=False)
class Artifact:
    """Code in this process. `entries` maps each name to `int entry(void *const *pointers, int threads)`."""

    key: str
    path: Path | None  # None: there was nothing to build
    built: bool  # whether this process ran the compiler for it
    seconds: float  # from source to loaded code
    entries: dict[str, Any] = field(default_factory=dict)

    def address(self, entry: str) -> int:
        """Where an entry lies in memory."""
        return ctypes.cast(self.entries[entry], ctypes.c_void_p).value or 0


_LOADED: weakref.WeakValueDictionary[str, Artifact] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def build(source: Source, target: Target) -> Artifact:
    """The artifact of a C++ source: loaded already, found on disk, or compiled now."""
    if not source.entries:
        return Artifact("", None, False, 0.0)
    start = time.perf_counter()
    compiler = toolchain.find()
    key = digest.key(source, target, compiler)
    kept = config.get("cache") != "0"
    with _LOCK:
        artifact = _LOADED.get(key) if kept else None
    if artifact is not None:
        return artifact
    built = False
    artifact = _kept(key, source, start) if kept else None
    if artifact is None:
        with store.locked(key):
            artifact = _kept(key, source, start) if kept else None
            if artifact is None:
                built = True
                artifact = _load(key, _compile(key, source, compiler, start), source, True, start)
                if artifact is None:
                    raise CompilerError(
                        f"{compiler} built a shared object that does not load: {store.path(key, '.so')}"
                    )
        if built and (limit := config.number("cache_bytes")):
            store.trim(limit)
    if not kept:
        return artifact
    with _LOCK:
        return _LOADED.setdefault(key, artifact)


def _kept(key: str, source: Source, start: float) -> Artifact | None:
    file = store.find(key, ".so")
    return None if file is None else _load(key, file, source, False, start)


def _compile(key: str, source: Source, compiler: toolchain.Compiler, start: float) -> Path:
    damaged = store.path(key, ".so").exists()
    text = store.path(key, ".cpp")
    store.write(text, source.text.encode())
    with tempfile.TemporaryDirectory(prefix="stax-") as scratch:
        output = Path(scratch) / "out.so"
        toolchain.compile(compiler, text, output, source.flags, digest.HEADERS)
        file = store.path(key, ".so")
        store.write(file, store.seal(output.read_bytes()))
    record.emit("compile", key, compiler=str(compiler), seconds=time.perf_counter() - start, damaged=damaged)
    return file


def _load(key: str, file: Path, source: Source, built: bool, start: float) -> Artifact | None:
    """None where the loader refuses the file or an entry is missing."""
    try:
        library = ctypes.CDLL(str(file), mode=ctypes.DEFAULT_MODE)
    except OSError:
        return None
    entries = {}
    try:
        for name in source.entries:
            entry = library[name]
            entry.argtypes = (ctypes.c_void_p, ctypes.c_int)
            entry.restype = ctypes.c_int
            entries[name] = entry
    except AttributeError:
        _unload(library._handle)
        return None
    artifact = Artifact(key, file, built, time.perf_counter() - start, entries)
    weakref.finalize(artifact, _unload, library._handle).atexit = False
    return artifact


def _unload(handle: int) -> None:
    import _ctypes

    _ctypes.dlclose(handle)
