"""Loops as Python text: what a person reads, what tests compare, what `read` turns back into the same loops.

In: `Loops`, one node, or one expression.  Out: text that `ast` parses, with `read(show(loops)) == loops`.
Always: the text is linear in the distinct nodes, since an expression used twice, or too long for a line, is named.

    def loops(x: f32[64, 128], w: f32[64, 128], *, table: f32[3]):     # inputs, and constants after the star
        buf0: f32[64]                                                  # a buffer; [size:stride, ..] if not row-major
        for i0 in grid(64):  # add, relu, mul, sum                     # one loop, and the operators that it came from
            for r0 in over(128):                                       # the reduced variables
                buf0[i0] = sum(maximum(x[128*i0 + r0] + w[128*i0 + r0], 0.0) * 2.0)
        buf1: f32[64, 1]
        buf1 = aten.foo.default(buf0[64, 1], (x + 5)[8, 8])            # a library call; strided views of buffers
        return buf1                                                    # flat outputs

Inside a loop `x[..]` is the element at a linear offset, and a bare literal has the dtype of the operand beside it.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..dtypes import TABLE
from ..expr import Expr, postorder
from .nodes import Buffer, Compute, Extern, Loops, Node, Reduction, Ref, Scan, row_major
from .read import INFIX, PREFIX, read

__all__ = ["declare", "read", "show", "show_expr", "show_node"]

WIDTH = 88  # a longer operand is named
LEAVES = frozenset({"var", "integer", "const"})


def show(loops: Loops) -> str:
    """The whole graph as one Python function."""
    buffers = loops.buffers
    known = {b.name: b for b in loops.inputs}
    body: list[str] = []
    for node in loops.nodes:
        for b in node.outputs:
            if b is not None and known.get(b.name) != b:
                body.append(declare(b))
                known[b.name] = b
        body.extend(show_node(node, buffers))
    results = ", ".join(_argument(out, buffers) for out in loops.outputs)
    body.append(f"return {results}" if len(loops.outputs) > 1 else f"return {results or '()'}")
    params = [declare(b) for b in loops.inputs]
    if loops.constants:
        params += ["*", *(declare(buffers[name]) for name in loops.constants)]
    head = f"def loops({', '.join(params)}):"
    if len(head) > 116:
        head = "def loops(\n" + "".join(f"    {p},\n" for p in params) + "):"
    text = head + "\n" + "".join(f"    {line}\n" for line in body)
    return text + (f"\n\nlines = {loops.lines!r}\n" if loops.lines else "")


def declare(b: Buffer) -> str:
    return f"{b.name}: {show_type(b.dtype, b.size, b.stride, b.device)}"


def show_type(dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], device: torch.device) -> str:
    text = f"{show_dtype(dtype)}{_layout(size, stride)}"
    if device == torch.device("cpu"):
        return text
    return f"{text} @ {device.type}" + ("" if device.index is None else f"({device.index})")


def show_dtype(dtype: torch.dtype) -> str:
    return TABLE[dtype].name if dtype in TABLE else str(dtype).removeprefix("torch.")


def _layout(size: Sequence[int], stride: Sequence[int]) -> str:
    if not size:
        return "[()]"
    if tuple(stride) == row_major(size):
        return f"[{', '.join(map(str, size))}]"
    return "[" + ", ".join(f"{n}:{s}" for n, s in zip(size, stride, strict=True)) + "]"


# ---- nodes ---------------------------------------------------------------------------------------------------------


def show_node(node: Node, buffers: dict[str, Buffer]) -> list[str]:
    """The statements of one node, without the declarations of its buffers."""
    return _extern(node, buffers) if isinstance(node, Extern) else _compute(node)


def _compute(node: Compute) -> list[str]:
    loop = node.loop
    text = Text(node.vars + node.rvars)
    body, *at = text.add(loop.body, *node.at)
    if isinstance(loop, Reduction):
        body = f"{loop.kind}({body})"
    elif isinstance(loop, Scan):
        body = f"scan_{loop.kind}({body}, along={loop.vars[loop.axis].name})"
    store = ", ".join(f"{b.name}[{x}]" for b, x in zip(node.outputs, at, strict=True)) + f" = {body}"
    out = [_loop("grid", node.vars) + (f"  # {', '.join(node.origins)}" if node.origins else "")]
    inner = frozenset(node.rvars)
    out += [f"    {name} = {x}" for name, x, n in text.lets if n.free.isdisjoint(inner)]
    pad = "    "
    if isinstance(loop, Reduction):
        out.append("    " + _loop("over", loop.rvars))
        pad = "        "
    out += [f"{pad}{name} = {x}" for name, x, n in text.lets if not n.free.isdisjoint(inner)]
    return [*out, pad + store]


def _loop(kind: str, variables: Sequence[Expr]) -> str:
    names = ", ".join(v.name for v in variables) or "()"
    return f"for {names} in {kind}({', '.join(str(v.args[1]) for v in variables)}):"


def _extern(node: Extern, buffers: dict[str, Buffer]) -> list[str]:
    args = [_argument(a, buffers) for a in node.args]
    args += [f"{k}={_argument(v, buffers)}" for k, v in node.kwargs]
    call = f"{node.target}({', '.join(args)})"
    if node.ordered:
        call = f"ordered({call})"
    if node.reason or not node.library:
        call = f"{'library' if node.library else 'fallback'}({call}, {node.reason!r})"
    results = ", ".join("_" if b is None else b.name for b in node.outputs)
    comment = f"  # {', '.join(node.origins)}" if node.origins else ""
    return [(f"{results} = " if results else "") + call + comment]


def _argument(x: Any, buffers: dict[str, Buffer]) -> str:
    match x:
        case Ref(number=True):
            return f"number({_argument(replace(x, number=False), buffers)})"
        case Ref():
            b = buffers.get(x.buffer)
            if b is not None and (x.size, x.stride, x.offset) == (b.size, b.stride, 0):
                return x.buffer
            base = f"({x.buffer} + {x.offset})" if x.offset else x.buffer
            return base + _layout(x.size, x.stride)
        case tuple():
            return f"({', '.join(_argument(y, buffers) for y in x)}{',' if len(x) == 1 else ''})"
        case list():
            return f"[{', '.join(_argument(y, buffers) for y in x)}]"
        case float():
            return show_float(x)
        case torch.device():
            return f"torch.device({str(x)!r})"
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(x)
        case None | bool() | int() | str() | complex():
            return repr(x)
    return f"opaque({str(x)!r})"


def show_float(x: float) -> str:
    if math.isinf(x):
        return "inf" if x > 0 else "-inf"
    if not math.isnan(x):
        return repr(x)
    bits = struct.unpack("<Q", struct.pack("<d", x))[0]
    return {0x7FF8 << 48: "nan", 0xFFF8 << 48: "-nan"}.get(bits, f"bits({bits:#x})")


# ---- expressions ---------------------------------------------------------------------------------------------------


def show_expr(expr: Expr) -> str:
    """One expression as text; shared parts are named in front: `t0 = x[i0]; t0 * t0`."""
    text = Text(tuple(n for n in postorder(expr) if n.op == "var"))
    (root,) = text.add(expr)
    return "; ".join([*(f"{name} = {x}" for name, x, _ in text.lets), root])


class Text:
    """Text of expressions over given variables, operands before users, and the names it had to give."""

    def __init__(self, variables: Sequence[Expr]) -> None:
        self.lets: list[tuple[str, str, Expr]] = []
        self.done: dict[Expr, tuple[str, int]] = {}  # node -> text and how tightly it binds
        taken = {v.name for v in variables}
        self.names: Iterator[str] = (n for n in (f"t{k}" for k in range(1 << 60)) if n not in taken)

    def add(self, *roots: Expr) -> list[str]:
        order = list(postorder(*roots))
        uses = Counter(c for n in order for c in n.children)
        for node in order:
            text, binds = self.node(node)
            if not _plain(node) and (uses[node] > 1 or (uses[node] and len(text) > WIDTH)):
                name = next(self.names)
                self.lets.append((name, text, node))
                text, binds = name, ATOMIC
            self.done[node] = text, binds
        return [self.done[r][0] for r in roots]

    def operand(self, x: Expr, least: int) -> str:
        text, binds = self.done[x]
        return text if binds >= least else f"({text})"

    def node(self, node: Expr) -> tuple[str, int]:
        args = node.args
        match node.op:
            case "var":
                return args[0], ATOMIC
            case "integer":
                return str(args[0]), ATOMIC if args[0] >= 0 else UNARY
            case "const":
                return f"{show_dtype(node.dtype)}({_literal(node)})", ATOMIC
            case "affine":
                return self.affine(node)
            case "floordiv" | "mod":
                return f"{self.operand(args[0], TIMES)} {'//' if node.op == 'floordiv' else '%'} {args[1]}", TIMES
            case "load":
                return f"{args[0]}[{self.operand(args[1], 0)}]", ATOMIC
            case "index":
                return f"index({self.operand(args[0], 0)}, {args[1]})", ATOMIC
            case "cast":
                return f"{show_dtype(node.dtype)}({self.operand(args[0], 0)})", ATOMIC
        dtype = _literal_dtype(node.op, args)
        first = 1 if node.op == "where" else 0  # the condition's dtype is its own
        bare = [k >= first and a.op == "const" and a.dtype == dtype for k, a in enumerate(args)]
        if node.op in PREFIX and len(args) == 1 and args[0].op != "const":
            sign, binds = PREFIX[node.op]
            return sign + self.operand(args[0], binds), binds
        if node.op in INFIX and len(args) == 2 and not all(bare):
            sign, binds, chains = INFIX[node.op]
            low = (binds + 1 if chains else binds, binds + 1)
            left, right = (
                _literal(a) if is_bare else self.operand(a, least)
                for a, is_bare, least in zip(args, bare, low, strict=True)
            )
            return f"{left} {sign} {right}", binds
        return (
            f"{node.op}({', '.join(_literal(a) if b else self.operand(a, 0) for a, b in zip(args, bare, strict=True))})",
            ATOMIC,
        )

    def affine(self, node: Expr) -> tuple[str, int]:
        constant, terms = node.args
        pieces: list[tuple[str, str]] = []
        for term, c in terms:
            alone = abs(c) == 1 and (c > 0 or pieces)  # a leading minus would bind tighter than the term
            text = self.operand(term, TIMES if alone else UNARY)
            pieces.append(("-" if c < 0 else "+", text if abs(c) == 1 else f"{abs(c)}*{text}"))
        if constant:
            pieces.append(("-" if constant < 0 else "+", str(abs(constant))))
        (sign, first), *rest = pieces
        if sign == "-" and not rest:
            return f"-{first}", UNARY if abs(terms[0][1]) == 1 else TIMES
        text = ("-" if sign == "-" else "") + first + "".join(f" {s} {t}" for s, t in rest)
        return text, SUM if rest else TIMES


SUM, TIMES, UNARY, ATOMIC = 9, 10, 11, 20


def _plain(node: Expr) -> bool:
    """Cheaper to repeat than to name."""
    if node.op == "affine":
        return all(t.op == "var" for t, _ in node.args[1])
    return node.op in LEAVES or (node.op == "value" and _plain(node.args[0]))


def _literal_dtype(op: str, args: Sequence[Expr]) -> torch.dtype | str | None:
    """The dtype that a bare literal among the operands has: that of the first operand that is no literal."""
    group = args[1:] if op in ("where", "masked") else args
    return next((a.dtype for a in group if a.op != "const"), None)


def _literal(node: Expr) -> str:
    x = node.args[0]
    return show_float(x) if type(x) is float else repr(x)
