"""One kernel of a plan as a Triton function: pointwise loops, row reductions, scans.

In: a `Kernel` and the graph's buffers.  Out: `Text`: the function, its arguments, how it is launched.
Always: the dims are one index over blocks of XBLOCK, the rdims one index over blocks of R0_BLOCK. A row that fits
one block is held in registers (persistent); a longer one is walked once for each level of reductions that depend on
each other, and what a walk needs is computed again rather than kept. Full-width results are stored by the last walk,
behind its loads, so that a result may lie over an operand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ....errors import UnsupportedError
from ...dtypes import TABLE
from ...expr import Expr, loads, parts
from ...loops.nodes import Buffer, Compute, Pointwise, Reduction, Scan
from ...loops.text import show_node
from ...schedule.plan import Kernel
from .scan import Run, along_axis
from .spell import FOLDS, INDEXED, cast, extreme, full, literal
from .values import Value, Values

PERSISTENT = 4096  # elements of the longest row that is always held in registers
AGAIN = 32768  # the same, over all operands, of a row that would be walked more than once
WALK = 2048  # elements of a row that a looped kernel takes at a time
REWALK = 8192  # the same where the row is walked again: few rows in flight, so that they stay in the cache between
HELD, PASSED = 32, 8  # elements for each thread of a long row in registers, of a block that is walked again
SCAN = (32, 64)  # outputs and rows that a program takes where a scan runs across memory
COLUMN = 64  # rows and outputs that a program takes where neighbours in memory are neighbouring outputs
BLOCK = 1024  # elements that a program takes otherwise
WIDEST = 2**31 - 1  # the largest 32-bit index
WHOLE = "[XBLOCK, R0_BLOCK]"


@dataclass(frozen=True)
class Text:
    """A kernel's function, and how it is launched."""

    name: str
    text: str
    slots: tuple[str, ...]  # buffers, in the order of the pointer arguments
    grid: int
    xblock: int
    warps: int
    checked: bool  # asserts run-time indices


@dataclass(frozen=True)
class Blocks:
    """How a kernel is cut into programs."""

    x: int
    r: int
    persistent: bool
    warps: int


def power(n: int) -> int:
    """The next power of two."""
    return 1 << max(n - 1, 0).bit_length()


def blocks(kernel: Kernel, values: Values, roots: list[Expr]) -> Blocks:
    if not values.rowed:
        x = min(BLOCK, power(values.xnumel))
        thread = 16 // min((n.dtype.itemsize for n in loads(*roots)), default=4)  # a thread moves 16 bytes at a time
        return Blocks(x, 1, True, min(max(x // (32 * max(thread, 4)), 1), 8))
    columns, r = by_columns(kernel, roots), power(values.rnumel)
    again = walks(kernel, values) > 1
    if columns:
        persistent = r <= COLUMN
    else:
        wide = {n.args[0] for n in loads(*roots) if n.free & frozenset(kernel.rdims) and n.args[0] not in values.makers}
        persistent = r <= PERSISTENT or (again and r * max(len(wide), 1) <= AGAIN)
    column, down = SCAN if isinstance(kernel.nodes[0].loop, Scan) else (COLUMN, COLUMN)
    r = r if persistent else down if columns else REWALK if again else WALK
    x = min(column if columns else max(1, BLOCK // r), power(values.xnumel))
    short = x * r <= 4096 or columns
    warps = min(x * r // 256, 16) if short else min(x * r // (32 * (HELD if persistent else PASSED)), 32)
    return Blocks(x, r, persistent, max(warps, 1))


def levels(kernel: Kernel, values: Values) -> dict[str, int]:
    """The first walk in which each node can run: how many reductions, one behind the other, it waits for."""
    level: dict[str, int] = {}
    for n in kernel.nodes:
        own = [values.makers[r][0] for r in n.reads if r in values.makers]
        level[n.name] = max((level[m.name] + isinstance(m.loop, Reduction) for m in own), default=0)
    return level


def full_width(kernel: Kernel, values: Values) -> list[Compute]:
    """The nodes that store a value at every point of the row."""
    stored = [n for n in kernel.nodes if isinstance(n.loop, Pointwise) and n.name not in kernel.local]
    return [n for n in stored if n.vars != kernel.dims and values.rnumel]


def walks(kernel: Kernel, values: Values) -> int:
    """How often a row is walked that is not held in registers."""
    level = levels(kernel, values)
    ends = [n for n in kernel.nodes if isinstance(n.loop, Reduction)] + full_width(kernel, values)
    return 1 + max((level[n.name] for n in ends), default=-1)


def by_columns(kernel: Kernel, roots: list[Expr]) -> bool:
    """Whether neighbours in memory are neighbouring outputs rather than neighbouring terms of a reduction."""
    votes = 0
    for n in loads(*roots):
        steps = dict(parts(n.args[1])[1])
        x, r = ([steps[v] for v in vs if v in steps] for vs in (kernel.dims, kernel.rdims))
        votes += (1 in x) - (1 in r) if x and r else 0
    return votes > 0


def emit_kernel(kernel: Kernel, buffers: dict[str, Buffer]) -> Text:
    """The Triton text of one kernel; UnsupportedError where it holds what Triton text does not cover yet."""
    if isinstance(kernel.nodes[0].loop, Scan):
        kernel = along_axis(kernel)
    values = Values(kernel)
    roots = [e for n in kernel.nodes for e in (n.loop.body, *n.at)]
    cut = blocks(kernel, values, roots)
    values.rmask = values.rnumel % cut.r != 0 or values.rnumel == 0
    body = Writer(kernel, values, cut).body()
    reach = [n.args[1].high for n in loads(*roots)] + [e.high for n in kernel.nodes for e in n.at]
    wide = ".to(tl.int64)" if max([values.xnumel, values.rnumel, *reach]) > WIDEST else ""
    column = "[:, None]" if values.rowed else ""
    head = [f"xnumel = {values.xnumel}"]
    if values.rowed:
        head += [f"r0_numel: tl.constexpr = {values.rnumel}"] if values.rmask or not cut.persistent else []
        head += [f"R0_BLOCK: tl.constexpr = {cut.r}"]
    head += [
        f"xoffset = tl.program_id(0){wide} * XBLOCK",
        f"xindex = xoffset + tl.arange(0, XBLOCK){column}",
        "xmask = xindex < xnumel",
        *split("xindex", kernel.dims),
    ]
    if values.rowed:
        base = f"tl.arange(0, R0_BLOCK)[None, :]{wide}"
        head += row(values, base) if cut.persistent else [f"r0_base = {base}"]
    what = "scan" if isinstance(kernel.nodes[0].loop, Scan) else "reduction"
    kind = "pointwise" if not values.rowed else f"{'persistent' if cut.persistent else 'looped'} {what}"
    sizes = f"x {values.xnumel}" + (f", r0 {values.rnumel}" if values.rowed else "")
    notes = [f"# {kind}: {sizes}", *(f"# {line}" for n in kernel.nodes for line in show_node(n, buffers))]
    order = sorted(values.slots, key=lambda b: values.slots[b].startswith("out"))
    arguments = ", ".join([*(values.slots[b] for b in order), "XBLOCK: tl.constexpr"])
    lines = [*notes, "@triton.jit", f"def {kernel.name}({arguments}):", *(f"    {s}" for s in head + body)]
    grid = -(-values.xnumel // cut.x)
    return Text(kernel.name, "\n".join(lines) + "\n", tuple(order), grid, cut.x, cut.warps, values.checked)


def row(values: Values, start: str) -> list[str]:
    mask = ["r0_mask = r0_index < r0_numel"] if values.rmask else []
    return [f"r0_index = {start}", *mask, *split("r0_index", values.kernel.rdims)]


def split(flat: str, variables: tuple[Expr, ...]) -> list[str]:
    """The loop variables of a flat index, the last one fastest."""
    out, step = [], 1
    for k in range(len(variables) - 1, -1, -1):
        name, n = variables[k].args
        text = flat if step == 1 else f"{flat} // {step}"
        if k:
            text = f"{text if step == 1 else f'({text})'} % {max(n, 1)}"
        out.append(f"{name} = {text}")
        step *= max(n, 1)
    return out[::-1]


def kind_of(n: Compute) -> str:
    assert isinstance(n.loop, Reduction)
    return n.loop.kind


@dataclass
class Writer:
    """Walks, reductions and stores of one kernel."""

    kernel: Kernel
    values: Values
    cut: Blocks

    def body(self) -> list[str]:
        k, values, persistent = self.kernel, self.values, self.cut.persistent
        if isinstance(k.nodes[0].loop, Scan):
            return self.scan(k.nodes[0])
        level, count, wide = levels(k, values), walks(k, values), full_width(k, values)
        stored = [n for n in k.nodes if isinstance(n.loop, Pointwise) and n.name not in k.local]
        reductions = [n for n in k.nodes if isinstance(n.loop, Reduction)]
        if persistent:
            values.inner = values.outer
        out: list[str] = []
        for w in range(min(count, 1) if persistent else count):
            values.walk, values.last = {}, persistent or w == count - 1
            finish: list[tuple[Compute, list[str], list[tuple[str, torch.dtype]]]] = []
            for n in reductions:
                if persistent:
                    self.name_results(n, *self.reduce(n))
                elif level[n.name] == w:
                    finish.append((n, *self.reduce(n)))
            if values.last:
                for n in wide:
                    self.put(n)
            if not persistent:
                out += values.outer
                if values.inner:
                    out.append("for r0_offset in range(0, r0_numel, R0_BLOCK):")
                    out += [f"    {line}" for line in [*row(values, "r0_offset + r0_base"), *values.inner]]
                values.outer, values.inner = [], []
            for n, statements, results in finish:
                self.name_results(n, statements, results)
        if not persistent:
            values.walk = {}
        for n in stored:
            if n.vars == k.dims:
                self.put(n)
        for n in reductions:
            for b, at in zip(n.outputs, n.at, strict=True):
                if b.name not in k.local:
                    self.store(b, at, values.done[b.name], kind_of(n))
        return out + values.outer

    def scan(self, n: Compute) -> list[str]:
        """Running values of a row, in one block or block by block."""
        values, whole = self.values, self.cut.persistent
        if whole:
            values.inner = values.outer
        results = Run(values, n, self.inside, whole).results()
        for b, at, (v, have) in zip(n.outputs, n.at, results, strict=False):  # a result that nobody reads is no output
            if b.name not in self.kernel.local:
                self.store(b, at, values.stored(v, have, b), "so far")
        if whole:
            return values.outer
        walk = [*row(values, "r0_offset + r0_base"), *values.inner]
        return [*values.outer, "for r0_offset in range(0, r0_numel, R0_BLOCK):", *(f"    {line}" for line in walk)]

    def put(self, n: Compute) -> None:
        """Stores a pointwise result."""
        b, body = n.outputs[0], n.loop.body
        self.store(b, n.at[0], self.values.stored(self.values.value(body), body.dtype, b), b.name)

    def store(self, b: Buffer, at: Expr, v: Value, comment: str) -> None:
        values = self.values
        offset = values.value(at)
        where = offset.text if offset.x or offset.r else values.spread(offset, True, False)
        lines = values.inner if offset.r or v.r else values.outer
        pointer = f"{values.slot(b.name, 'out_ptr')} + {where}"
        lines.append(f"tl.store({pointer}, {v.text}, {values.mask(True, offset.r or v.r)})  # {comment}")

    # ---- reductions: statements behind the walk, and the text of each result ----

    def name_results(self, n: Compute, statements: list[str], results: list[tuple[str, torch.dtype]]) -> None:
        values = self.values
        values.outer += statements
        for b, (text, have) in zip(n.outputs, results, strict=True):
            text = cast(text, have, b.dtype)
            name = text if text.isidentifier() else values.say(text, (), comment=kind_of(n)).text
            values.done[b.name] = Value(name, True)

    def reduce(self, n: Compute) -> tuple[list[str], list[tuple[str, torch.dtype]]]:
        kind, body = kind_of(n), n.loop.body
        if body.dtype == torch.bool and kind not in ("any", "all"):
            raise UnsupportedError(f"{kind} of bool has no Triton text")
        if not self.values.rnumel:
            start = FOLDS[kind].start(body.dtype) if kind in FOLDS else 0
            return [], [(full(start, b.dtype, "[XBLOCK, 1]"), b.dtype) for b in n.outputs]
        tmp = self.values.spread(self.values.value(body), True, True)
        if kind == "welford":
            return self.welford(tmp, body.dtype)
        if kind in INDEXED:
            return self.indexed(kind, tmp, body.dtype)
        fold = FOLDS[kind]
        start = fold.start(body.dtype)
        if self.cut.persistent:
            tmp = self.inside(tmp, start)
        else:
            acc = self.accumulator(full(start, body.dtype, WHOLE))
            self.accumulate(acc, fold.join.format(acc, tmp))
            tmp = acc
        return [], [(f"{fold.fold.format(tmp)}[:, None].to({TABLE[body.dtype].triton})", body.dtype)]

    def inside(self, tmp: str, other: Any) -> str:
        """`tmp` with `other` beyond the row's end."""
        if not self.values.rmask:
            return tmp
        return self.values.say(f"tl.where(r0_mask, {tmp}, {literal(other)})", [Value("", True, True)]).text

    def accumulator(self, start: str) -> str:
        name = self.values.name("acc")
        self.values.outer.append(f"{name} = {start}")
        return name

    def accumulate(self, acc: str, new: str) -> None:
        self.values.inner.append(f"{acc} = tl.where(r0_mask, {new}, {acc})" if self.values.rmask else f"{acc} = {new}")

    def indexed(self, kind: str, tmp: str, dtype: torch.dtype) -> tuple[list[str], list[tuple[str, torch.dtype]]]:
        """The extreme value and its first place."""
        function, sign = INDEXED[kind]
        worst = extreme(dtype, sign)
        tmp, place = self.inside(tmp, worst), f"tl.broadcast_to(r0_index, {WHOLE}).to(tl.int64)"
        if not self.cut.persistent:
            best = self.accumulator(full(worst, dtype, WHOLE))
            at = self.accumulator(f"tl.full({WHOLE}, {2**63 - 1}, tl.int64)")
            self.values.inner.append(f"{best}, {at} = {function}({best}, {at}, {tmp}, {place})")
            tmp, place = best, at
        best = self.values.name("best")
        index = (f"{best}_at[:, None]", torch.int64)
        results = [index] if kind.startswith("arg") else [(f"{best}[:, None]", dtype), index]
        return [f"{best}, {best}_at = tl.reduce(({tmp}, {place}), 1, {function})"], results

    def welford(self, tmp: str, dtype: torch.dtype) -> tuple[list[str], list[tuple[str, torch.dtype]]]:
        """Mean and sum of squared deviations: of the row in registers, or lane by lane along the walk."""
        values = self.values
        if self.cut.persistent:
            mean = values.say(f"tl.sum({self.inside(tmp, 0.0)}, 1)[:, None] / {values.rnumel}.0", [Value("", True)]).text
            apart = values.say(f"{tmp} - {mean}", [Value("", True, True)]).text
            apart = self.inside(apart, 0.0)
            return [], [(mean, dtype), (f"tl.sum({apart} * {apart}, 1)[:, None]", dtype)]
        mean, m2, count = lanes = [self.accumulator(full(0.0, dtype, WHOLE)) for _ in range(3)]
        # every lane is one element further in every step, so that one reciprocal serves all
        far, apart, new = (values.name(stem) for stem in ("far", "apart", "new"))
        values.outer.append(f"{far} = {full(0.0, dtype, '[1, 1]')}")
        values.inner += [
            f"{far} = {far} + 1.0",
            f"{apart} = {tmp} - {mean}",
            f"{new} = {mean} + {apart} * (1.0 / {far})",
        ]
        self.accumulate(m2, f"{m2} + {apart} * ({tmp} - {new})")
        self.accumulate(mean, new)
        self.accumulate(count, f"tl.broadcast_to({far}, {WHOLE})")
        whole = values.name("row")
        statement = f"{whole}_mean, {whole}_m2, {whole}_n = tl.reduce(({', '.join(lanes)}), 1, merge)"
        return [statement], [(f"{whole}_mean[:, None]", dtype), (f"{whole}_m2[:, None]", dtype)]
