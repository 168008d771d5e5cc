"""Realization: when a function from index to value becomes a buffer (section 6.6).

In: lowered tensors.  Out: loop nodes that store them, and loads in their place.
Always: a body that is carried on has at most `LIMIT` distinct nodes; a reduction's result is a buffer. The scheduler
fuses neighbours back together without memory where their loops agree, so storing a value that several readers want
costs little, while computing an expensive one twice is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..expr import Expr, cast, load, parts, postorder, var
from ..ops.lowered import Lowered, axes, compute, numel, point, reindex
from .nodes import (
    REDUCTIONS,
    SCANS,
    Buffer,
    Compute,
    Extern,
    Node,
    Pointwise,
    Reduction,
    Ref,
    Scan,
    Spec,
    dense,
    row_major,
)
from .single import single
from .stretches import FEW, comparisons

LIMIT = 200  # distinct nodes of a body that is still inlined
CHEAP = 3  # work an element that may be done again for another reader
WORK = {
    "var": 0, "integer": 0, "affine": 0, "const": 0, "value": 0, "cast": 1, "load": 1, "index": 1, "floordiv": 2, "mod": 2,
    "div": 4, "sqrt": 4, "rsqrt": 4, "remainder": 6, "fmod": 6, "div_floor": 6, "div_trunc": 6, "exp": 8, "exp2": 8,
    "log": 8, "log2": 8, "log10": 8, "log1p": 8, "expm1": 8, "tanh": 10, "sigmoid": 10, "erf": 12, "erfc": 12, "sin": 12,
    "cos": 12, "tan": 16, "asin": 12, "acos": 12, "atan": 12, "sinh": 12, "cosh": 12, "asinh": 16, "acosh": 16,
    "atanh": 16, "lgamma": 40, "pow": 20, "atan2": 20, "hypot": 8,
}  # fmt: skip


class Realizer:
    """The loop nodes emitted so far, and what rows need in order to emit more."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.buffers: dict[str, Buffer] = {}
        self.count = 0
        self.weights: dict[Expr, tuple[int, int]] = {}  # body -> (distinct nodes, work), upper bounds
        self.stored: dict[str, Expr] = {}  # buffer -> the body that was stored in it, unrounded
        self.made: set[str] = set()  # buffers that the current operator made
        self.origins: tuple[str, ...] = ()  # of the current operator and what its operands inline
        self.specs: tuple[Spec | None, ...] = ()
        self.target: Any = None
        self.device = torch.device("cpu")
        self.operand_spec: Spec | None = None  # of the current operator's first operand

    @property
    def spec(self) -> Spec:
        """What eager recorded for the current operator's (first) result."""
        return self.specs[0]  # type: ignore[return-value]

    def device_of(self, x: Lowered) -> str:
        return self.device.type

    # ---- buffers -----------------------------------------------------------------------------------------------------

    def buffer(self, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int] | None = None) -> Buffer:
        """A new buffer, row-major where no layout is given."""
        size = tuple(size)
        name = f"buf{self.count}"
        self.count += 1
        b = Buffer(name, dtype, self.device, size, row_major(size) if stride is None else tuple(stride))
        self.add(b)
        self.made.add(name)
        return b

    def add(self, b: Buffer) -> None:
        self.buffers[b.name] = b

    def read(self, b: Buffer, dtype: torch.dtype | None = None) -> Lowered:
        """A buffer as a lowered tensor, under its own dtype or a nominal one with the same arithmetic."""
        x = load(b.name, b.at(point(b.size)), b.dtype)
        return Lowered(b.size, dtype or b.dtype, cast(x, compute(dtype or b.dtype)))

    # ---- decisions ---------------------------------------------------------------------------------------------------

    def weigh(self, body: Expr) -> tuple[int, int]:
        """(nodes, work) of a body: sums over operands, corrected by an exact count where they look large."""
        known = self.weights
        if body in known:
            return known[body]
        stack = [body]
        while stack:
            node = stack[-1]
            missing = [c for c in node.children if c not in known]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            if node in known:
                continue
            count, work = 1, WORK.get(node.op, 1)
            for c in node.children:
                n, w = known[c]
                count, work = count + n, work + w
            known[node] = count, work
        if known[body][0] > LIMIT // 2:
            nodes = list(postorder(body))
            known[body] = len(nodes), sum(WORK.get(n.op, 1) for n in nodes)
        return known[body]

    def work(self, x: Lowered) -> int:
        """Work an element; a load is one, also where it widens a half type."""
        return 1 if self.plain(x) is not None else self.weigh(x.body)[1]

    def streams(self, x: Lowered) -> int:
        """Distinct loads that vary over the whole tensor: what a second evaluation reads again."""
        full = sum(n != 1 for n in x.size)
        return sum(n.op == "load" and len(n.args[1].free) >= full for n in postorder(x.body))

    def cheap(self, x: Lowered) -> bool:
        """Whether a second reader may compute `x` again: little work, and no more to read than `x` itself."""
        count, work = self.weigh(x.body)
        return work <= 1 or (work <= CHEAP and count <= 24 and self.streams(x) <= 1)

    def kept(self, x: Lowered) -> Lowered:
        """`x` for several readers inside one row: stored unless cheap."""
        return x if self.cheap(x) else self.store(x)

    def expanded(self, x: Lowered, size: tuple[int, ...]) -> Lowered:
        """`x` broadcast to `size`; stored first where many elements would repeat real work."""
        if x.size == size:
            return x
        if 1 < x.numel < numel(size) and self.work(x) > CHEAP:
            x = self.store(x)
        lead = len(size) - len(x.size)
        if lead == 0 or not x.body.free:
            return Lowered(size, x.dtype, x.body, x.origins)
        return reindex(x, size, point(size)[lead:])

    def viewed(self, x: Lowered, size: Sequence[int], at: Sequence[Expr]) -> Lowered:
        """x[at] as a tensor of `size`; stored first where elements would be computed several times."""
        if numel(size) > x.numel > 1 and self.work(x) > CHEAP:
            x = self.store(x)
        return reindex(x, size, at)

    # ---- nodes -------------------------------------------------------------------------------------------------------

    def store(self, x: Lowered, stride: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Lowered:
        """Stores `x` in a new buffer (of its nominal dtype) and returns the load."""
        b = self.buffer(dtype or x.dtype, x.size, stride)
        if x.body.dtype == b.dtype:
            self.stored[b.name] = x.body
        self.nodes.append(Compute((b,), (b.at(point(b.size)),), Pointwise(axes(x.size), x.body), x.origins or self.origins))
        return self.read(b, x.dtype)

    def behind(self, x: Lowered) -> Lowered:
        """`x`, or what was stored where `x` is the whole of a buffer."""
        body = self.plain(x)
        if body is None or body.name not in self.stored:
            return x
        b = self.buffers[body.name]
        return replace(x, body=self.stored[b.name]) if b.size == x.size and b.at(point(b.size)) is body.args[1] else x

    def write_back(self, b: Buffer, x: Lowered) -> None:
        """Stores `x` over the input `b`."""
        self.nodes.append(Compute((b,), (b.at(point(b.size)),), Pointwise(axes(x.size), x.body), x.origins or self.origins))

    def reduce(
        self,
        kind: str,
        x: Lowered,
        dims: Sequence[int] | None = None,
        keepdim: bool = False,
        dtypes: Sequence[torch.dtype] | None = None,
    ) -> tuple[Lowered, ...]:
        """The results of a reduction over `dims` (all where None), each stored; float sums in the body's dtype.

        `dtypes` are the nominal dtypes of the results; buffers of half results keep the wider dtype that they are
        computed in, until something outside of loop IR reads them.
        """
        rank = len(x.size)
        reduced = set(range(rank)) if not dims else {d % rank for d in dims} if rank else set()
        kept = [k for k in range(rank) if k not in reduced]
        order = [k for k in range(rank) if k in reduced and x.size[k] != 1]
        size = tuple(1 if k in reduced else x.size[k] for k in range(rank)) if keepdim else tuple(x.size[k] for k in kept)
        place = point(size)
        rvars = tuple(var(f"r{j}", x.size[k]) for j, k in enumerate(order))
        at: list[Expr] = list(point(tuple(1 if k in reduced else n for k, n in enumerate(x.size))))
        if not keepdim:
            for j, k in enumerate(kept):
                at[k] = place[j]
        for j, k in enumerate(order):
            at[k] = rvars[j]
        results = REDUCTIONS[kind]
        found = dtypes or (x.dtype,) * results
        if kind == "sum" and len(rvars) == 1 and compute(found[0]) == x.body.dtype:
            one = single(reindex(self.behind(x), size, at).body, rvars[0])
            if one is not None:
                return (Lowered(size, found[0], one, x.origins),)
        body = reindex(self.decided(x, reduced), size, at).body
        if not rvars:
            rvars = (var("r0", 1),)
        outs = tuple(self.buffer(compute(d), size) for d in found)
        loop = Reduction(kind, axes(size), rvars, body)
        self.nodes.append(Compute(outs, tuple(b.at(place) for b in outs), loop, tuple(dict.fromkeys((*x.origins, *self.origins)))))
        return tuple(self.read(b, d) for b, d in zip(outs, found, strict=True))

    def decided(self, x: Lowered, along: Collection[int]) -> Lowered:
        """`x` for loops along some dimensions, stored where conditions on the place along them would be computed in each."""
        if not any(n != 1 for n in x.size):
            return x
        last = max(k for k, n in enumerate(x.size) if n != 1)  # in memory its elements lie side by side
        asked = dict.fromkeys(comparisons(x.body))
        for k in along:
            if sum(axes(x.size)[k] in e.free for e in asked) > (0 if k == last else FEW):
                return self.store(x)
        return x

    def scan(self, kind: str, x: Lowered, axis: int, dtypes: Sequence[torch.dtype]) -> tuple[Lowered, ...]:
        """The running combination along `axis`, each result stored."""
        assert len(dtypes) == SCANS[kind]
        x = self.decided(x, (axis,))
        outs = tuple(self.buffer(d, x.size) for d in dtypes)
        loop = Scan(kind, axes(x.size), axis, x.body)
        self.nodes.append(Compute(outs, tuple(b.at(point(x.size)) for b in outs), loop, self.origins))
        return tuple(self.read(b) for b in outs)

    # ---- library calls -----------------------------------------------------------------------------------------------

    def plain(self, x: Lowered) -> Expr | None:
        """The load that `x` consists of, in its nominal dtype; None where it is anything else."""
        body = x.body
        if body.op == "cast" and body.dtype == compute(x.dtype) and body.args[0].op == "load":
            body = body.args[0]
        return body if body.op == "load" and body.dtype == x.dtype else None

    def strided(self, x: Lowered, stride: Sequence[int] | None = None) -> Ref | None:
        """`x` as a strided view of a buffer, without computing anything; None where it is none."""
        body = self.plain(x)
        if body is None:
            return None
        constant, terms = parts(body.args[1])
        by_term = dict(terms)
        found = []
        for k, (v, n) in enumerate(zip(axes(x.size), x.size, strict=True)):
            if n == 1:
                found.append(stride[k] if stride is not None and stride[k] >= 0 else 1)
            else:
                found.append(by_term.pop(v, 0))
        if by_term or min(found, default=0) < 0 or constant < 0:
            return None
        return Ref(body.name, x.size, tuple(found), constant)

    def ref(self, x: Lowered, stride: Sequence[int] | None = None) -> Ref:
        """`x` in memory: a view of a buffer where it is one, else stored, in eager's layout where that has no gaps."""
        found = self.strided(x, stride)
        if found is None:
            layout = stride if stride is not None and dense(x.size, stride) else None
            found = self.strided(self.store(x, layout), stride)
            assert found is not None
        return found

    def extern(self, node: Extern) -> None:
        self.nodes.append(node)


def merged(operands: Sequence[Lowered], name: str) -> tuple[str, ...]:
    """The origins of an operator: what its operands inline, and itself."""
    return tuple(dict.fromkeys((*(o for x in operands for o in x.origins), name)))


def named(x: Lowered, origins: tuple[str, ...]) -> Lowered:
    """`x` with the origins of the operator that gave it; a load from memory inlines nothing, also where it widens."""
    body = x.body.args[0] if x.body.op == "cast" and x.body.args[0].dtype == x.dtype else x.body
    return replace(x, origins=() if body.op in ("load", "const") else origins)
