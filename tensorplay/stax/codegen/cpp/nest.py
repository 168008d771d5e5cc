"""From a kernel to a C++ function: which loops, in which order, on how many threads.

In: a `Kernel` and the target.  Out: a `Function`: text, parameters, checks.
Always: results do not depend on which thread runs what; every store of a full point stands in the last pass, behind
all its loads, since the memory plan may put an output where an input dies.

Structures: `points` (no reduction; lanes along the best dimension), `rows` (a row at a time, in passes, results in
registers), `columns` (lanes across rows: a tile of columns, results in arrays of L1), `split` (few results, long
reductions: parts of the reduction on threads, combined in order), `scan`. Where lanes do not pay, the same
structures run on scalars.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ....errors import UnsupportedError
from ...dtypes import TABLE
from ...expr import Expr, affine, coefficient, integer, substitute, value, var
from ...schedule.plan import Kernel
from ..target import Target
from . import folds as F
from .body import Block, Body, aligned, indirect
from .lanes import narrow, slope, unconditional, walk_values, widest
from .shape import HEAVY, Fold, Shape, Store, cycles, flat, lane_score, shape_of

SERIAL_NS = 20_000  # below it a parallel region costs more than it gains
PART_NS = 10_000  # the least work of a thread
PREFETCH_NS = 200_000  # kernels that stream from memory ask for the next row while they work on one
PART = 512  # the least elements of a part
TILE = 1024  # columns whose accumulators stay in L1
BLOCK_STEPS = 16  # vector steps that a float sum takes before it is compensated
SIDE = 64  # rows and columns of a tile that is read against its layout
PITCH = SIDE + 16  # no power of two: the columns of a tile lie in different sets of L1
CHUNKS = 64  # parts of a split reduction at most


@dataclass(frozen=True)
class Function:
    """A C++ function without its name. `text` has `{name}` nowhere: the unit puts it in front of `parameters`."""

    parameters: str  # "(const f32 *p0, f32 *p1, int threads)"
    body: str
    buffers: tuple[str, ...]  # in parameter order
    types: tuple[str, ...]  # "const f32 *"
    checks: tuple[tuple[str, str], ...]
    structure: str


def function_of(kernel: Kernel, target: Target, written_inputs: Sequence[str] = ()) -> Function:
    shape = shape_of(kernel, written_inputs)
    return Writer(shape, kernel, target).write()


class Writer:
    """Writes one kernel."""

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

    # ---- the whole ----------------------------------------------------------------------------------------------

    def write(self) -> Function:
        shape = self.shape
        if any(v.args[1] == 0 for v in shape.dims):
            structure = "empty"
        elif shape.scan:
            structure = "scan"
            self.scan()
        elif not shape.rdims:
            structure = "points"
            self.points()
        else:
            structure = self.reduction()
        body = self.body
        types = []
        for name in body.arguments:
            const = "" if name in body.written else "const "
            types.append(f"{const}{TABLE[body.dtypes[name]].name} *")
        arguments = [f"{t}{p}" for t, p in zip(types, body.arguments.values(), strict=True)]
        lines = [*self.prologue(), *self.root.lines]
        if body.checks:
            lines = ["int code = 0;", *lines, "return code;"]
        return Function(
            f"({', '.join([*arguments, 'int threads'])})",
            aligned("  " + line for line in lines),
            tuple(body.arguments),
            tuple(types),
            tuple(body.checks),
            structure,
        )

    def prologue(self) -> list[str]:
        return [f"constexpr int N = {self.n};"] if self.v is not None else []

    def serial(self) -> bool:
        return self.ns < SERIAL_NS

    def limit(self) -> str:
        return f"at_most(threads, {max(2, int(self.ns // PART_NS))})" if self.ns < 64 * PART_NS else "threads"

    # ---- loops --------------------------------------------------------------------------------------------------

    def loop(self, block: Block, v: Expr, low: str = "0", high: str = "") -> tuple[Block, str]:
        """A scalar loop: its block, and the header to close it with."""
        inner = Block(block, frozenset((v,)), lane=block.lane)
        return inner, f"for (i64 {v.name} = {low}; {v.name} < {high or v.args[1]}; {v.name}++) {{"

    def loops(self, block: Block, variables: Sequence[Expr]) -> tuple[Block, list[tuple[Block, str]]]:
        opened: list[tuple[Block, str]] = []
        for v in variables:
            block, header = self.loop(block, v)
            opened.append((block, header))
        return block, opened

    @staticmethod
    def close(opened: list[tuple[Block, str]], footer: str = "}") -> None:
        for block, header in reversed(opened):
            block.close(header, footer)

    def vector_loop(self, block: Block, low: str, high: str, even: bool, unroll: int = 1) -> tuple[Block, str, str]:
        """The loop along the lanes from `low` to `high`; `even` when no tail is left."""
        assert self.v is not None
        v = self.v
        if even and unroll == 1:
            inner = Block(block, frozenset((v,)))
            return inner, f"for (i64 {v.name} = {low}; {v.name} < {high}; {v.name} += N) {{", "}"
        inner = Block(block, frozenset((v,)), live="" if even else "n")
        return inner, f"each<N, {unroll}>({low}, {high}, [&](i64 {v.name}, auto n, int u) INLINE {{", "});"

    def over(self, variables: Sequence[Expr], serial: bool) -> tuple[Block, list[tuple[Block, str, str]]]:
        """Loops over `variables`, on threads unless `serial`: the innermost block and what closes it."""
        opened: list[tuple[Block, str, str]] = []
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
        opened.append((block, f"parallel({self.limit()}, {count}, [&](int, i64 begin, i64 end) {{", "});"))
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

    @staticmethod
    def finish(opened: list[tuple[Block, str, str]]) -> None:
        for block, header, footer in reversed(opened):
            block.close(header, footer)

    # ---- no reduction -------------------------------------------------------------------------------------------

    def stores(self, block: Block, stores: Sequence[Store]) -> None:
        """Values first, then all stores: an output may lie where an input of the same element dies."""
        for s in stores:
            self.body.origin = s.origin
            self.body.need(s.value, block)
        for s in stores:
            self.body.origin = s.origin
            self.body.store(s.name, s.dtype, s.at, s.value, block)

    def points(self) -> None:
        shape, v = self.shape, self.v
        outer = [u for u in shape.dims if u is not v]
        if v is None:
            block, opened = self.over(outer, self.serial())
            self.stores(block, shape.stores)
            return self.finish(opened)
        size = v.args[1]
        rows = math.prod(u.args[1] for u in outer)
        across = self.against_layout()
        if across is not None:
            return self.turned(*across)
        if self.serial() or rows >= 64:
            block, opened = self.over(outer, self.serial())
            self.lanes_of_points(block, "0", str(size), size % self.n == 0)
            return self.finish(opened)
        part = max(PART, math.ceil(size * rows / 256 / PART) * PART)  # at most about 256 parts
        part = min(part, 8 * PART)
        parts_ = math.ceil(size / part)
        block = Block(self.root)
        self.thread = block
        opened = [(block, f"parallel({self.limit()}, {rows * parts_}, [&](int, i64 begin, i64 end) {{", "});")]
        if not outer:
            last = f"end * {part}" if size % part == 0 else f"(end < {parts_} ? end * {part} : {size})"
            self.lanes_of_points(block, f"begin * {part}", last, size % self.n == 0)
            return self.finish(opened)
        inner = Block(block, frozenset(outer))
        opened.append((inner, "for (i64 t = begin; t < end; t++) {", "}"))
        step = rows
        for u in outer:
            step //= u.args[1]
            inner.line(f"const i64 {u.name} = t / {parts_ * step}{f' % {u.args[1]}' if u is not outer[0] else ''};")
        inner.line(f"const i64 low = t % {parts_} * {part}, high = low + {part} < {size} ? low + {part} : {size};")
        self.lanes_of_points(inner, "low", "high", size % self.n == 0)
        self.finish(opened)

    def against_layout(self) -> tuple[Expr, list[Expr]] | None:
        """Loads that are contiguous along another loop than the lanes, when the arrays exceed the caches."""
        shape, v = self.shape, self.v
        assert v is not None
        if self.kernel.model_bytes < self.target.l1 or v.args[1] < SIDE // 2:
            return None
        found: dict[Expr, list[Expr]] = {}
        for e in unconditional(s.value for s in shape.stores):
            if e.op != "load" or (coefficient(e.args[1], v) or 0) < 2:
                continue
            for u in shape.dims:
                if u is not v and u.args[1] >= SIDE // 2 and coefficient(e.args[1], u) == 1:
                    found.setdefault(u, []).append(e)
        if not found:
            return None
        u = max(found, key=lambda w: len(found[w]))
        return (u, found[u]) if len(found[u]) <= 4 else None

    def turned(self, u: Expr, loads: list[Expr]) -> None:
        """Tiles: what is read against its layout goes through a buffer in L1."""
        shape, body, v = self.shape, self.body, self.v
        assert v is not None
        outer = [w for w in shape.dims if w is not v and w is not u]
        high = {w: math.ceil(w.args[1] / SIDE) for w in (u, v)}
        count = math.prod(w.args[1] for w in outer) * high[u]
        if self.serial():
            block, opened = self.over(outer, True)
            block = Block(block)
            opened.append((block, f"for (i64 t = 0; t < {high[u]}; t++) {{", "}"))
            block.line(f"const i64 {u.name}_low = t * {SIDE};")
            self.thread = self.root
        else:
            self.thread = Block(self.root)
            opened = [(self.thread, f"parallel({self.limit()}, {count}, [&](int, i64 begin, i64 end) {{", "});")]
            block = Block(self.thread, frozenset(outer))
            opened.append((block, "for (i64 t = begin; t < end; t++) {", "}"))
            step = count // high[u]
            for w in outer:
                step //= w.args[1]
                block.line(f"const i64 {w.name} = t / {high[u] * step}{f' % {w.args[1]}' if w is not outer[0] else ''};")
            block.line(f"const i64 {u.name}_low = t % {high[u]} * {SIDE};" if outer else f"const i64 {u.name}_low = t * {SIDE};")
        block.line(_upper(u))
        tile = Block(block)
        opened.append((tile, f"for (i64 {v.name}_low = 0; {v.name}_low < {v.args[1]}; {v.name}_low += {SIDE}) {{", "}"))
        tile.line(_upper(v))
        for e in loads:
            name = body.fresh("tile")
            kind = "b1" if e.dtype is torch.bool else F.ctype(e.dtype)
            self.thread.lines.insert(0, f"alignas(64) {kind} {name}[{SIDE} * {PITCH}];")
            corner = substitute(e.args[1], {u: var(f"{u.name}_low", u.args[1]), v: var(f"{v.name}_low", v.args[1])})
            pointer = body.argument(e.args[0], e.dtype)
            for inner in indirect(corner):
                body.need(inner, tile)
            tile.line(
                f"turn({name}, {PITCH}, {body.offset(pointer, corner, tile)}, {coefficient(e.args[1], v)}, "
                f"{v.name}_high - {v.name}_low, {u.name}_high - {u.name}_low);", e.args[0],
            )  # fmt: skip
            body.kept[e] = (name, f"({u.name} - {u.name}_low) * {PITCH} + {v.name} - {v.name}_low")
        row, header = self.loop(tile, u, f"{u.name}_low", f"{u.name}_high")
        opened.append((row, header, "}"))
        self.lanes_of_points(row, f"{v.name}_low", f"{v.name}_high", v.args[1] % self.n == 0)
        self.finish(opened)

    def lanes_of_points(self, block: Block, low: str, high: str, even: bool) -> None:
        inner, header, footer = self.vector_loop(block, low, high, even)
        self.stores(inner, self.shape.stores)
        inner.close(header, footer)

    # ---- reductions ---------------------------------------------------------------------------------------------

    def reduction(self) -> str:
        shape = self.shape
        if shape.empty_reduction:
            self.nothing()
            return "empty reduction"
        rows = math.prod(v.args[1] for v in shape.dims)
        length = math.prod(v.args[1] for v in shape.rdims)
        spread = rows
        if self.columns and self.v is not None:
            spread = rows // self.v.args[1] * math.ceil(self.v.args[1] / (TILE // 2))
        indexed = any(f.kind in F.INDEXED for f in shape.folds)
        few = spread < 16 and rows <= 2048 and length >= 8 * PART and not indexed
        if few and not self.serial() and rows * CHUNKS * 8 * max(1, len(shape.folds)) <= 1 << 20:
            self.split()
            return "split"
        if self.columns:
            self.tiles()
            return "columns"
        self.rows()
        return "rows"

    def nothing(self) -> None:
        """An empty reduction: identities, and what follows from them."""
        block, opened = self.over(self.shape.dims, True)
        for fold in self.shape.folds:
            for r in fold.results:
                self.register(block, fold, r, self.over_nothing(fold, r))
        self.row_stores(block)
        self.finish(opened)

    @staticmethod
    def over_nothing(fold: Fold, r) -> str:
        if fold.kind in ("argmax", "argmin") or r is not fold.results[0] and fold.kind in F.INDEXED:
            return "(i64)0"
        if fold.kind in F.INDEXED:
            return f"({F.ctype(fold.body.dtype)})0"
        return F.identity(fold)

    def register(self, block: Block, fold: Fold, r, text: str) -> None:
        """Binds the result of a fold to a scalar that later passes read, and stores it."""
        from ...dtypes import TABLE as types

        name = self.body.fresh("red")
        if types[r.dtype].compute is not r.dtype:
            text = f"round_{types[r.dtype].name}({text})"
        want = F.ctype(r.dtype)
        have = "i64" if text == "(i64)0" or text.endswith(".at") else F.ctype(fold.body.dtype)
        if want != have:
            text = f"{text} != 0" if want == "bool" else f"cast_lane<{want}>({text})"
        block.line(f"const {want} {name} = {text};", fold.kind)
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

    def rows(self) -> None:
        shape = self.shape
        few = math.prod(v.args[1] for v in shape.dims) < 2
        row, opened = self.over(shape.dims, self.serial() or few)
        row.barrier = True
        kept = self.to_keep() if self.v is not None else {}
        for p in range(self.passes()):
            folds, stores = self.work(p)
            if not folds and not stores:
                continue
            self.row_pass(row, p, folds, stores, kept.get(p, []))
        self.row_stores(row)
        self.finish(opened)

    def to_keep(self) -> dict[int, list[Expr]]:
        """Costly values that a later pass needs again: pass -> values that it leaves in a row buffer."""
        shape = self.shape
        length = math.prod(v.args[1] for v in shape.rdims)
        budget = min(self.target.l2 // 2, 256 * 1024) // (8 * length)
        if budget == 0 or self.passes() < 2:
            return {}
        steps = shape.level
        seen: dict[Expr, int] = {}
        out: dict[int, list[Expr]] = {}
        varying = frozenset(shape.rdims)
        for p in range(self.passes()):
            folds, stores = self.work(p)
            roots = [f.body for f in folds] + [s.value for s in stores]
            stack, visited = list(roots), set()
            while stack:
                e = stack.pop()
                if e in visited or not (e.free & varying):
                    continue
                visited.add(e)
                first = seen.get(e)
                if first is not None and first < p and self.v in e.free and steps.get(e, 0) <= first:
                    cost = sum(HEAVY.get(n.op, 0) for n in walk_values(e) if n.free & varying)
                    if cost >= 8 and e not in out.get(first, []) and sum(map(len, out.values())) < budget:
                        out.setdefault(first, []).append(e)
                    if cost >= 8:
                        continue
                stack += [] if e.op in ("load", "value", "masked") else list(e.children)
            for e in walk_values(*roots):
                seen.setdefault(e, p)
        return out

    def row_pass(
        self, row: Block, p: int, folds: list[Fold], stores: list[Store], keep: list[Expr], bounds: tuple[str, str, str] | None = None
    ) -> None:
        """One walk along the reduced loops; `bounds` restricts one of them: (variable, low, high)."""
        shape, body, v = self.shape, self.body, self.v
        outer = [r for r in shape.rdims if r is not v]
        size = v.args[1] if v is not None and v in shape.rdims else 1
        roots = [f.body for f in folds] + [s.value for s in stores]
        length = math.prod(r.args[1] for r in shape.rdims)
        cheap = cycles(roots)
        indexed = any(f.kind in F.INDEXED for f in folds)
        unroll = 1
        if v is not None and folds and size >= 16 * self.n and not indexed:
            unroll = 4 if cheap <= 8 else 2 if cheap <= 20 else 1
        even = size % (self.n * unroll) == 0
        if size % self.n == 0 and not even and cheap > 8:
            unroll, even = 1, True
        if bounds is not None and v is not None and bounds[0] == v.name:
            even = size % self.n == 0 and unroll == 1
        blocked = v is not None and length > 4096 and any(F.is_sum(f) for f in folds)
        step = BLOCK_STEPS * unroll * self.n
        names: list[str] = []
        for f in folds:
            name = body.fresh("acc")
            names.append(name)
            self.declare(row, f, name, unroll, blocked)
        arrays: list[tuple[Expr, str]] = []
        thread = getattr(self, "thread", self.root)
        for e in keep:
            name = body.fresh("row")
            arrays.append((e, name))
            kind = body.register(e, Block(vars=frozenset((v,))))
            thread.lines.insert(0, f"alignas(64) {'i8' if kind == 'bool' else kind} {name}[{length}];")
        block = row
        opened: list[tuple[Block, str, str]] = []
        for r in outer:
            low, high = (bounds[1], bounds[2]) if bounds is not None and bounds[0] == r.name else ("0", "")
            block, header = self.loop(block, r, low, high)
            opened.append((block, header, "}"))
        if v is None or v not in shape.rdims:
            inner, footer = block, ""
        else:
            low, high = (bounds[1], bounds[2]) if bounds is not None and bounds[0] == v.name else ("0", str(size))
            if blocked:
                outermost = block
                block = Block(outermost)
                whole = f"b + {step} < {high} ? b + {step} : {high}"
                opened.append((block, f"for (i64 b = {low}; b < {high}; b += {step}) {{", "}"))
                block.line(f"const i64 e = {whole};")
                for f, name in zip(folds, names, strict=True):
                    if F.is_sum(f):
                        self.declare(block, f, f"{name}b", unroll, False)
                low, high = "b", "e"
            inner, header, footer = self.vector_loop(block, low, high, even, unroll)
            opened.append((inner, header, footer))
        if p == 1 and v is not None and self.ns > PREFETCH_NS and v in shape.rdims and shape.dims:
            for e in unconditional(roots):
                step = coefficient(e.args[1], shape.dims[-1]) if e.op == "load" else None
                if step and coefficient(e.args[1], v) == 1 and not indirect(e.args[1]):
                    pointer = body.argument(e.args[0], e.dtype)
                    inner.line(f"prefetch({body.offset(pointer, e.args[1], inner)} + {step});", "the next row")
        for f, name in zip(folds, names, strict=True):
            body.origin = f.origin
            self.accumulate(inner, f, f"{name}b" if blocked and F.is_sum(f) else name, unroll)
        for e, name in arrays:
            text = body.need(e, inner)
            at = body.index(flat(shape.rdims), inner)
            inner.line(f"store<N>({name} + {at}, {text}{body.tail(inner)});", "kept for a later pass")
        self.stores(inner, stores)
        if v is not None and blocked:
            inner.close(header, footer)
            opened.pop()
            for f, name in zip(folds, names, strict=True):
                if F.is_sum(f):
                    block.line(f"{name}.add({self.joined(f, f'{name}b', unroll)});")
        self.finish(opened)
        for e, name in arrays:
            body.kept[e] = (name, body.index(flat(shape.rdims), inner))
        for f, name in zip(folds, names, strict=True):
            self.results(row, f, name, unroll, blocked and F.is_sum(f), length)

    def declare(self, block: Block, f: Fold, name: str, unroll: int, blocked: bool) -> None:
        kind = F.kind_of(f)
        ctype = F.ctype(f.body.dtype)
        if self.v is None or self.v not in self.shape.rdims:
            if kind in F.INDEXED:
                block.line(f"Best<{F.INDEXED[kind]}, {ctype}, i64> {name}{{{F.identity(f)}, 0}};")
            elif F.is_sum(f) and ctype == "f32":
                block.line(f"f64 {name} = 0;")
            else:
                block.line(f"{ctype} {name} = {F.identity(f)};")
            return
        vec = "mask<N>" if ctype == "bool" else f"vec<{ctype}, N>"
        if kind in F.INDEXED:
            itype = "i64" if self.n * 8 == self.target.vector_bytes else "i32"
            block.line(f"BestLanes<{F.INDEXED[kind]}, {vec}, vec<{itype}, N>> {name}{{splat<N>({F.identity(f)}), {{}}}};")
        elif blocked and F.is_sum(f):
            block.line(f"Sum<{vec}> {name};")
        elif unroll > 1:
            block.line(f"{vec} {name}[{unroll}] = {{{', '.join([f'splat<N>({F.identity(f)})'] * unroll) if kind != 'sum' else ''}}};")
        else:
            block.line(f"{vec} {name} = {'{}' if kind == 'sum' else f'splat<N>({F.identity(f)})'};")

    def accumulate(self, b: Block, f: Fold, name: str, unroll: int) -> None:
        body, kind = self.body, F.kind_of(f)
        ctype = F.ctype(f.body.dtype)
        vec = self.v is not None and self.v in self.shape.rdims
        body.need(f.body, b)
        text = body.operand(f.body, b, ctype, vec)
        if kind in F.INDEXED:
            at = flat(self.shape.rdims)
            if not vec:
                b.line(f"{name}.add({text}, {body.index(at, b)});", f.kind)
                return
            itype = "i64" if self.n * 8 == self.target.vector_bytes else "i32"
            lanes = f"iota<N>(({itype})({body.index(at, b)}), ({itype}){slope(at, self.v, self.n)})"
            b.line(f"{name}.add({text}, {lanes}{body.tail(b)});", f.kind)
            return
        slot = f"{name}[u]" if vec and unroll > 1 else name
        if vec:
            text = F.live(f, text, b.live)
        if kind in ("sum", "prod", "any", "all"):
            sign = {"sum": "+", "prod": "*", "any": "|", "all": "&"}[kind]
            b.line(f"{slot} {sign}= {text};", f.kind)
        else:
            b.line(f"{slot} = {F.combine(f, slot, text)};", f.kind)

    def joined(self, f: Fold, name: str, unroll: int) -> str:
        """The accumulators of an unrolled loop, pairwise."""
        parts = [f"{name}[{k}]" for k in range(unroll)] if unroll > 1 else [name]
        while len(parts) > 1:
            parts = [
                F.combine(f, a, c) if F.combine(f, "a", "c").startswith("m") else f"({F.combine(f, a, c)})"
                for a, c in zip(parts[::2], parts[1::2], strict=True)
            ]
        return parts[0]

    def total(self, f: Fold, name: str, unroll: int, blocked: bool) -> str:
        """An accumulator as one scalar."""
        kind = F.kind_of(f)
        ctype = F.ctype(f.body.dtype)
        if self.v is None or self.v not in self.shape.rdims:
            return f"(f32){name}" if F.is_sum(f) and ctype == "f32" else name
        if blocked:
            return f"{name}.total()"
        if kind in F.INDEXED:
            return f"{name}.best()"
        inner = self.joined(f, name, unroll)
        return F.across(f, inner[1:-1] if inner.startswith("(") else inner)

    def results(self, row: Block, f: Fold, name: str, unroll: int, blocked: bool, length: int) -> None:
        text = self.total(f, name, unroll, blocked)
        if F.kind_of(f) in F.INDEXED:
            best = self.body.fresh("best")
            row.line(f"const auto {best} = {text};")
            texts = [f"{best}.at"] if f.kind.startswith("arg") else [f"{best}.value", f"{best}.at"]
        else:
            if f.kind == "mean":
                text = f"{text} / {length}"
            texts = [text] * len(f.results)
        done: dict[tuple, str] = {}
        for r, t in zip(f.results, texts, strict=True):
            if (t, r.dtype) in done:
                row.values[r.read] = done[t, r.dtype]
            else:
                self.register(row, f, r, t)
                done[t, r.dtype] = row.values[r.read]

    # ---- columns ------------------------------------------------------------------------------------------------

    def tiles(self) -> None:
        """Lanes across the rows: a tile of columns a time, its accumulators in L1, rows in bands."""
        shape, v = self.shape, self.v
        assert v is not None
        outer = [u for u in shape.dims if u is not v]
        rows, size = math.prod(u.args[1] for u in outer), v.args[1]
        width = TILE
        while width > 128 and rows * math.ceil(size / width) < 16:
            width //= 2
        width = min(width, math.ceil(size / self.n) * self.n)
        count = math.ceil(size / width)
        if self.serial():
            block, opened = self.over(outer, True)
            inner = Block(block)
            opened.append((inner, f"for (i64 low = 0; low < {size}; low += {width}) {{", "}"))
        else:
            block = Block(self.root)
            opened = [(block, f"parallel({self.limit()}, {rows * count}, [&](int, i64 begin, i64 end) {{", "});")]
            inner = Block(block, frozenset(outer))
            opened.append((inner, "for (i64 t = begin; t < end; t++) {", "}"))
            step = rows
            for u in outer:
                step //= u.args[1]
                inner.line(f"const i64 {u.name} = t / {count * step}{f' % {u.args[1]}' if u is not outer[0] else ''};")
            inner.line(f"const i64 low = t % {count} * {width};")
        inner.line(f"const i64 high = low + {width} < {size} ? low + {width} : {size};")
        inner.barrier = True
        even = size % self.n == 0
        for p in range(self.passes()):
            folds, stores = self.work(p)
            if folds or stores:
                self.tile_pass(inner, folds, stores, "low", "high", even, width, " - low", None)
                self.tile_results(inner, folds, "low", "high", even, width, " - low")
        self.tile_stores(inner, "low", "high", even)
        self.finish(opened)

    def tile_pass(
        self, tile: Block, folds: list[Fold], stores: list[Store], low: str, high: str, even: bool, width: int, shift: str,
        bounds: tuple[str, str, str] | None,
    ) -> None:  # fmt: skip
        """One walk down the rows of a tile: eight rows at a time, so that an accumulator is loaded once for eight."""
        shape, body, v = self.shape, self.body, self.v
        assert v is not None
        length = math.prod(r.args[1] for r in shape.rdims)
        self.accs: dict[int, tuple[str, bool]] = {}
        for f in folds:
            name = body.fresh("acc")
            ctype, kind = F.ctype(f.body.dtype), F.kind_of(f)
            blocked = F.is_sum(f) and length > 256
            self.accs[id(f)] = (name, blocked)
            size = width + self.n
            store = "b1" if ctype == "bool" else ctype
            tile.line(f"alignas(64) {store} {name}[{size}];")
            tile.line(f"fill({name}, {size}, {F.identity(f)});")
            if kind in F.INDEXED:
                tile.line(f"alignas(64) i64 {name}_at[{size}] = {{}};")
            elif blocked:
                tile.line(f"alignas(64) {ctype} {name}_lo[{size}] = {{}};")
        *outer, last = shape.rdims
        block, opened = tile, []
        for r in outer:
            at = bounds[1:] if bounds is not None and bounds[0] == r.name else ("0", "")
            block, header = self.loop(block, r, *at)
            opened.append((block, header, "}"))
        first, end = bounds[1:] if bounds is not None and bounds[0] == last.name else ("0", str(last.args[1]))
        band = Block(block)
        opened.append((band, f"for (i64 b = {first}; b < {end}; b += 8) {{", "}"))
        band.line(f"const i64 e = b + 8 < {end} ? b + 8 : {end};")
        inner, header, footer = self.vector_loop(band, low, high, even)
        opened.append((inner, header, footer))
        for f in folds:
            name, blocked = self.accs[id(f)]
            kind = F.kind_of(f)
            at = f"{name} + {v.name}{shift}"
            if blocked:
                inner.line(f"vec<{F.ctype(f.body.dtype)}, N> {name}v = {{}};")
            else:
                inner.line(f"auto {name}v = load<N>({at});")
            if kind in F.INDEXED:
                inner.line(f"auto {name}i = load<N>({name}_at + {v.name}{shift});")
        step, step_header = self.loop(inner, last, "b", "e")
        step.live = inner.live
        for f in folds:
            name, _ = self.accs[id(f)]
            kind = F.kind_of(f)
            body.origin = f.origin
            body.need(f.body, step)
            text = body.operand(f.body, step, F.ctype(f.body.dtype), True)
            if kind in F.INDEXED:
                at = body.index(flat(shape.rdims), step)
                step.line(f"better<{F.INDEXED[kind]}>({name}v, {name}i, {text}, (i64)({at}));", f.kind)
            else:
                step.line(f"{name}v = {F.combine(f, f'{name}v', text)};", f.kind)
        self.stores(step, stores)
        step.close(step_header)
        for f in folds:
            name, blocked = self.accs[id(f)]
            at = f"{v.name}{shift}"
            if blocked:
                inner.line(f"add_block<N>({name} + {at}, {name}_lo + {at}, {name}v);")
            else:
                inner.line(f"store<N>({name} + {at}, {name}v);")
            if F.kind_of(f) in F.INDEXED:
                inner.line(f"store<N>({name}_at + {at}, {name}i);")
        self.finish(opened)

    def tile_results(
        self, tile: Block, folds: list[Fold], low: str, high: str, even: bool, width: int, shift: str
    ) -> None:
        """Accumulators become results, as arrays over the tile that later passes read."""
        body, v = self.body, self.v
        assert v is not None
        length = math.prod(r.args[1] for r in self.shape.rdims)
        for f in folds:
            name, blocked = self.accs[id(f)]
            texts = [f"load<N>({name} + {v.name}{shift})"]
            if blocked:
                texts = [f"sum_of(load<N>({name} + {v.name}{shift}), load<N>({name}_lo + {v.name}{shift}))"]
            if f.kind == "mean":
                texts = [f"{texts[0]} / {length}"]
            if f.kind in F.INDEXED:
                index = f"load<N>({name}_at + {v.name}{shift})"
                texts = [index] if f.kind.startswith("arg") else [*texts, index]
            texts += [texts[0]] * (len(f.results) - len(texts))
            for r, text in zip(f.results, texts, strict=True):
                array = body.fresh("res")
                have = "i64" if text.startswith("load<N>") and "_at" in text else F.ctype(f.body.dtype)
                want = F.ctype(r.dtype)
                if r.dtype is not TABLE[r.dtype].compute:
                    text = f"round_{TABLE[r.dtype].name}({text})"
                elif have != want:
                    text = f"truth({text})" if want == "bool" else f"cast<{want}>({text})"
                tile.line(f"alignas(64) {'b1' if want == 'bool' else want} {array}[{width + self.n}];")
                tile.line(f"for (i64 {v.name} = {low}; {v.name} < {high}; {v.name} += N) store<N>({array} + {v.name}{shift}, {text});")
                body.arrays[r.name] = (array, affine(0, [(v, 1)]), shift)

    def tile_stores(self, tile: Block, low: str, high: str, even: bool) -> None:
        inner, header, footer = self.vector_loop(tile, low, high, even)
        self.row_stores(inner)
        if inner.lines:
            inner.close(header, footer)

    # ---- few results --------------------------------------------------------------------------------------------

    def split(self) -> None:
        """Each pass is a parallel region over parts of the longest reduced loop; partial results meet in order."""
        shape, body, v = self.shape, self.body, self.v
        root = self.root
        root.barrier = True
        dims = [u for u in shape.dims if u is not v or not self.columns]
        rows = math.prod(u.args[1] for u in shape.dims)
        longest = max(shape.rdims, key=lambda r: r.args[1])
        size = longest.args[1]
        unit = PART if longest is v else max(1, min(8, size // CHUNKS))
        count = math.ceil(size / unit)
        root.line(f"const int chunks = at_most({self.limit()}, {min(CHUNKS, count)});")
        for p in range(self.passes()):
            folds, stores = self.work(p)
            if not folds and not stores:
                continue
            parts = []
            for f in folds:
                name = body.fresh("part")
                parts.append(name)
                kind = F.ctype(f.body.dtype)
                root.line(f"{'b1' if kind == 'bool' else kind} {name}[{CHUNKS}][{rows}];")
            chunk = Block(root)
            chunk.line(f"const i64 first = begin * {unit}, last = end * {unit} < {size} ? end * {unit} : {size};")
            bounds = (longest.name, "first", "last")
            block, opened = self.loops(chunk, dims)
            block.barrier = True
            if self.columns:
                assert v is not None
                width = v.args[1]
                self.tile_pass(block, folds, stores, "0", str(width), width % self.n == 0, width, "", bounds)
                for f, name in zip(folds, parts, strict=True):
                    acc, blocked = self.accs[id(f)]
                    at = body.index(flat_of(shape.dims, v), block)
                    value = f"{acc}[i] + {acc}_lo[i]" if blocked else f"{acc}[i]"
                    if blocked:
                        value = f"sum_of({acc}[i], {acc}_lo[i])"
                    stride = _stride(shape.dims, v)
                    place = f"i * {stride}" if stride > 1 else "i"
                    block.line(f"for (i64 i = 0; i < {width}; i++) {name}[chunk][{at + ' + ' if at != '0' else ''}{place}] = {value};")
            else:
                saved = self.results
                self.results = lambda row, f, acc, unroll, blocked, length: row.line(  # type: ignore[method-assign]
                    f"{put_partial(f, parts[folds.index(f)], body.index(flat(shape.dims), row), self.total(f, acc, unroll, blocked))}"
                )
                self.row_pass(block, p, folds, stores, [], bounds)
                self.results = saved  # type: ignore[method-assign]
            self.close(opened)
            chunk.close(f"parallel(chunks, {count}, [&](int chunk, i64 begin, i64 end) {{", "});")
            self.meet(root, folds, parts, rows)
        self.split_stores()

    def meet(self, root: Block, folds: list[Fold], parts: list[str], rows: int) -> None:
        """Partial results combined in the order of the parts."""
        body, shape = self.body, self.shape
        length = math.prod(r.args[1] for r in shape.rdims)
        for f, name in zip(folds, parts, strict=True):
            ctype = F.ctype(f.body.dtype)
            arrays = []
            for r in f.results:
                array = body.fresh("res")
                arrays.append(array)
                want = F.ctype(r.dtype)
                root.line(f"{'b1' if want == 'bool' else want} {array}[{rows}{f' + {self.n}' if self.v is not None else ''}];")
                body.arrays[r.name] = (array, flat(shape.dims), "")
            inner = Block(root)
            if F.is_sum(f):
                inner.line(f"Sum<{ctype}> total;")
                inner.line(f"for (int c = 0; c < chunks; c++) total.add({name}[c][i]);")
                total = "total.value()"
            else:
                get = f"get(&{name}[c][i])"
                inner.line(f"{ctype} total = {F.identity(f)};")
                inner.line(f"for (int c = 0; c < chunks; c++) total = {F.combine(f, 'total', get)};")
                total = "total"
            if f.kind == "mean":
                total = f"{total} / {length}"
            for r, array in zip(f.results, arrays, strict=True):
                text = total
                if r.dtype is not TABLE[r.dtype].compute:
                    text = f"round_{TABLE[r.dtype].name}({text})"
                elif F.ctype(r.dtype) != ctype:
                    text = f"{text} != 0" if F.ctype(r.dtype) == "bool" else f"cast_lane<{F.ctype(r.dtype)}>({text})"
                inner.line(f"put({array} + i, {text});")
            inner.close(f"for (i64 i = 0; i < {rows}; i++) {{")

    def split_stores(self) -> None:
        if self.columns:
            dims = [u for u in self.shape.dims if u is not self.v]
            block, opened = self.loops(self.root, dims)
            assert self.v is not None
            size = self.v.args[1]
            self.tile_stores(block, "0", str(size), size % self.n == 0)
            self.close(opened)
        else:
            block, opened = self.loops(self.root, self.shape.dims)
            self.row_stores(block)
            self.close(opened)

    # ---- scans --------------------------------------------------------------------------------------------------

    def scan(self) -> None:
        """Along the axis one after the other; lanes, where there are any, along another loop."""
        node, body, v = self.shape.scan, self.body, self.v
        assert node is not None
        loop = node.loop
        axis = loop.vars[loop.axis]
        outer = [u for u in loop.vars if u is not axis and u is not v]
        block, opened = self.over(outer, self.serial())
        if v is not None:
            size = v.args[1]
            inner, header, footer = self.vector_loop(block, "0", str(size), size % self.n == 0)
            opened.append((inner, header, footer))
            block = inner
        dtype = loop.body.dtype
        ctype = F.ctype(dtype)
        wide = "f64" if dtype.is_floating_point else ctype
        body.origin = node.origins[0] if node.origins else ""
        start = {"sum": "0", "prod": "1", "logaddexp": "-__builtin_inf()"}
        if loop.kind in start:
            if v is not None:
                kind = f"vec<{ctype}, N>"
                block.line(f"Sum<{kind}> acc;" if dtype.is_floating_point else f"{kind} acc = {{}};")
            else:
                block.line(f"{wide} acc = {start[loop.kind]};")
        else:
            block.line(f"Extreme<{1 if loop.kind == 'max_index' else -1}, {ctype}> acc{{}};")
        step, header = self.loop(block, axis)
        step.live = block.live
        body.need(loop.body, step)
        text = body.operand(loop.body, step, ctype, v is not None)
        match loop.kind:
            case "sum":
                step.line(f"acc.add({text});" if v is not None and dtype.is_floating_point else f"acc += {text};", "sum")
            case "prod":
                step.line(f"acc *= {text};", "prod")
            case "logaddexp":
                step.line(f"acc = logaddexp(acc, {text});", "logaddexp")
            case "max_index" | "min_index":
                step.line(f"acc.add({text}, {axis.name});", loop.kind)
            case _:
                raise UnsupportedError(f"scan {loop.kind}")
        if loop.kind in start:
            name = body.put(step, "acc.value()" if v is not None and dtype.is_floating_point else f"({ctype})acc" if v is None else "acc", "so far")
            names = [name]
        else:
            names = [body.put(step, "acc.value", "so far"), body.put(step, "acc.at", "its index")]
        for k, (buffer, at, name) in enumerate(zip(node.outputs, node.at, names, strict=True)):
            marker = _marker(k, loop.body, axis, v, ctype if k == 0 else "i64")
            step.values[marker] = name
            body.store(buffer.name, buffer.dtype, at, marker, step)
        step.close(header)
        self.finish(opened)


def _upper(w: Expr) -> str:
    low, size = f"{w.name}_low", w.args[1]
    return f"const i64 {w.name}_high = {low} + {SIDE} < {size} ? {low} + {SIDE} : {size};"


def put_partial(f: Fold, part: str, at: str, text: str) -> str:
    return f"put(&{part}[chunk][{at}], {text});"


def flat_of(dims: Sequence[Expr], v: Expr) -> Expr:
    """The row-major position of a point whose `v` is 0."""
    total, step = integer(0), 1
    for u in reversed(dims):
        if u is not v:
            total = affine(0, [(total, 1), (u, step)])
        step *= u.args[1]
    return total


def _stride(dims: Sequence[Expr], v: Expr) -> int:
    step = 1
    for u in reversed(dims):
        if u is v:
            return step
        step *= u.args[1]
    return step


def _marker(k: int, body: Expr, axis: Expr, v: Expr | None, ctype: str) -> Expr:
    """A value of the scan's result type that varies as the scan does; its text is put in by hand."""
    import torch

    from ...expr import add, load

    at = add(axis, v) if v is not None else axis
    return load(f"scan{k}", at, torch.int64 if ctype == "i64" and k else body.dtype)


__all__ = ["Function", "function_of", "value"]
