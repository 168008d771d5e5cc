"""Every setting: its environment variable, its default, and whether it changes generated code."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .errors import TensorPlayError


@dataclass(frozen=True)
class Setting:
    """One row of the table of settings."""

    name: str
    variable: str
    default: str
    changes_code: bool
    meaning: str

    def read(self) -> str:
        """The current value, as text; read anew each time."""
        return os.environ.get(self.variable, self.default)


SETTINGS = {
    s.name: s
    for s in (
        Setting("cache_dir", "TP_CACHE_DIR", "", False, "folder of compiled artifacts; empty: the user's cache folder"),
        Setting("cache", "TP_CACHE", "1", False, "0: keep no artifact, build each anew"),
        Setting("cache_tag", "TP_CACHE_TAG", "", False, "part of every key: another tag is another set of artifacts"),
        Setting("cache_bytes", "TP_CACHE_BYTES", "2147483648", False, "bytes kept, least recently used go; 0: all"),
        Setting("cpu_isa", "TP_CPU_ISA", "", True, "vector tier: avx512, avx2 or portable; empty: the widest here"),
        Setting("cxx", "CXX", "", True, "C++ compiler; empty: the first of g++, c++, clang++, ziglang that is there"),
        Setting("native", "TP_NATIVE", "1", False, "0: calls go through Python, without the C extension"),
        Setting("version_limit", "TP_VERSION_LIMIT", "8", False, "live versions of one compiled function"),
        Setting("compile_limit", "TP_COMPILE_LIMIT", "256", False, "compilations of one compiled function"),
    )
}


def get(name: str) -> str:
    """The current value of a setting."""
    return SETTINGS[name].read()


def number(name: str) -> int:
    """The current value of a setting that is a whole number."""
    text = get(name)
    try:
        return int(text)
    except ValueError:
        raise TensorPlayError(f"{SETTINGS[name].variable}={text!r} is not a whole number") from None
