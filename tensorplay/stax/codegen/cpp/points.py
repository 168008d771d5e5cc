"""Kernels without a reduction: lanes along the best dimension, tiles where a read goes against its layout."""

from __future__ import annotations

import math

import torch

from ...dtypes import compute
from ...expr import Expr, affine, coefficient, substitute, var
from . import folds as F
from .body import Block, indirect
from .lanes import unconditional
from .writer import Writer

PART = 512  # the least elements of a part
SIDES = (128, 64, 32)  # rows and columns of a tile that is read against its layout
PAD = 16  # its rows are longer by this, so that they lie in different sets of a cache


def points(w: Writer) -> None:
    shape, v = w.shape, w.v
    outer = [u for u in shape.dims if u is not v]
    if v is None:
        block, opened = w.over(outer, w.serial())
        w.stores(block, shape.stores)
        return w.finish(opened)
    size = v.args[1]
    rows = math.prod(u.args[1] for u in outer)
    across = against_layout(w)
    if across is not None:
        return turned(w, *across)
    if w.serial() or rows >= 64:
        block, opened = w.over(outer, w.serial())
        w.write(block, shape.stores, "0", str(size), size)
        return w.finish(opened)
    part = max(PART, math.ceil(size * rows / 256 / PART) * PART)  # at most about 256 parts
    part = min(part, 8 * PART)
    if w.share:  # of a launch: parts take as long as those of its other kernels
        part = max(1, round(w.share / max(w.ns, 1.0) * size * rows / PART)) * PART
    parts_ = math.ceil(size / part)
    if w.share and not outer:
        w.parts, w.flat = parts_, (part, size)
        return w.write(w.root, shape.stores, "low", "high", 1)
    block = Block(w.root)
    w.thread = block
    opened = [(block, *w.region(rows * parts_))]
    if not outer:
        last = f"end * {part}" if size % part == 0 else f"(end < {parts_} ? end * {part} : {size})"
        w.write(block, shape.stores, f"begin * {part}", last, size)
        return w.finish(opened)
    inner = Block(block, frozenset(outer))
    opened.append((inner, "for (i64 t = begin; t < end; t++) {", "}"))
    step = rows
    for u in outer:
        step //= u.args[1]
        inner.line(f"const i64 {u.name} = t / {parts_ * step}{f' % {u.args[1]}' if u is not outer[0] else ''};")
    inner.line(f"const i64 low = t % {parts_} * {part}, high = low + {part} < {size} ? low + {part} : {size};")
    w.write(inner, shape.stores, "low", "high", size)
    w.finish(opened)


def against_layout(w: Writer) -> tuple[Expr, list[Expr]] | None:
    """Loads that are contiguous along another loop than the lanes, when the arrays exceed the caches."""
    shape, v = w.shape, w.v
    assert v is not None
    if w.kernel.model_bytes < w.target.l1 or v.args[1] < SIDES[-1]:
        return None
    found: dict[Expr, list[Expr]] = {}
    for e in unconditional(s.value for s in shape.stores):
        if e.op != "load" or (coefficient(e.args[1], v) or 0) < 2:
            continue
        for u in shape.dims:
            if u is not v and u.args[1] >= SIDES[-1] and coefficient(e.args[1], u) == 1:
                found.setdefault(u, []).append(e)
    if not found:
        return None
    u = max(found, key=lambda d: len(found[d]))
    return (u, found[u]) if len(found[u]) <= 4 else None


def turned(w: Writer, u: Expr, loads: list[Expr]) -> None:
    """Tiles: what is read against its layout goes through a buffer in L1."""
    shape, body, v = w.shape, w.body, w.v
    assert v is not None
    outer = [d for d in shape.dims if d is not v and d is not u]
    size = sum(compute(e.dtype).itemsize for e in loads)
    side = next((s for s in SIDES if s * (s + PAD) * size <= w.target.l2 // 4), SIDES[-1])
    pitch = side + PAD
    low = {d: var(f"{d.name}_low", d.args[1]) for d in (u, v)}
    high = {d: math.ceil(d.args[1] / side) for d in (u, v)}
    count = math.prod(d.args[1] for d in outer) * high[u]
    if w.serial():
        block, opened = w.over(outer, True)
        block = Block(block)
        opened.append((block, f"for (i64 t = 0; t < {high[u]}; t++) {{", "}"))
        block.line(f"const i64 {u.name}_low = t * {side};")
        w.thread = w.root
    else:
        w.thread = Block(w.root)
        opened = [(w.thread, *w.region(count))]
        block = Block(w.thread, frozenset(outer))
        opened.append((block, "for (i64 t = begin; t < end; t++) {", "}"))
        step = count // high[u]
        for d in outer:
            step //= d.args[1]
            block.line(f"const i64 {d.name} = t / {high[u] * step}{f' % {d.args[1]}' if d is not outer[0] else ''};")
        block.line(f"const i64 {u.name}_low = t % {high[u]} * {side};" if outer else f"const i64 {u.name}_low = t * {side};")
    block.line(_upper(u, side))
    tile = Block(block)
    opened.append((tile, f"for (i64 {v.name}_low = 0; {v.name}_low < {v.args[1]}; {v.name}_low += {side}) {{", "}"))
    tile.line(_upper(v, side))
    for e in loads:
        name = body.fresh("tile")
        kind = "b1" if e.dtype is torch.bool else F.ctype(e.dtype)
        w.thread.lines.insert(0, f"alignas(64) {kind} {name}[{side} * {pitch}];")
        corner = substitute(e.args[1], low)
        pointer = body.argument(e.args[0], e.dtype)
        for inner in indirect(corner):
            body.need(inner, tile)
        tile.line(
            f"turn({name}, {pitch}, {body.offset(pointer, corner, tile)}, {coefficient(e.args[1], v)}, "
            f"{v.name}_high - {v.name}_low, {u.name}_high - {u.name}_low);", e.args[0],
        )  # fmt: skip
        body.keep(e, name, affine(0, [(u, pitch), (low[u], -pitch), (v, 1), (low[v], -1)]))
    row, header = w.loop(tile, u, f"{u.name}_low", f"{u.name}_high")
    opened.append((row, header, "}"))
    w.write(row, shape.stores, f"{v.name}_low", f"{v.name}_high", v.args[1])
    w.finish(opened)


def _upper(w: Expr, side: int) -> str:
    low, size = f"{w.name}_low", w.args[1]
    return f"const i64 {w.name}_high = {low} + {side} < {size} ? {low} + {side} : {size};"
