"""Scans: along the axis one element after the other; lanes, where there are any, along another loop."""

from __future__ import annotations

import torch

from ....errors import UnsupportedError
from ...expr import Expr, add, load
from . import folds as F
from .writer import Writer


def scan(w: Writer) -> None:
    """Along the axis one after the other; lanes, where there are any, along another loop."""
    node, body, v = w.shape.scan, w.body, w.v
    assert node is not None
    loop = node.loop
    axis = loop.vars[loop.axis]
    outer = [u for u in loop.vars if u is not axis and u is not v]
    block, opened = w.over(outer, w.serial())
    if v is not None:
        size = v.args[1]
        inner, header, footer = w.vector_loop(block, "0", str(size), size % w.n == 0)
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
    step, header = w.loop(block, axis)
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
        if buffer.name in w.kernel.local:
            continue
        marker = _marker(k, loop.body, axis, v, ctype if k == 0 else "i64")
        step.values[marker] = name
        body.store(buffer.name, buffer.dtype, at, marker, step)
    step.close(header)
    w.finish(opened)


def _marker(k: int, body: Expr, axis: Expr, v: Expr | None, ctype: str) -> Expr:
    """A value of the scan's result type that varies as the scan does; its text is put in by hand."""
    at = add(axis, v) if v is not None else axis
    return load(f"scan{k}", at, torch.int64 if ctype == "i64" and k else body.dtype)
