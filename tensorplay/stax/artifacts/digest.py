"""The name of an artifact: a hash of everything that it is built from.

In: the source, the target, the compiler.  Out: a hexadecimal key.
Always: whatever can change the machine code is hashed, so an entry never needs to be invalidated; nothing else is
(no time, no order of a dictionary, no address), so equal sources have equal keys in every process.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

import torch

from ... import config
from ...version import VERSION
from ..codegen.target import Source, Target
from .toolchain import Compiler

HEADERS = Path(__file__).parent.parent / "codegen" / "cpp"
FORMAT = "1"  # of the store and of the calling convention of an entry


@functools.cache
def header_text() -> str:
    """The text of our own headers, which every C++ source may include."""
    return "".join(f"{path.name}\n{path.read_text()}" for path in sorted(HEADERS.glob("*.h")))


def meaning(text: str) -> str:
    """C++ without its comments: the same kernels from other lines of the user's program are the same artifact."""
    return re.sub(r"^([^\"'\n]*?)[ \t]*//[^\n]*", r"\1", text, flags=re.MULTILINE)


def key(source: Source, target: Target, compiler: Compiler) -> str:
    """The key of the artifact that `compiler` builds from `source` for `target`."""
    h = hashlib.sha256()
    for part in (
        FORMAT,
        VERSION,
        torch.__version__,
        source.language,
        meaning(source.text),
        header_text(),
        target.device,
        target.isa,
        *source.flags,
        *compiler.flags,
        *compiler.command,
        compiler.version,
        config.get("cache_tag"),
    ):
        data = part.encode()
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.hexdigest()[:40]
