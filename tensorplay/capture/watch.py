"""What an operator does beneath the level of torch functions: writes, random draws, reads of data.

In: every dispatcher call while a capture runs.  Out: the `Seen` record of the torch function that is running.
Always: a write to a storage of the caller is announced before it happens, and a refused one never happens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..collectives import FUNCTIONAL, IN_PLACE

aten = torch.ops.aten

# write their statistics in training without a mark in the schema: operator -> (position of `training`, written positions)
UNMARKED_WRITES: dict[Any, tuple[int, tuple[int, ...]]] = {
    aten.native_batch_norm.default: (5, (3, 4)),
    aten.cudnn_batch_norm.default: (5, (3, 4)),
    aten.miopen_batch_norm.default: (5, (3, 4)),
}
DYNAMIC = {aten.linalg_lstsq.default, aten.linalg_lstsq.out}  # results that depend on data in shape, without a tag
SCALAR_READS = {aten._local_scalar_dense.default, aten.item.default}
_MASKS = (torch.bool, torch.uint8)


@dataclass
class Seen:
    """What the operators under one torch function did."""

    written: set[int] = field(default_factory=set)  # keys of the storages
    random: bool = False
    dynamic: bool = False  # the shape of a result depends on data
    read: list[torch.Tensor] = field(default_factory=list)  # tensors that became Python values
    hidden: bool = False  # a whole-tensor data read, such as aten.equal
    opaque: bool = False  # a value computed inside became a Python value
    reads: Callable[[torch.Tensor], Any] | None = None  # told what the operators of a function that stays whole read


@dataclass(frozen=True)
class Traits:
    """What the schema and the tags of an operator say."""

    writes: tuple[int, ...]
    named_writes: tuple[str, ...]
    random: bool
    dynamic: bool
    reads: bool


_TRAITS: dict[Any, Traits] = {}


def traits(op: Any) -> Traits:
    found = _TRAITS.get(op)
    if found is None:
        writes, named, position = [], [], 0
        for argument in op._schema.arguments:
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            if is_write and argument.kwarg_only:
                named.append(argument.name)
            elif is_write:
                writes.append(position)
                named.append(argument.name)
            position += not argument.kwarg_only
        tags = op.tags
        found = _TRAITS[op] = Traits(
            tuple(writes),
            tuple(named),
            torch.Tag.nondeterministic_seeded in tags,
            torch.Tag.dynamic_output_shape in tags or op in DYNAMIC,
            torch.Tag.data_dependent_output in tags,
        )
    return found


def storage_key(t: torch.Tensor) -> int:
    """Identifies the storage of a tensor while it lives; 0 for tensors without one."""
    try:
        return t.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for t in value if isinstance(t, torch.Tensor)]
    return []


class Watch(TorchDispatchMode):
    """Stays on the mode stack for the whole capture; `seen` is replaced for each torch function."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operator imports torch._dynamo

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, before_write: Callable[..., None], exchange: Callable[[Any, tuple], Any]) -> None:
        super().__init__()
        self.before_write = before_write
        self.exchange = exchange  # runs in place of what communicates with other processes
        self.seen: Seen | None = None
        self.stray = Seen()  # operators under no torch function at all
        self.alone: Callable[[Any, tuple, dict, Seen], Any] | None = None  # runs and records those, where they count

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if op.namespace == IN_PLACE or op.namespace in FUNCTIONAL:
            return self.exchange(op, args)
        alone = self.alone if self.seen is None else None
        seen = self.seen if self.seen is not None else self.stray if alone is None else Seen()
        facts = traits(op)
        if seen.reads is not None:
            for value in (*args, *kwargs.values()):
                for t in _tensors(value):
                    seen.reads(t)
        if facts.writes or facts.named_writes:
            for position in facts.writes:
                if position < len(args):
                    self._write(args[position], seen)
            for name in facts.named_writes:
                if name in kwargs:
                    self._write(kwargs[name], seen)
        unmarked = UNMARKED_WRITES.get(op)
        if unmarked is not None and len(args) > unmarked[0] and args[unmarked[0]]:
            for position in unmarked[1]:
                self._write(args[position], seen)
        if facts.random:
            seen.random = True
        if facts.dynamic and (op is not aten.index.Tensor or any(t.dtype in _MASKS for t in _tensors(args[1]))):
            seen.dynamic = True
        if facts.reads and alone is None:
            if op in SCALAR_READS:
                seen.read.append(args[0])
            else:
                seen.hidden = True
        return op(*args, **kwargs) if alone is None else alone(op, args, kwargs, seen)

    def _write(self, value: Any, seen: Seen) -> None:
        for t in _tensors(value):
            self.before_write(t)
            seen.written.add(storage_key(t))
