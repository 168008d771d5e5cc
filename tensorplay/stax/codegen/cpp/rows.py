"""Reductions a row at a time: passes over a row that stays in cache, results in registers."""

from __future__ import annotations

import math
from collections.abc import Callable

from ...expr import Expr
from . import folds as F
from .body import Block
from .lanes import slope, walk_values
from .shape import HEAVY, Fold, Store, cycles, flat
from .writer import Opened, Writer

BLOCK_STEPS = 16  # vector steps that a float sum takes before it is compensated


def rows(w: Writer) -> None:
    shape = w.shape
    few = math.prod(v.args[1] for v in shape.dims) < 2
    row, opened = w.over(shape.dims, w.serial() or few)
    row.barrier = True
    kept = to_keep(w) if w.v is not None else {}
    for p in range(w.passes()):
        folds, stores = w.work(p)
        if not folds and not stores:
            continue
        row_pass(w, row, p, folds, stores, kept.get(p, []))
    w.row_stores(row)
    w.finish(opened)


def to_keep(w: Writer) -> dict[int, list[Expr]]:
    """Costly values that a later pass needs again: pass -> values that it leaves in a row buffer."""
    shape = w.shape
    length = math.prod(v.args[1] for v in shape.rdims)
    budget = min(w.target.l2 // 2, 256 * 1024) // (8 * length)
    if budget == 0 or w.passes() < 2:
        return {}
    steps = shape.level
    seen: dict[Expr, int] = {}
    out: dict[int, list[Expr]] = {}
    varying = frozenset(shape.rdims)
    for p in range(w.passes()):
        folds, stores = w.work(p)
        roots = [f.body for f in folds] + [s.value for s in stores]
        stack, visited = list(roots), set()
        while stack:
            e = stack.pop()
            if e in visited or not (e.free & varying):
                continue
            visited.add(e)
            first = seen.get(e)
            if first is not None and first < p and w.v in e.free and steps.get(e, 0) <= first:
                cost = sum(HEAVY.get(n.op, 8 * scattered(w, n)) for n in walk_values(e) if n.free & varying)
                if cost >= 8 and e not in out.get(first, []) and sum(map(len, out.values())) < budget:
                    out.setdefault(first, []).append(e)
                if cost >= 8:
                    continue
            stack += [] if e.op in ("load", "value", "masked") else list(e.children)
        for e in walk_values(*roots):
            seen.setdefault(e, p)
    return out


def scattered(w: Writer, e: Expr) -> bool:
    """A load whose lanes do not lie side by side."""
    return e.op == "load" and w.v is not None and slope(e.args[1], w.v, w.n) not in (0, 1)


def row_pass(
    w: Writer, row: Block, p: int, folds: list[Fold], stores: list[Store], keep: list[Expr], bounds: tuple[str, str, str] | None = None,
    finish: Callable[..., None] | None = None,
) -> None:
    """One walk along the reduced loops; `bounds` restricts one of them: (variable, low, high)."""
    shape, body, v = w.shape, w.body, w.v
    outer = [r for r in shape.rdims if r is not v]
    size = v.args[1] if v is not None and v in shape.rdims else 1
    roots = [f.body for f in folds] + [s.value for s in stores]
    length = math.prod(r.args[1] for r in shape.rdims)
    cheap = cycles(roots)
    indexed = any(f.kind in F.INDEXED for f in folds)
    unroll = 1
    if v is not None and folds and size >= 16 * w.n and not indexed:
        unroll = 4 if cheap <= 8 else 2 if cheap <= 20 else 1
    even = size % (w.n * unroll) == 0
    if size % w.n == 0 and not even and cheap > 8:
        unroll, even = 1, True
    if bounds is not None and v is not None and bounds[0] == v.name:
        even = size % w.n == 0 and unroll == 1
    blocked = v is not None and length > 4096 and any(F.is_sum(f) for f in folds)
    step = BLOCK_STEPS * unroll * w.n
    names: list[str] = []
    for f in folds:
        name = body.fresh("acc")
        names.append(name)
        declare(w, row, f, name, unroll, blocked)
    arrays: list[tuple[Expr, str]] = []
    place = flat((*outer, *((v,) if v is not None else ())))  # in a row buffer: lane beside lane
    thread = w.thread
    for e in keep:
        name = body.fresh("row")
        arrays.append((e, name))
        kind = body.register(e, Block(vars=frozenset((v,))))
        thread.lines.insert(0, f"alignas(64) {'b1' if kind == 'bool' else kind} {name}[{length}];")
    block = row
    opened: Opened = []
    for r in outer:
        low, high = (bounds[1], bounds[2]) if bounds is not None and bounds[0] == r.name else ("0", "")
        block, header = w.loop(block, r, low, high)
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
                    declare(w, block, f, f"{name}b", unroll, False)
            low, high = "b", "e"
        if not folds and not keep and p > 1 and bounds is None:
            w.write(block, stores, low, high, size, ask=False)
            return w.finish(opened)
        inner, header, footer = w.vector_loop(block, low, high, even, unroll)
        opened.append((inner, header, footer))
    if p == 1 and v is not None and v in shape.rdims and shape.dims:
        w.ask_ahead(inner, roots, shape.dims[-1])
    for f, name in zip(folds, names, strict=True):
        body.origin = f.origin
        accumulate(w, inner, f, f"{name}b" if blocked and F.is_sum(f) else name, unroll)
    for e, name in arrays:
        text = body.need(e, inner)
        inner.line(f"store<N>(&{name}[{body.index(place, inner)}], {text}{body.tail(inner)});", "kept for a later pass")
    w.stores(inner, stores)
    if v is not None and blocked:
        inner.close(header, footer)
        opened.pop()
        for f, name in zip(folds, names, strict=True):
            if F.is_sum(f):
                block.line(f"{name}.add({joined(w, f, f'{name}b', unroll)});")
    w.finish(opened)
    for e, name in arrays:
        body.keep(e, name, place)
    for f, name in zip(folds, names, strict=True):
        (finish or results)(w, row, f, name, unroll, blocked and F.is_sum(f), length)


def declare(w: Writer, block: Block, f: Fold, name: str, unroll: int, blocked: bool) -> None:
    kind = F.kind_of(f)
    ctype = F.ctype(f.body.dtype)
    if w.v is None or w.v not in w.shape.rdims:
        if kind in F.INDEXED:
            block.line(f"Best<{F.INDEXED[kind]}, {ctype}, i64> {name}{{{F.identity(f)}, 0}};")
        elif F.is_sum(f) and ctype == "f32":
            block.line(f"f64 {name} = 0;")
        else:
            block.line(f"{ctype} {name} = {F.identity(f)};")
        return
    vec = "mask<N>" if ctype == "bool" else f"vec<{ctype}, N>"
    if kind in F.INDEXED:
        itype = "i64" if w.n * 8 == w.target.vector_bytes else "i32"
        block.line(f"BestLanes<{F.INDEXED[kind]}, {vec}, vec<{itype}, N>> {name}{{splat<N>({F.identity(f)}), {{}}}};")
    elif blocked and F.is_sum(f):
        block.line(f"Sum<{vec}> {name};")
    elif unroll > 1:
        block.line(f"{vec} {name}[{unroll}] = {{{', '.join([f'splat<N>({F.identity(f)})'] * unroll) if kind != 'sum' else ''}}};")
    else:
        block.line(f"{vec} {name} = {'{}' if kind == 'sum' else f'splat<N>({F.identity(f)})'};")


def accumulate(w: Writer, b: Block, f: Fold, name: str, unroll: int) -> None:
    body, kind = w.body, F.kind_of(f)
    ctype = F.ctype(f.body.dtype)
    vec = w.v is not None and w.v in w.shape.rdims
    body.need(f.body, b)
    text = body.operand(f.body, b, ctype, vec)
    if kind in F.INDEXED:
        at = flat(w.shape.rdims)
        if not vec:
            b.line(f"{name}.add({text}, {body.index(at, b)});", f.kind)
            return
        itype = "i64" if w.n * 8 == w.target.vector_bytes else "i32"
        lanes = f"iota<N>(({itype})({body.index(at, b)}), ({itype}){slope(at, w.v, w.n)})"
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


def joined(w: Writer, f: Fold, name: str, unroll: int) -> str:
    """The accumulators of an unrolled loop, pairwise."""
    parts = [f"{name}[{k}]" for k in range(unroll)] if unroll > 1 else [name]
    while len(parts) > 1:
        parts = [
            F.combine(f, a, c) if F.combine(f, "a", "c").startswith("m") else f"({F.combine(f, a, c)})"
            for a, c in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


def total(w: Writer, f: Fold, name: str, unroll: int, blocked: bool) -> str:
    """An accumulator as one scalar."""
    kind = F.kind_of(f)
    ctype = F.ctype(f.body.dtype)
    if w.v is None or w.v not in w.shape.rdims:
        return f"(f32){name}" if F.is_sum(f) and ctype == "f32" else name
    if blocked:
        return f"{name}.total()"
    if kind in F.INDEXED:
        return f"{name}.best()"
    inner = joined(w, f, name, unroll)
    return F.across(f, inner[1:-1] if inner.startswith("(") else inner)


def results(w: Writer, row: Block, f: Fold, name: str, unroll: int, blocked: bool, length: int) -> None:
    text = total(w, f, name, unroll, blocked)
    if F.kind_of(f) in F.INDEXED:
        best = w.body.fresh("best")
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
            w.register(row, f, r, t)
            done[t, r.dtype] = row.values[r.read]
