"""The optional C extension: the first level of dispatch and the launch (algorithm 2.1).

In: nothing.  Out: `native`, the module, or None; `Dispatch`, the base of the compiled object, in C or in Python.
Always: without it every call gives the same, some microseconds later. It is looked for in the package, then in the
cache folder; where it is in neither, a later process finds it there (`build_later`).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from . import config

VERSION = 7  # of the interface between the two; another number is another build
SOURCE = Path(__file__).with_name("csrc") / "native.c"
FLAGS = ("is_neg", "is_conj", "is_inference", "has_names")  # what tells tensors of equal metadata apart
# Functions of torch's stable ABI that read a tensor, in the order of csrc/tensor.h; the last, of C++, may be missing.
STABLE = tuple(
    f"aoti_torch_get_{name}" for name in ("dim", "sizes", "strides", "dtype", "device_type", "device_index", "data_ptr")
)
REQUIRES_GRAD = "_ZNK3c1010TensorImpl13requires_gradEv"


def built() -> Path:
    """Where a build of this source for this interpreter stands in the cache folder."""
    folder = config.get("cache_dir")
    if not folder:
        import platformdirs

        folder = platformdirs.user_cache_dir("tensorplay")
    text = b"".join(path.read_bytes() for path in sorted(SOURCE.parent.glob("*.[ch]")))
    tag = hashlib.sha256(text).hexdigest()[:16]
    return Path(folder).expanduser().absolute() / f"native-{tag}{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def _found() -> ModuleType | None:
    try:
        from . import _native

        if getattr(_native, "VERSION", 0) == VERSION:
            return _native
    except ImportError:
        pass
    try:
        path = built()
        if not path.exists():
            return None
        loader = importlib.machinery.ExtensionFileLoader("tensorplay._native", str(path))
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
        loader.exec_module(module)
        return module if getattr(module, "VERSION", 0) == VERSION else None
    except (ImportError, OSError):
        return None


def _load() -> Any:
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if config.get("native") == "0" or exchange is None:
        return None
    module = _found()
    if module is not None:
        flags = tuple(name for name in FLAGS if hasattr(torch.Tensor, name))
        try:
            module.setup(torch.Tensor, torch.nn.Parameter, exchange, flags)
        except (RuntimeError, AttributeError):  # a torch whose tensors cannot be read this way
            return None
        _read_directly(module)
    return module


def _read_directly(module: Any) -> bool:
    """Turns on the direct reader where what it reads of every sample is what Python says."""
    try:
        library = ctypes.CDLL(torch._C.__file__)
        functions = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in STABLE]
        functions.append(ctypes.cast(getattr(library, REQUIRES_GRAD, None), ctypes.c_void_p).value or 0)
        tensors = samples()
        rows = tuple([(t, t._cdata, torch._C._dispatch_keys(t).raw_repr()) for t in tensors])
        if module.direct(rows, tuple(functions)) and agrees(module.facts, tensors):
            return True
        module.direct((), ())
    except (OSError, AttributeError, TypeError, RuntimeError):  # a torch without these names
        module.direct((), ())
    return False


def samples() -> list[torch.Tensor]:
    """Plain tensors of every kind: layouts, dtypes, offsets, conjugate and negative views, autograd, inference."""
    with torch.inference_mode(False), torch.enable_grad():
        real = [torch.zeros(2, 3, dtype=t, device="cpu") for t in (torch.float32, torch.float32, torch.float64, torch.int64, torch.bool)]
        c = torch.zeros(3, 2, dtype=torch.complex64, device="cpu")
        leaf = real[0].clone().requires_grad_()
        found = [
            *real, real[0].t(), real[0][1:], real[0][0, 0], real[0][:, :0], real[0].expand(2, 1, 1, 1, 2, 2, 3), c, c.conj(), c.conj().imag,
            leaf, leaf * 2, leaf.detach(), leaf[0], torch.nn.Parameter(real[0]), torch.nn.Parameter(real[0], requires_grad=False),
        ]  # fmt: skip
    with torch.inference_mode():
        return [*found, torch.zeros(4, device="cpu", dtype=torch.float32)]


def agrees(facts: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether `facts` says of each tensor what Python says; its numbers for dtypes differ as the dtypes do."""
    numbers: dict[torch.dtype, int] = {}
    for t in tensors:
        found = facts(t)
        expected = (tuple(t.shape), t.stride(), t.data_ptr(), t.requires_grad, torch._C._dispatch_keys(t).raw_repr())
        if found is None or (*found[:2], *found[5:]) != expected or numbers.setdefault(t.dtype, found[2]) != found[2]:
            return False
    return len({*numbers.values()}) == len(numbers)


def build() -> Path:
    """Compiles the extension into the cache folder; raises OSError or CalledProcessError where it cannot."""
    target = built()
    if not target.exists():
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, suffix=".so")
        os.close(handle)
        compiler = os.environ.get("CC") or "cc"
        include = sysconfig.get_paths()["include"]
        command = [compiler, "-O2", "-shared", "-fPIC", f"-I{include}", str(SOURCE), "-o", name]
        if sys.platform == "darwin":
            command += ["-undefined", "dynamic_lookup"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    return target


_LATER = threading.Lock()


def build_later() -> None:
    """Builds the extension beside the program, once a process, so that a later process finds it."""
    if native is not None or config.get("native") == "0" or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        return
    if _LATER.acquire(blocking=False):  # never released: one attempt
        threading.Thread(target=_try_build, name="tensorplay-native", daemon=True).start()


def _try_build() -> None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no compiler: everything works without it
        build()


native: Any = _load()


def fingerprint(t: torch.Tensor) -> bytes | None:
    """A tensor's metadata as the extension compares it; None where it cannot."""
    return None if native is None else native.fingerprint(t)


class _PythonDispatch:
    """The base of the compiled object where the extension is not there."""

    checks: tuple[Any, ...] = ()
    level1 = level2 = level3 = 0

    def _call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(args, kwargs)


Dispatch: Any = _PythonDispatch if native is None else native.Dispatch
