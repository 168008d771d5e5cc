"""A folder of artifacts, each a file named by its key and ended by its own checksum.

In: a key and bytes.  Out: the path of a whole, checked file, or None.
Always: a file appears complete or not at all (written beside, then renamed over); a file that is truncated or
changed fails its checksum and counts as absent; one process at a time builds a key. Loaders ignore bytes behind
the end of a shared object, so the checksum stands in the file itself and can't be parted from it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ... import config
from ...errors import CompilerError

SEAL = b"stax-sha256:"


def folder() -> Path:
    """The folder of artifacts: $TP_CACHE_DIR, else the user's cache folder, else a private temporary one."""
    return _folder(config.get("cache_dir"))


@functools.cache
def _folder(chosen: str) -> Path:
    if chosen:
        path = Path(chosen).expanduser().absolute()
    else:
        import platformdirs

        path = Path(platformdirs.user_cache_dir("tensorplay"))
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(path, os.W_OK | os.X_OK):
            return path
    except OSError:
        pass
    return _temporary()


@functools.cache
def _temporary() -> Path:
    """Lives as long as the process."""
    import atexit
    import shutil

    path = tempfile.mkdtemp(prefix="tensorplay-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def path(key: str, suffix: str) -> Path:
    """Where the file of a key stands; it need not exist."""
    return folder() / key[:2] / (key + suffix)


def seal(data: bytes) -> bytes:
    """The content with its checksum behind it."""
    return data + SEAL + hashlib.sha256(data).digest()


def whole(data: bytes) -> bool:
    """Whether the content is what `seal` made."""
    body, tail = data[: -len(SEAL) - 32], data[-len(SEAL) - 32 :]
    return tail == SEAL + hashlib.sha256(body).digest()


def find(key: str, suffix: str) -> Path | None:
    """The checked file of a key, its time of use renewed; None where it is absent or damaged."""
    file = path(key, suffix)
    try:
        if whole(file.read_bytes()):
            os.utime(file)
            return file
    except OSError:
        pass
    return None


def write(file: Path, data: bytes) -> None:
    """Publishes a file in one step; its folder is made."""
    name = ""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=".new-")
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.replace(name, file)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError):
            raise CompilerError(f"cannot write to {file.parent}: {error}; TP_CACHE_DIR names another folder") from error
        raise


@contextlib.contextmanager
def locked(key: str) -> Iterator[None]:
    """One process and thread at a time for each key; freed by the system when the process dies."""
    from filelock import FileLock

    file = folder() / "locks" / key
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with FileLock(file, thread_local=False, is_singleton=False):
        yield


def entries() -> list[Path]:
    """Every file of the store, the least recently used first."""
    dated = []
    for file in folder().glob("[0-9a-f][0-9a-f]/*"):
        with contextlib.suppress(OSError):
            dated.append((file.stat().st_mtime_ns, file))
    return [file for _, file in sorted(dated)]


def size() -> int:
    """Bytes in the store."""
    total = 0
    for file in entries():
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


def clear() -> int:
    """Removes every artifact and returns how many files went; code that is loaded keeps running."""
    return sum(_remove(file) for file in entries())


def trim(limit: int) -> int:
    """Removes the least recently used files until the store holds at most `limit` bytes."""
    excess = size() - limit
    gone = 0
    for file in entries():
        if excess <= 0:
            break
        with contextlib.suppress(OSError):
            excess -= file.stat().st_size
            gone += _remove(file)
    return gone


def _remove(file: Path) -> bool:
    try:
        file.unlink()
    except OSError:
        return False
    return True
