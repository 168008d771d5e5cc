"""A scan as Triton statements: along the axis block by block, what came before joined to each block.

In: the kernel with its axis as the loop along the row, and the node.  Out: statements in the lists of `Values`.
Always: within a block the order of combination is Triton's, between blocks it is the axis's; a running extreme keeps
the last of equals and, once it met one, a NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ....errors import UnsupportedError
from ...dtypes import TABLE
from ...loops.nodes import Compute, Scan
from ...schedule.plan import Kernel
from .spell import extreme, full
from .values import Value, Values

WHOLE = "[XBLOCK, R0_BLOCK]"
# kind -> its identity, how two results join, the function that joins
VALUES = {"sum": (0, "{0} + {1}", "plus"), "prod": (1, "{0} * {1}", "multiply")}
# kinds that carry an index beside the value: the function that keeps the better of two, the sign of the worst value
INDEXED = {"max_index": ("last_max", -1), "min_index": ("last_min", 1)}
Inside = Callable[[str, object], str]


def along_axis(kernel: Kernel) -> Kernel:
    """The kernel of a scan with its axis as the only reduced loop."""
    (node,) = kernel.nodes
    assert isinstance(node.loop, Scan)
    axis = node.loop.vars[node.loop.axis]
    return replace(kernel, dims=tuple(v for v in kernel.dims if v is not axis), rdims=(axis,))


@dataclass(frozen=True)
class Run:
    """One scan that is being written."""

    values: Values
    node: Compute
    inside: Inside  # a block's value with another beyond the row's end
    whole: bool  # the row is one block: nothing is carried on

    def carry(self, start: str) -> str:
        name = self.values.name("carry")
        self.values.outer.append(f"{name} = {start}")
        return name

    def named(self, prefix: str, text: str) -> str:
        name = self.values.name(prefix)
        self.values.inner.append(f"{name} = {text}")
        return name

    def results(self) -> list[tuple[Value, torch.dtype]]:
        """The running values of a block, one for each output, and the statements that carry them on."""
        assert isinstance(self.node.loop, Scan)
        kind, dtype, values = self.node.loop.kind, self.node.loop.body.dtype, self.values
        if dtype is torch.bool:
            raise UnsupportedError("a scan of bool has no Triton text")
        tmp = values.spread(values.value(self.node.loop.body), True, True)
        if kind in INDEXED:
            return self.indexed(tmp, *INDEXED[kind])
        if kind not in VALUES:
            raise UnsupportedError(f"the scan {kind} has no Triton text")
        one, join, function = VALUES[kind]
        start = float(one) if dtype.is_floating_point else one
        block = self.named("run", f"tl.associative_scan({self.inside(tmp, start)}, 1, {function})")
        if not self.whole:
            before = self.carry(full(start, dtype, "[XBLOCK, 1]"))
            block = self.named("run", join.format(before, block))
            last = f"tl.where(r0_index == r0_offset + R0_BLOCK - 1, {block}, 0)"
            values.inner.append(f"{before} = tl.sum({last}, 1)[:, None].to({TABLE[dtype].triton})")
        return [(Value(block, True, True), dtype)]

    def indexed(self, tmp: str, function: str, sign: int) -> list[tuple[Value, torch.dtype]]:
        dtype, values = self.node.loop.body.dtype, self.values  # type: ignore[union-attr]
        worst = extreme(dtype, sign)
        place = f"tl.broadcast_to(r0_index, {WHOLE}).to(tl.int64)"
        run, at = values.name("run"), values.name("run")
        values.inner.append(f"{run}, {at} = tl.associative_scan(({self.inside(tmp, worst)}, {place}), 1, {function})")
        if not self.whole:
            best, best_at = self.carry(full(worst, dtype, "[XBLOCK, 1]")), self.carry("tl.full([XBLOCK, 1], -1, tl.int64)")
            values.inner += [
                f"{run}, {at} = {function}({best}, {best_at}, {run}, {at})",
                f"{best}, {best_at} = tl.reduce(({run}, {at}), 1, {function})",
                f"{best}, {best_at} = {best}[:, None], {best_at}[:, None]",
            ]
        return [(Value(run, True, True), dtype), (Value(at, True, True), torch.int64)]

