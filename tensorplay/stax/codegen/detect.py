"""Which machine this is: the vector tier and the caches that decisions depend on.

In: the wish of the user (`cpu_isa`, or TP_CPU_ISA, or nothing).  Out: a `Target`.  No compiler runs: torch has read
cpuid already, and /proc or sysfs names the rest.
"""

from __future__ import annotations

import functools
import pathlib

import torch

from ... import config
from ...errors import UnsupportedError
from .target import Target

BYTES = {"avx512": 64, "avx2": 32, "portable": 16}  # widest first
_NEEDS = {
    "avx512": {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx2", "fma", "f16c"},
    "avx2": {"avx2", "fma", "f16c"},
    "portable": set(),
}


@functools.cache
def _flags() -> frozenset[str]:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    known = torch.backends.cpu.get_cpu_capability()  # no /proc: what torch found, one of its tiers
    tier = {"AVX512": "avx512", "AVX2": "avx2"}.get(known, "portable")
    return frozenset(_NEEDS[tier])


@functools.cache
def tiers() -> tuple[str, ...]:
    """The tiers that this machine runs, widest first."""
    return tuple(name for name, needs in _NEEDS.items() if needs <= _flags())


@functools.cache
def _cache_bytes(level: int, otherwise: int) -> int:
    for entry in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            kind, size = (entry / "type").read_text().strip(), (entry / "size").read_text().strip()
            if int((entry / "level").read_text()) == level and kind in ("Data", "Unified") and size.endswith("K"):
                return int(size[:-1]) * 1024
        except (OSError, ValueError):
            continue
    return otherwise


def detect(isa: str | None = None) -> Target:
    """The target for code that runs here, at the tier `isa` (default: the setting, else the widest)."""
    isa = isa or config.get("cpu_isa") or tiers()[0]
    if isa not in BYTES:
        raise UnsupportedError(f"cpu_isa={isa!r}: the tiers are {', '.join(BYTES)}")
    if isa not in tiers():
        raise UnsupportedError(f"cpu_isa={isa!r}: this machine runs {', '.join(tiers())}")
    return Target("cpu", isa, BYTES[isa], _cache_bytes(1, 32 * 1024), _cache_bytes(2, 512 * 1024))
