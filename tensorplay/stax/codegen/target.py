"""What code is generated for, and the generated code itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A machine: the device kind and, on a CPU, the vector tier and cache sizes that decisions depend on."""

    device: str = "cpu"  # 'cpu' or 'cuda'
    isa: str = "portable"  # 'avx512', 'avx2', 'portable' (16-byte vectors, any machine)
    vector_bytes: int = 16
    l1: int = 32 * 1024
    l2: int = 512 * 1024


@dataclass(frozen=True)
class Check:
    """A run-time check that a kernel makes: code k of an entry point means checks[k - 1] failed."""

    message: str
    origin: str  # operator-graph node


@dataclass(frozen=True)
class Source:
    """Text of one compilation unit.

    For C++: `entries` are functions `extern "C" int entry(void *const *p, int threads)`, one for each run of
    kernels in `Plan.segments`; p[i] is the pointer of `Plan.slots[i]`; the result is 0, or 1 + the index of the
    check that failed. Nothing of the caller is written before the checks that guard it have passed.
    """

    language: str  # 'cpp' or 'triton'
    text: str
    entries: tuple[str, ...]
    kernels: dict[str, str]  # kernel name -> its own text, for people
    checks: tuple[Check, ...] = ()
    flags: tuple[str, ...] = ()  # compiler flags that belong to the target (such as -mavx2 -mfma)
