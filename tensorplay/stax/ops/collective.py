"""Collectives as library operators: each exchanges and waits, so that what it gives and reads is memory like any other.

They run in the order of the program, in every process the same, and whether or not anybody reads the result.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...collectives import name_of
from .row import ROWS, Row

_LIBRARY = torch.library.Library("tensorplay", "FRAGMENT")


@functools.cache
def waiting(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The operator that does what a functional collective does, and waits for the result."""
    name = name_of(op)
    schema = str(op._schema).partition("(")[2].replace("SymInt", "int").replace("Any ", "str ")
    _LIBRARY.define(f"{name}({schema}")

    def run(*args: Any) -> Any:
        found, wait = op(*args), torch.ops._c10d_functional.wait_tensor
        return [wait(t) for t in found] if isinstance(found, list) else wait(found)

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    packet = getattr(torch.ops.tensorplay, name)
    ROWS[packet] = Row("library", None, ordered=True)
    return packet.default
