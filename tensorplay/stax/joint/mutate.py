"""Which operators write their arguments or a generator, and the functional overload that computes what they write.

In: an operator overload.  Out: `writes(op)`, a frozen `Writes` row, or None where the operator writes nothing; `random(op)`.
Always: found by comparing schemas, so that an operator added by a library works like one of torch's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..ops.row import ROWS, Row

aten = torch.ops.aten

# change what memory a tensor owns; no value can stand for that
REFUSED = {
    aten.set_, aten.resize_, aten.resize_as_, aten.resize_as_sparse_, aten.resize, aten.set,
    aten.sparse_resize_, aten.sparse_resize_and_clear_,
}  # fmt: skip

# write their running statistics in training mode; three of them without saying so in their schema
BATCH_NORM = {
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default,
}


@functools.cache
def random(op: torch._ops.OpOverload) -> bool:
    """Whether the operator draws from a generator; some overloads that do lack the tag."""
    return torch.Tag.nondeterministic_seeded in op.tags or any(a.name == "generator" for a in op._schema.arguments)


@dataclass(frozen=True)
class Writes:
    """names: the arguments written, in order. functional: computes their new values (where a library has no such
    overload, `on_copies` stands for it); None: there is none.

    reshapes: the operator changes the metadata of its first argument only (`t_`, `unsqueeze_`).
    returns: for each result the name of the written argument that it is, or None for a value of its own.
    """

    names: tuple[str, ...]
    functional: torch._ops.OpOverload | None
    reshapes: bool
    returns: tuple[str | None, ...]


@functools.cache
def writes(op: torch._ops.OpOverload) -> Writes | None:
    schema: Any = op._schema
    if not schema.is_mutable:
        return None
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    reshapes = torch.Tag.inplace_view in op.tags
    returns = []
    for r in schema.returns:
        info = r.alias_info
        same = [] if info is None else [a.name for a in written if a.alias_info.before_set & info.before_set]
        returns.append(same[0] if same else None)
    functional = None if op.overloadpacket in REFUSED else next(_candidates(op, reshapes), None)
    if functional is None and op.namespace != "aten" and all(str(a.type) == "Tensor" for a in written):
        functional = on_copies(op)
    return Writes(tuple(a.name for a in written), functional, reshapes, tuple(returns))


_LIBRARIES: list[torch.library.Library] = []  # their operators live as long as they do
_ALIAS = re.compile(r"\((\w+)!?\)")


def on_copies(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """An operator that writes, as one that copies what it would write, runs on the copies and returns them last."""
    schema: Any = op._schema
    name = re.sub(r"\W", "_", f"{op.name()}_on_copies")
    while hasattr(torch.ops.tensorplay, name):  # a library defined its operator anew
        name += "_"
    places = [k for k, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    own = [k for k, r in enumerate(schema.returns) if r.alias_info is None]
    arguments = _ALIAS.sub("", str(schema).partition("(")[2].rpartition(") -> ")[0])
    results = [str(schema.returns[k].type) for k in own] + ["Tensor"] * len(places)

    def run(*args: Any, **kwargs: Any) -> Any:
        named = bound(op, args, kwargs)
        copies = [named[schema.arguments[k].name].clone() for k in places]
        named |= {schema.arguments[k].name: copy for k, copy in zip(places, copies, strict=True)}
        found = op(**named)
        found = found if isinstance(found, tuple) else (found,)
        values = (*[found[k] for k in own], *copies)
        return values if len(values) > 1 else values[0]

    library = torch.library.Library("tensorplay", "FRAGMENT")
    library.define(f"{name}({arguments}) -> ({', '.join(results)})")
    library.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARIES.append(library)
    return getattr(torch.ops.tensorplay, name).default


@functools.cache
def laid_out(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """An operator that draws into its first argument, as one that draws into fresh memory of a given stride: into memory
    with gaps, or in another order than the elements', torch draws other numbers."""
    schema: Any = op._schema
    name = re.sub(r"\W", "_", f"{op.name()}_laid_out")
    arguments = _ALIAS.sub("", str(schema).partition("(")[2].rpartition(") -> ")[0])

    def run(self: torch.Tensor, stride: list[int], *args: Any, **kwargs: Any) -> torch.Tensor:
        fresh = torch.empty_strided(self.shape, stride, dtype=self.dtype, device=self.device)
        return op(fresh, *args, **kwargs).contiguous()

    library = torch.library.Library("tensorplay", "FRAGMENT")
    library.define(f"{name}({arguments.replace('Tensor self', 'Tensor self, int[] stride', 1)}) -> Tensor")
    library.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARIES.append(library)
    found = getattr(torch.ops.tensorplay, name).default
    ROWS[found] = Row("library", None, ordered=True)
    return found


def _candidates(op: torch._ops.OpOverload, reshapes: bool) -> Iterator[torch._ops.OpOverload]:
    """Overloads without writes that take the same arguments, those that receive results left out."""
    space, name = op._schema.name.split("::")
    wanted = sorted((a.name, str(a.type)) for a in op._schema.arguments if not a.is_out)
    plain = name.replace("__i", "__", 1) if name.startswith("__i") else name.removesuffix("_")
    for candidate in (plain, name + "_functional", plain + "_functional", name):
        packet: Any = getattr(getattr(torch.ops, space), candidate, None)
        if packet is None:
            continue
        for overload in packet.overloads():
            found = getattr(packet, overload)
            schema = found._schema
            if schema.is_mutable or sorted((a.name, str(a.type)) for a in schema.arguments) != wanted:
                continue
            views = any(r.alias_info is not None for r in schema.returns)
            if views == reshapes:
                yield found


def bound(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments by name, defaults filled in."""
    named = dict(kwargs)
    for a, value in zip(op._schema.arguments, args, strict=False):
        named[a.name] = value
    for a in op._schema.arguments:
        if a.name not in named and a.has_default_value():
            named[a.name] = a.default_value
    return named
