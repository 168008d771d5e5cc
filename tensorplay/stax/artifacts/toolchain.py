"""The C++ compiler: found, identified, run.

In: a source file.  Out: a shared object, or a `CompilerError` that holds what the compiler said.
Always: finding and identifying a compiler that was seen before starts no process, so a warm start runs none.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from ... import config
from ...errors import CompilerError
from . import store

RUNS = 0  # compilations that this process started
NAMES = ("g++", "c++", "clang++")
FLAGS = (
    "-x", "c++", "-std=c++17", "-O2", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fno-exceptions", "-fno-rtti", "-fno-asynchronous-unwind-tables", "-w",
)  # fmt: skip
SECONDS = 600  # after which a compilation counts as failed


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: how it is called and what it calls itself."""

    command: tuple[str, ...]
    version: str

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of every compilation; those of a target come behind them."""
        return FLAGS

    def libraries(self, code: bytes) -> tuple[str, ...]:
        """What object code is linked with: torch's OpenMP run time (so there is one pool of threads), libm, the
        compiler's own functions, and libtorch_cpu for SLEEF, whose long table of symbols costs 40 ms to read."""
        torch_own = [library("libgomp*.so*"), library("libtorch_cpu.so") if b"Sleef_" in code else None]
        own = () if "zig" in self.version or "clang" in self.version else ("-lgcc",)
        return ("-Wl,--as-needed", *(str(path) for path in torch_own if path), "-lm", *own)

    def __str__(self) -> str:
        return f"{shlex.join(self.command)} ({self.version})"


def library(pattern: str) -> Path | None:
    """A shared library that torch brings along; None where it does not, and the process has it from elsewhere."""
    root = Path(torch.__file__).parent
    return next((path for folder in (root / "lib", root.parent / "torch.libs") for path in folder.glob(pattern)), None)


def find() -> Compiler:
    """The compiler named by $CXX, else the first of g++, c++, clang++ and the ziglang package that is there."""
    return _find(config.get("cxx"), os.environ.get("PATH", ""))


@functools.cache
def _find(chosen: str, path: str) -> Compiler:
    if chosen:
        command = shlex.split(chosen)
        program = shutil.which(command[0], path=path)
        if program is None:
            raise CompilerError(f"$CXX is {chosen!r}, but there is no such program; unset it or install the compiler")
        return identify((program, *command[1:]))
    for name in NAMES:
        program = shutil.which(name, path=path)
        if program is not None:
            return identify((program,))
    if importlib.util.find_spec("ziglang") is not None:
        return identify((sys.executable, "-m", "ziglang", "c++"))
    raise CompilerError(
        f"no C++ compiler: looked for $CXX, {', '.join(NAMES)} and the Python package ziglang; "
        "install g++, or run `pip install ziglang`"
    )


def identify(command: tuple[str, ...]) -> Compiler:
    """The compiler with its version, which is remembered on disk by the program's path, time and size."""
    real = os.path.realpath(command[0])
    stat = os.stat(real)
    stamp = f"{shlex.join(command)}|{real}|{stat.st_mtime_ns}|{stat.st_size}"
    path = store.folder() / "compilers.json"
    try:
        known = json.loads(path.read_text())
        if isinstance(known[stamp], str):
            return Compiler(command, known[stamp])
    except (OSError, ValueError, KeyError, TypeError):
        known = {}
    try:
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerError(f"cannot run the C++ compiler {shlex.join(command)}: {error}") from error
    if said.returncode:
        raise CompilerError(f"{shlex.join(command)} --version failed:\n{said.stdout}{said.stderr}")
    version = next(iter(said.stdout.splitlines()), "").strip()
    known = known if isinstance(known, dict) else {}
    store.write(path, json.dumps({**known, stamp: version}, indent=1).encode())
    return Compiler(command, version)


def compile(compiler: Compiler, source: Path, output: Path, flags: tuple[str, ...], headers: Path) -> None:
    """Builds the shared object `output` from the file `source`."""
    global RUNS
    RUNS += 1
    code = output.with_suffix(".o")
    run(compiler, source, [*compiler.flags, *flags, f"-I{headers}", "-c", str(source), "-o", str(code)])
    if not code.exists():
        raise CompilerError(f"{compiler} says nothing and writes no object file; is it a C++ compiler?")
    libraries = compiler.libraries(code.read_bytes())
    run(compiler, source, ["-shared", "-nostdlib", str(code), "-o", str(output), *libraries])


def run(compiler: Compiler, source: Path, arguments: list[str]) -> None:
    """One step of building `source`."""
    line = [*compiler.command, *arguments]
    try:
        ran = subprocess.run(line, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerError(f"cannot run the C++ compiler {compiler}: {error}\nsource: {source}") from error
    if ran.returncode:
        raise CompilerError(
            f"{compiler} refused generated code (exit status {ran.returncode})\n"
            f"source: {source}\ncommand: {shlex.join(line)}\n{ran.stdout}{ran.stderr}"
        )
