"""What every loop structure shares: the kernel's facts, loops on threads and along the lanes, stores.

In: a `Shape`.  Out: a `Writer`, into whose root block one of the structures (points, rows, columns, split, scan) writes.
Always: results do not depend on which thread runs what.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...expr import Expr, add, coefficient, integer, substitute, var
from ...schedule.plan import Kernel
from ..target import Target
from . import folds as F
from .body import Block, Body, indirect, unrounded
from .lanes import narrow, unconditional, value_children, walk_values, widest
from .shape import Fold, Result, Shape, Store, cycles, lane_score

SERIAL_NS = 20_000  # below it a parallel region costs more than it gains
PART_NS = 10_000  # the least work of a thread
STREAM_NS = 200_000  # above it a kernel is taken to stream from memory
AHEAD = 2048  # bytes that a stream is asked for ahead of its use: further than the hardware looks while it computes
STREAMS = 16  # that are asked for
LINE = 64  # bytes of a line of the caches
BATCH = 8  # vectors that a batch loads at most, and ...
BATCH_CYCLES = 160  # ... how long it may take: beyond, its code is long and its values overlap anyway

Opened = list[tuple[Block, str, str]]  # blocks that are being written, with the lines that open and close them


def limit(ns: float) -> str:
    """On how many threads work of so many nanoseconds runs."""
    if ns < SERIAL_NS:
        return "1"
    return f"at_most(threads, {max(2, int(ns // PART_NS))})" if ns < 64 * PART_NS else "threads"


class Writer:
    """One kernel that is being written."""

    def __init__(self, shape: Shape, kernel: Kernel, target: Target) -> None:
        self.shape, self.kernel, self.target = shape, kernel, target
        self.v, self.columns = self.lane_variable()
        roots = shape.roots + ([shape.scan.loop.body] if shape.scan else [])
        self.n = 1
        if self.v is not None:
            order = walk_values(*roots)
            wide = widest(order, self.v, narrow(order, self.v))
            if any(f.kind in F.INDEXED and math.prod(r.args[1] for r in shape.rdims) >= 2**31 for f in shape.folds):
                wide = 8
            self.n = target.vector_bytes // wide
        self.body = Body(self.v, self.n, roots, shape.level)
        self.body.bytes = target.vector_bytes
        self.body.outputs = frozenset(kernel.writes)
        steps = shape.points / self.n
        work = cycles(roots) * steps * 0.4
        moved = max(kernel.model_bytes, 1)
        self.ns = max(moved / 10, work)
        self.root = Block()
        self.thread = self.root  # the block of one thread's work: row buffers stand at its top
        self.share = 0.0  # nanoseconds of a part where the kernel is one of a launch, which hands out the parts
        self.parts = 1  # of such a kernel
        self.flat: tuple[int, int] | None = None  # where it takes a range of elements instead: those of a part, of all
        self.accs: dict[int, tuple[str, bool]] = {}  # fold -> accumulator array of the tile, whether compensated

    def lane_variable(self) -> tuple[Expr | None, bool]:
        """The variable along the lanes, and whether it is a column (a kept dimension of a reduction)."""
        shape, n = self.shape, self.target.vector_bytes // 4
        candidates = [v for v in shape.dims + shape.rdims]
        if shape.scan:
            loop = shape.scan.loop
            if loop.kind != "sum":
                return None, False
            candidates = [v for v in loop.vars if v is not loop.vars[loop.axis]]
        if any(f.kind in F.INDEXED for f in shape.folds):
            candidates = [v for v in candidates if v not in shape.rdims[:-1]]
        if shape.empty_reduction:
            return None, False
        scored = [(lane_score(shape, v, n), k) for k, v in enumerate(candidates)]
        score, k = max(scored, default=(0.0, 0))
        if score <= 0:
            return None, False
        return candidates[k], candidates[k] in shape.dims

    def prologue(self) -> list[str]:
        return [f"constexpr int N = {self.n};"] if self.v is not None else []

    def serial(self) -> bool:
        return self.ns < SERIAL_NS and not self.share

    def region(self, count: int) -> tuple[str, str]:
        """What opens and closes the block of `count` parts of the work, `begin` to `end` of which a thread takes."""
        if self.share:
            self.parts = count
            return "", ""
        return f"parallel({self.limit()}, {count}, [=](int, i64 begin, i64 end) INLINE {{", "});"

    def limit(self) -> str:
        return limit(self.ns)

    def loop(self, block: Block, v: Expr, low: str = "0", high: str = "") -> tuple[Block, str]:
        """A scalar loop: its block, and the header to close it with."""
        inner = Block(block, frozenset((v,)), lane=block.lane)
        return inner, f"for (i64 {v.name} = {low}; {v.name} < {high or v.args[1]}; {v.name}++) {{"

    def loops(self, block: Block, variables: Sequence[Expr]) -> tuple[Block, Opened]:
        opened: Opened = []
        for v in variables:
            block, header = self.loop(block, v)
            opened.append((block, header, "}"))
        return block, opened

    def vector_loop(self, block: Block, low: str, high: str, even: bool, unroll: int = 1) -> tuple[Block, str, str]:
        """The loop along the lanes from `low` to `high`; `even` when no tail is left."""
        assert self.v is not None
        v = self.v
        if even and unroll == 1:
            inner = Block(block, frozenset((v,)))
            return inner, f"for (i64 {v.name} = {low}; {v.name} < {high}; {v.name} += N) {{", "}"
        inner = Block(block, frozenset((v,)), live="" if even else "n")
        return inner, f"each<N, {unroll}>({low}, {high}, [&](i64 {v.name}, auto n, int u) INLINE {{", "});"

    def over(self, variables: Sequence[Expr], serial: bool) -> tuple[Block, Opened]:
        """Loops over `variables`, on threads unless `serial`: the innermost block and what closes it."""
        opened: Opened = []
        block = self.root
        if serial or not variables:
            for v in variables:
                block, header = self.loop(block, v)
                opened.append((block, header, "}"))
            return block, opened
        group: list[Expr] = []
        for v in variables:
            group.append(v)
            if math.prod(u.args[1] for u in group) >= 64:
                break
        count = math.prod(u.args[1] for u in group)
        block = Block(self.root)
        opened.append((block, *self.region(count)))
        self.thread = block
        inner = Block(block, frozenset(group))
        if len(group) == 1:
            name = group[0].name
            opened.append((inner, f"for (i64 {name} = begin; {name} < end; {name}++) {{", "}"))
        else:
            opened.append((inner, "for (i64 row = begin; row < end; row++) {", "}"))
            step = count
            for v in group:
                step //= v.args[1]
                text = f"row / {step}" if step > 1 else "row"
                inner.line(f"const i64 {v.name} = {f'{text} % {v.args[1]}' if v is not group[0] else text};")
        block = inner
        for v in variables[len(group) :]:
            block, header = self.loop(block, v)
            opened.append((block, header, "}"))
        return block, opened

    def ask_ahead(self, block: Block, roots: Sequence[Expr], along: Expr) -> None:
        """A kernel that streams from memory asks for what it reads in the next step of a loop."""
        if self.ns < STREAM_NS or self.v is None:
            return
        for e in unconditional(roots):
            ahead = coefficient(e.args[1], along) if e.op == "load" else None
            if ahead and coefficient(e.args[1], self.v) == 1 and not indirect(e.args[1]):
                pointer = self.body.argument(e.args[0], e.dtype)
                block.line(f"prefetch({self.body.offset(pointer, e.args[1], block)} + {ahead});", "the next row")

    def write(self, block: Block, stores: Sequence[Store], low: str, high: str, size: int, ask: bool = True) -> None:
        """The loop along the lanes that computes `stores`; its bounds are multiples of PART, or `size`."""
        assert self.v is not None
        u = self.batch(stores)
        if u > 1:
            even = size % (u * self.n) == 0
            low = self.batches(block, stores, low, high, even, u, ask)
            if even:
                return
        inner, header, footer = self.vector_loop(block, low, high, size % self.n == 0)
        self.stores(inner, stores)
        if ask:
            self.stream(inner, stores, self.v)
        inner.close(header, footer)

    def adjacent(self, stores: Sequence[Store]) -> list[Expr]:
        """What comes from memory at every point, lane beside lane: loads, and values kept since an earlier pass."""
        body, v = self.body, self.v
        assert v is not None
        found: list[Expr] = []
        seen: set[Expr] = set()
        stack = [s.value for s in stores]
        while stack:
            e = stack.pop()
            if e in seen:
                continue
            seen.add(e)
            at = e.args[1] if e.op == "load" and e.args[0] not in body.arrays else None
            if e in body.kept or (at is not None and coefficient(at, v) == 1 and not indirect(at)):
                found.append(e)
            else:
                stack += (e.args[0], e.args[2]) if e.op == "masked" else value_children(e)
        return found

    def batch(self, stores: Sequence[Store]) -> int:
        """Vectors of a step of the loop that computes `stores`: where memory is narrower than registers, a line of it."""
        if self.ns < STREAM_NS or self.body.dry or any(coefficient(s.at, self.v) != 1 or indirect(s.at) for s in stores):
            return 1
        loads = self.adjacent(stores)
        least = min(d.itemsize for d in [s.dtype for s in stores] + [e.dtype for e in loads])
        u = LINE // (self.n * least) if self.n * least < self.target.vector_bytes else 1
        while u > 1 and (u * len(loads) > BATCH or u * cycles(s.value for s in stores) > BATCH_CYCLES):
            u //= 2
        return u

    def batches(self, block: Block, stores: Sequence[Store], low: str, high: str, even: bool, u: int, ask: bool) -> str:
        """Whole batches of `u` vectors: loads, then values, then stores, so that the vectors overlap. Gives where they end."""
        body, v = self.body, self.v
        assert v is not None
        at = var(f"{v.name}_batch", v.args[1])
        if not even:
            block.line(f"i64 {at.name} = {low};")
        line = Block(block)
        reads, values, writes = (Block(line, frozenset((v,))) for _ in range(3))
        arrays: dict[str, list[str]] = {}

        def array(ctype: str) -> str:
            name = body.fresh()
            arrays.setdefault("mask<N>" if ctype == "bool" else f"vec<{ctype}, N>", []).append(f"{name}[{u}]")
            return name

        for e in self.adjacent(stores):
            name = array(body.register(e, reads))
            text = f"load<N>({body.kept_at(e, reads)})" if e in body.kept else body.load(e, reads, True)
            reads.line(f"{name}[u] = {text};", "kept" if e in body.kept else e.name)
            values.values[e] = f"{name}[u]"
        for s in stores:
            body.origin = s.origin
            value, ctype = unrounded(s.value, s.dtype), F.ctype(s.dtype)
            body.need(value, values)
            name = array(ctype)
            values.line(f"{name}[u] = {body.operand(value, values, ctype, True)};")
            pointer = body.argument(s.name, s.dtype, write=True)
            writes.line(f"store<N>({body.offset(pointer, s.at, writes)}, {name}[u], {name}[u + 1]);", s.name)
        for ctype, names in arrays.items():
            line.line(f"{ctype} {', '.join(names)};")
        for b, step in ((reads, "u++"), (values, "u++"), (writes, "u += 2")):
            if b.lines:
                b.lines.insert(0, f"const i64 {v.name} = {at.name} + u * N;")
                b.close(f"UNROLL for (int u = 0; u < {u}; {step}) {{")
        if ask:
            self.stream(line, stores, at)
        start = f"i64 {at.name} = {low}; {at.name} < {high}" if even else f"; {at.name} + {u} * N <= {high}"
        line.close(f"for ({start}; {at.name} += {u} * N) {{")
        return at.name

    def stream(self, block: Block, stores: Sequence[Store], at_v: Expr) -> None:
        """The lines that a loop along the lanes, now at `at_v`, will touch soon, on top of the block that reads and writes them."""
        if self.ns < STREAM_NS or self.v is None or self.body.dry:
            return
        touched = {s.name: (s.at, s.dtype) for s in stores}
        for e in unconditional(s.value for s in stores):
            if e.op == "load":
                touched.setdefault(e.args[0], (e.args[1], e.dtype))
        lines = []
        for name, (at, dtype) in touched.items():
            step = AHEAD // dtype.itemsize
            if name in self.body.arguments and coefficient(at, self.v) == 1 and not indirect(at) and self.reaches(at, step):
                what = "prefetch_out" if name in self.body.written else "prefetch"
                ahead = add(substitute(at, {self.v: at_v}), integer(step))
                lines.append(f"{what}({self.body.offset(self.body.arguments[name], ahead, block)});")
        block.lines[:0] = lines[:STREAMS]

    def reaches(self, at: Expr, step: int) -> bool:
        """Whether an access along the lanes goes on for longer than `step` elements."""
        assert self.v is not None
        size = self.v.args[1]
        before = [u for u in self.shape.dims if u is not self.v]
        return size >= 2 * step or bool(before and coefficient(at, before[-1]) == size)

    @staticmethod
    def finish(opened: Opened) -> None:
        for block, header, footer in reversed(opened):
            block.close(header, footer)

    def stores(self, block: Block, stores: Sequence[Store]) -> None:
        """Values first, then all stores: an output may lie where an input of the same element dies."""
        for s in stores:
            self.body.origin = s.origin
            self.body.need(unrounded(s.value, s.dtype), block)
        for s in stores:
            self.body.origin = s.origin
            self.body.store(s.name, s.dtype, s.at, s.value, block)

    def register(self, block: Block, fold: Fold, r: Result, text: str) -> None:
        """Binds the result of a fold to a scalar that later passes read, and stores it."""
        name = self.body.fresh("red")
        have = "i64" if text == "(i64)0" or text.endswith(".at") else F.ctype(fold.body.dtype)
        block.line(f"const {F.ctype(r.dtype)} {name} = {F.stored(text, have, r.dtype)};", fold.kind)
        block.values[r.read] = name

    def row_stores(self, block: Block) -> None:
        """Results of folds and values of a row go to memory."""
        for fold in self.shape.folds:
            for r in fold.results:
                if r.stored:
                    self.body.store(r.name, r.dtype, r.at, r.read, block)
        self.stores(block, [s for s in self.shape.stores if not s.full])

    def last_pass(self) -> int:
        full = [s.level for s in self.shape.stores if s.full]
        return max([f.level for f in self.shape.folds] + full, default=0)

    def work(self, p: int) -> tuple[list[Fold], list[Store]]:
        last = self.last_pass()
        return (
            [f for f in self.shape.folds if f.level == p],
            [s for s in self.shape.stores if s.full] if p == last else [],
        )

    def passes(self) -> int:
        return self.last_pass() + 1
