"""Few results of long reductions: parts of the reduction on threads, partial results combined in order."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from ...expr import Expr, affine, integer
from . import folds as F
from .body import Block
from .columns import tile_pass, tile_stores
from .points import PART
from .rows import row_pass, total
from .shape import Fold, flat
from .writer import Writer

CHUNKS = 64  # parts of a split reduction at most


def split(w: Writer) -> None:
    """Each pass is a parallel region over parts of the longest reduced loop; partial results meet in order."""
    shape, body, v = w.shape, w.body, w.v
    root = w.root
    root.barrier = True
    dims = [u for u in shape.dims if u is not v or not w.columns]
    rows = math.prod(u.args[1] for u in shape.dims)
    longest = max(shape.rdims, key=lambda r: r.args[1])
    size = longest.args[1]
    unit = PART if longest is v else max(1, min(8, size // CHUNKS))
    count = math.ceil(size / unit)
    root.line(f"const int chunks = at_most({w.limit()}, {min(CHUNKS, count)});")
    for p in range(w.passes()):
        folds, stores = w.work(p)
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
        block, opened = w.loops(chunk, dims)
        block.barrier = True
        if w.columns:
            assert v is not None
            width = v.args[1]
            tile_pass(w, block, folds, stores, "0", str(width), width % w.n == 0, width, "", bounds)
            for f, name in zip(folds, parts, strict=True):
                acc, blocked = w.accs[id(f)]
                at = body.index(flat_of(shape.dims, v), block)
                value = f"sum_of({acc}[i], {acc}_lo[i])" if blocked else f"{acc}[i]"
                stride = _stride(shape.dims, v)
                place = f"i * {stride}" if stride > 1 else "i"
                block.line(f"for (i64 i = 0; i < {width}; i++) {name}[chunk][{at + ' + ' if at != '0' else ''}{place}] = {value};")
        else:
            keep = functools.partial(keep_partial, parts={id(f): name for f, name in zip(folds, parts, strict=True)})
            row_pass(w, block, p, folds, stores, [], bounds, keep)
        w.finish(opened)
        chunk.close(f"parallel(chunks, {count}, [&](int chunk, i64 begin, i64 end) INLINE {{", "});")
        meet(w, root, folds, parts, rows)
    split_stores(w)


def meet(w: Writer, root: Block, folds: list[Fold], parts: list[str], rows: int) -> None:
    """Partial results combined in the order of the parts."""
    body, shape = w.body, w.shape
    length = math.prod(r.args[1] for r in shape.rdims)
    for f, name in zip(folds, parts, strict=True):
        ctype = F.ctype(f.body.dtype)
        arrays = []
        for r in f.results:
            array = body.fresh("res")
            arrays.append(array)
            want = F.ctype(r.dtype)
            root.line(f"{'b1' if want == 'bool' else want} {array}[{rows}{f' + {w.n}' if w.v is not None else ''}];")
            body.arrays[r.name] = (array, flat(shape.dims), "")
        inner = Block(root)
        if F.is_sum(f):
            inner.line(f"Sum<{ctype}> total;")
            inner.line(f"for (int c = 0; c < chunks; c++) total.add({name}[c][i]);")
            text = "total.value()"
        else:
            get = f"get(&{name}[c][i])"
            inner.line(f"{ctype} total = {F.identity(f)};")
            inner.line(f"for (int c = 0; c < chunks; c++) total = {F.combine(f, 'total', get)};")
            text = "total"
        if f.kind == "mean":
            text = f"{text} / {length}"
        for r, array in zip(f.results, arrays, strict=True):
            inner.line(f"put({array} + i, {F.stored(text, ctype, r.dtype)});")
        inner.close(f"for (i64 i = 0; i < {rows}; i++) {{")


def split_stores(w: Writer) -> None:
    """Results and values of a row, on the calling thread."""
    if w.columns:
        dims = [u for u in w.shape.dims if u is not w.v]
        block, opened = w.loops(w.root, dims)
        assert w.v is not None
        size = w.v.args[1]
        tile_stores(w, block, "0", str(size), size % w.n == 0)
        w.finish(opened)
    else:
        block, opened = w.loops(w.root, w.shape.dims)
        w.row_stores(block)
        w.finish(opened)


def keep_partial(
    w: Writer, row: Block, f: Fold, name: str, unroll: int, blocked: bool, length: int, parts: dict[int, str]
) -> None:
    """What `rows.results` is to a whole row: the accumulator of a part goes to its place among the partial results."""
    at = w.body.index(flat(w.shape.dims), row)
    row.line(f"put(&{parts[id(f)]}[chunk][{at}], {total(w, f, name, unroll, blocked)});")


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
