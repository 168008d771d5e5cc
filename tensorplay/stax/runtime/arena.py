"""The memory of a call: a block for intermediates, a pointer table into it, tensor views for library operators.

In: a plan and the views of the block that library operators take.  Out: leases.
Always: a lease serves one call at a time, so concurrent and re-entrant calls never share memory; at most one idle
lease is kept, with its block only if that is small; nothing that a call returns lives in a lease.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ...errors import UnsupportedError
from ..loops.nodes import Buffer, Ref
from ..schedule.peak import SMALL
from ..schedule.plan import Plan
from . import launch
from .pages import advise

KEEP = 256 * 1024 * 1024  # bytes of a block that may stay allocated between calls
KEEP_TRAINING = SMALL  # in a training step, where backward's block would lie idle while forward saves most


class Lease:
    """The memory of one call in progress."""

    __slots__ = ("block", "pointers", "table", "views")

    def __init__(self, block: torch.Tensor | None, pointers: ctypes.Array, views: tuple[torch.Tensor, ...]) -> None:
        self.block = block
        self.pointers = pointers  # owns the memory that `table` is the address of
        self.table = launch.table_of(pointers)
        self.views = views


class Arena:
    """Makes and recycles the leases of one program."""

    def __init__(self, plan: Plan, views: Sequence[Ref], keep: int = KEEP) -> None:
        self.keep = keep
        self.bytes = plan.memory.arena_bytes
        self.slots = len(plan.slots)
        self.buffers: dict[str, Buffer] = plan.loops.buffers
        self.offsets = plan.memory.arena
        self.views = tuple(views)
        places = {name: slot for slot, name in enumerate(plan.slots)}
        self.planned = tuple((places[name], offset) for name, offset in self.offsets.items() if name in places)
        self.constants = tuple(
            (places[name], tensor.data_ptr()) for name, tensor in plan.loops.constants.items() if name in places
        )
        self.idle: list[Lease] = []
        for name, offset in self.offsets.items():
            if offset + self.buffers[name].nbytes > self.bytes:
                raise UnsupportedError(f"memory plan: {name} does not fit into the arena of {self.bytes} bytes")

    def take(self) -> Lease:
        """A lease that nobody else holds."""
        try:
            lease = self.idle.pop()
        except IndexError:
            return self.make()
        if lease.block is not None and not lease.block.untyped_storage().nbytes():
            lease.block.untyped_storage().resize_(self.bytes)
            self.place(lease.block, lease.pointers)
        return lease

    def give(self, lease: Lease) -> None:
        """Takes a lease back; it may serve the next call."""
        self.drop(lease)
        self.idle[:] = (lease,)

    def drop(self, lease: Lease) -> None:
        """Frees a block that is too large to keep. The lease's tensors stay, without memory."""
        if self.bytes > self.keep and lease.block is not None:
            lease.block.untyped_storage().resize_(0)

    def make(self) -> Lease:
        """A new lease: ordinary tensors, whatever mode the caller is in."""
        pointers = launch.array(self.slots)
        for slot, pointer in self.constants:
            pointers[slot] = pointer
        if not (self.bytes or self.views):
            return Lease(None, pointers, ())
        with torch.inference_mode(False), torch.no_grad():
            block = torch.empty(self.bytes, dtype=torch.uint8, device="cpu")
            self.place(block, pointers)
            return Lease(block, pointers, tuple(self.view(block, ref) for ref in self.views))

    def place(self, block: torch.Tensor, pointers: ctypes.Array) -> None:
        """Writes where the planned buffers lie."""
        base = advise(block).data_ptr()
        for slot, offset in self.planned:
            pointers[slot] = base + offset

    def view(self, block: torch.Tensor, ref: Ref) -> torch.Tensor:
        """The tensor that a view of a planned buffer is."""
        dtype = self.buffers[ref.buffer].dtype
        at, rest = divmod(self.offsets[ref.buffer], dtype.itemsize)
        if rest:
            raise UnsupportedError(f"memory plan: {ref.buffer} is not aligned to its element")
        empty = torch.empty(0, dtype=dtype, device="cpu")
        return empty.set_(block.untyped_storage(), at + ref.offset, ref.size, ref.stride)
