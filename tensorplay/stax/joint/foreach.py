"""Operators on lists of tensors: each is one operator a tensor, which fuses with its neighbours.

In: a `_foreach_` overload without writes.  Out: the function that runs the tensors one by one, as eager's kernels for
the CPU do; None where there is no operator on one tensor that means the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .mutate import bound

aten = torch.ops.aten
NAMED = {"norm": "linalg_vector_norm"}  # where the operator on one tensor has another name
BOUNDS = {"maximum": "clamp_min", "minimum": "clamp_max"}  # of numbers
KEYWORDS = ("value", "alpha", "dtype", "memory_format")  # by position in lists, by name for one tensor
ABSENT = {"alpha": 1, "dtype": None, "memory_format": None}


def one_by_one(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """`op`, written as a loop over its lists."""
    arguments = op._schema.arguments
    name = op._schema.name.removeprefix("aten::_foreach_")
    tensors = [a.name for a in arguments if str(a.type) == "List[Tensor]"]
    lists = [a.name for a in arguments if str(a.type).startswith("List[")]
    ternary = name in ("addcmul", "addcdiv")
    if not tensors or (ternary and "scalars" not in lists and "value" not in {a.name for a in arguments}):
        return None
    name = NAMED.get(name, BOUNDS.get(name, name) if len(tensors) == 1 else name)
    packet = getattr(aten, name, None)
    if packet is None:
        return None

    def run(*args: Any, **kwargs: Any) -> Any:
        named = bound(op, args, kwargs)
        if ternary and "scalars" in named:
            named["value"] = named.pop("scalars")
        found = []
        for k in range(len(named[tensors[0]])):
            one = {n: v[k] if isinstance(v, (list, tuple)) else v for n, v in named.items()}
            by_name = {n: one.pop(n) for n in KEYWORDS if n in one}
            by_name = {n: v for n, v in by_name.items() if n not in ABSENT or v != ABSENT[n]}
            order = [a.name for a in arguments if a.name in one]
            found.append(packet(*[one[n] for n in order], **by_name))
        return found

    return run
