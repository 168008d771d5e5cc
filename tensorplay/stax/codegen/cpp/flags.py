"""Compiler flags that belong to a target and to what the generated text promises."""

from __future__ import annotations

from ..target import Target

TIER = {
    "avx512": ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma", "-mf16c", "-mbmi2"),
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-mbmi2"),
    "portable": (),
}

# Plain arithmetic keeps eager's bits: no contraction, no re-association; integers wrap. errno and traps are not
# observed by torch either. Nothing here throws, and pointers of different types never alias by accident.
MEANING = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-fno-strict-aliasing")
LEAN = ("-O2", "-fno-exceptions", "-fno-rtti", "-fno-asynchronous-unwind-tables", "-fno-stack-protector", "-Wno-psabi")


def flags(target: Target) -> tuple[str, ...]:
    """What the compiler must be told to compile for `target`; the language, output and libraries are the build's."""
    return (*LEAN, *MEANING, *TIER[target.isa])
