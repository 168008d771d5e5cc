"""Reductions with the lanes across the rows: a tile of columns at a time, its accumulators in L1, rows in bands."""

from __future__ import annotations

import math

from ...dtypes import TABLE
from ...expr import Expr, affine, loads
from . import folds as F
from .body import Block
from .shape import Fold, Store, cycles, flat
from .writer import Opened, Writer

TILE = 512  # the least columns of a tile, where there are so many
NEAR = 32 * 1024  # bytes of accumulators that stay in L1, or not far from it
BAND = 8  # rows whose sum is taken in registers, and lines of L1 that may fall on one set
HEAVY = 24  # cycles of a step that hide the loads and stores of accumulators


def tiles(w: Writer) -> None:
    """Lanes across the rows: a tile of columns a time, its accumulators in L1, rows in bands."""
    shape, v = w.shape, w.v
    assert v is not None
    outer = [u for u in shape.dims if u is not v]
    rows, size = math.prod(u.args[1] for u in outer), v.args[1]
    most = min(widest(shape.folds, math.prod(r.args[1] for r in shape.rdims)), math.ceil(size / w.n) * w.n)
    width = str(most)
    if w.serial():
        block, opened = w.over(outer, True)
        inner = Block(block)
        opened.append((inner, f"for (i64 low = 0; low < {size}; low += {most}) {{", "}"))
    else:
        width = "width"
        w.root.line(f"const i64 width = tile({size}, {most}, {w.limit()}, {rows}), count = ({size} + width - 1) / width;")
        block = Block(w.root)
        parts = f"{rows} * count" if rows > 1 else "count"
        opened = [(block, f"parallel({w.limit()}, {parts}, [=](int, i64 begin, i64 end) INLINE {{", "});")]
        inner = Block(block, frozenset(outer))
        opened.append((inner, "for (i64 t = begin; t < end; t++) {", "}"))
        step = rows
        for u in outer:
            step //= u.args[1]
            span = f"({step} * count)" if step > 1 else "count"
            inner.line(f"const i64 {u.name} = t / {span}{f' % {u.args[1]}' if u is not outer[0] else ''};")
        inner.line(f"const i64 low = t{' % count' if rows > 1 else ''} * width;")
    inner.line(f"const i64 high = low + {width} < {size} ? low + {width} : {size};")
    inner.barrier = True
    even = size % w.n == 0
    for p in range(w.passes()):
        folds, stores = w.work(p)
        if folds or stores:
            tile_pass(w, inner, folds, stores, "low", "high", even, most, " - low", None)
            tile_results(w, inner, folds, "low", "high", even, most, " - low")
    tile_stores(w, inner, "low", "high", even)
    w.finish(opened)


def widest(folds: list[Fold], length: int) -> int:
    """The most columns of a tile: the longer its rows, the faster they come, while its accumulators stay near."""
    column = sum(TABLE[f.body.dtype].compute.itemsize * (2 if in_two(f, length) else 1) for f in folds)
    return max(TILE, NEAR // column // TILE * TILE)


def in_two(f: Fold, length: int) -> bool:
    """Whether a sum of `length` rows is kept in two parts."""
    return F.is_sum(f) and length > 256


def tile_pass(
    w: Writer, tile: Block, folds: list[Fold], stores: list[Store], low: str, high: str, even: bool, width: int, shift: str,
    bounds: tuple[str, str, str] | None,
) -> None:  # fmt: skip
    """One walk down the rows of a tile: a band at a time, so that an accumulator is loaded once for its rows."""
    shape, body, v = w.shape, w.body, w.v
    assert v is not None
    length = math.prod(r.args[1] for r in shape.rdims)
    w.accs = {}
    for f in folds:
        name = body.fresh("acc")
        ctype, kind = F.ctype(f.body.dtype), F.kind_of(f)
        blocked = in_two(f, length)
        w.accs[id(f)] = (name, blocked)
        size = width + w.n
        store = "b1" if ctype == "bool" else ctype
        tile.line(f"alignas(64) {store} {name}[{size}];")
        tile.line(f"fill({name}, {size}, {F.identity(f)});")
        if kind in F.INDEXED:
            tile.line(f"alignas(64) i64 {name}_at[{size}] = {{}};")
        elif blocked:
            tile.line(f"alignas(64) {ctype} {name}_lo[{size}] = {{}};")
    *outer, last = shape.rdims
    block = tile
    opened: Opened = []
    for r in outer:
        from_, to = bounds[1:] if bounds is not None and bounds[0] == r.name else ("0", "")
        block, header = w.loop(block, r, from_, to)
        opened.append((block, header, "}"))
    first, end = bounds[1:] if bounds is not None and bounds[0] == last.name else ("0", str(last.args[1]))
    values = [f.body for f in folds] + [s.value for s in stores]
    tall = band_of(values, stores, last, v)
    if tall == 1:
        band, header = w.loop(block, last, first, end)
        opened.append((band, header, "}"))
    else:
        band = Block(block)
        opened.append((band, f"for (i64 b = {first}; b < {end}; b += {tall}) {{", "}"))
        band.line(f"const i64 e = b + {tall} < {end} ? b + {tall} : {end};")
    inner, header, footer = w.vector_loop(band, low, high, even)
    opened.append((inner, header, footer))
    for f in folds:
        name, blocked = w.accs[id(f)]
        kind = F.kind_of(f)
        at = f"{name} + {v.name}{shift}"
        if blocked:
            inner.line(f"vec<{F.ctype(f.body.dtype)}, N> {name}v = {{}};")
        else:
            inner.line(f"auto {name}v = load<N>({at});")
        if kind in F.INDEXED:
            inner.line(f"auto {name}i = load<N>({name}_at + {v.name}{shift});")
    if tall == 1:
        step = inner
        w.ask_ahead(step, values, last)
    else:
        step, step_header = w.loop(inner, last, "b", "e")
        step.live = inner.live
    for f in folds:
        name, _ = w.accs[id(f)]
        kind = F.kind_of(f)
        body.origin = f.origin
        body.need(f.body, step)
        text = body.operand(f.body, step, F.ctype(f.body.dtype), True)
        if kind in F.INDEXED:
            at = body.index(flat(shape.rdims), step)
            step.line(f"better<{F.INDEXED[kind]}>({name}v, {name}i, {text}, (i64)({at}));", f.kind)
        else:
            step.line(f"{name}v = {F.combine(f, f'{name}v', text)};", f.kind)
    w.stores(step, stores)
    if step is not inner:
        step.close(step_header)
    for f in folds:
        name, blocked = w.accs[id(f)]
        at = f"{v.name}{shift}"
        if blocked:
            inner.line(f"add_block<N>({name} + {at}, {name}_lo + {at}, {name}v);")
        else:
            inner.line(f"store<N>({name} + {at}, {name}v);")
        if F.kind_of(f) in F.INDEXED:
            inner.line(f"store<N>({name}_at + {at}, {name}i);")
    w.finish(opened)


def band_of(values: list[Expr], stores: list[Store], along: Expr, v: Expr) -> int:
    """Rows of a band: those of large powers of two are so far apart that all lines of a column lie in one set of L1.
    Where arithmetic takes the time, rows come one by one, as memory gives them best."""
    if cycles(values) > HEAVY:
        return 1
    arrays = {s.name for s in stores} | {e.args[0] for e in loads(*values) if {along, v} <= e.args[1].free}
    tall = BAND
    while tall > 2 and tall * len(arrays) > BAND:
        tall //= 2
    return tall


def tile_results(
    w: Writer, tile: Block, folds: list[Fold], low: str, high: str, even: bool, width: int, shift: str
) -> None:
    """Accumulators become results, as arrays over the tile that later passes read."""
    body, v = w.body, w.v
    assert v is not None
    length = math.prod(r.args[1] for r in w.shape.rdims)
    for f in folds:
        name, blocked = w.accs[id(f)]
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
            tile.line(f"alignas(64) {'b1' if want == 'bool' else want} {array}[{width + w.n}];")
            tile.line(f"for (i64 {v.name} = {low}; {v.name} < {high}; {v.name} += N) store<N>({array} + {v.name}{shift}, {text});")
            body.arrays[r.name] = (array, affine(0, [(v, 1)]), shift)


def tile_stores(w: Writer, tile: Block, low: str, high: str, even: bool) -> None:
    inner, header, footer = w.vector_loop(tile, low, high, even)
    w.row_stores(inner)
    if inner.lines:
        inner.close(header, footer)
