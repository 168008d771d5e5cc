"""Loops from the text that `text.show` writes.

In: Python text, parsed by `ast` and never run.  Out: the `Loops` that it shows; constants, whose values are not in
the text, are those given by name, or zeros.  Anything else than what `show` writes is a SyntaxError with its line.
"""

# mypy: disable-error-code="attr-defined, arg-type, union-attr, misc"
# (patterns tell the classes of ast apart, more finely than the type checker follows)

from __future__ import annotations

import ast
import io
import struct
import tokenize
from dataclasses import replace
from typing import Any, NoReturn

import torch

from .. import expr as ex
from ..dtypes import NAMES
from ..expr import INDEX, Expr, make, var
from ..ops.atoms import ATOMS
from .nodes import REDUCTIONS, Buffer, Compute, Extern, Loop, Loops, Node, Pointwise, Reduction, Ref, Scan, row_major

# operator -> its sign in Python, how tightly it binds, whether Python would read a chain of it in another way
INFIX = {
    "add": ("+", 9, False), "sub": ("-", 9, False), "mul": ("*", 10, False), "div": ("/", 10, False),
    "div_floor": ("//", 10, False), "remainder": ("%", 10, False),
    "bitwise_or": ("|", 5, False), "bitwise_xor": ("^", 6, False), "bitwise_and": ("&", 7, False),
    "lshift": ("<<", 8, False), "rshift": (">>", 8, False),
    "eq": ("==", 4, True), "ne": ("!=", 4, True), "lt": ("<", 4, True), "le": ("<=", 4, True),
    "gt": (">", 4, True), "ge": (">=", 4, True), "logical_and": ("and", 2, True), "logical_or": ("or", 1, True),
}  # fmt: skip
PREFIX = {"neg": ("-", 11), "bitwise_not": ("~", 11), "logical_not": ("not ", 3)}
_BINARY = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "div_floor", ast.Mod: "remainder",
    ast.BitOr: "bitwise_or", ast.BitXor: "bitwise_xor", ast.BitAnd: "bitwise_and", ast.LShift: "lshift",
    ast.RShift: "rshift", ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
    ast.And: "logical_and", ast.Or: "logical_or", ast.USub: "neg", ast.Invert: "bitwise_not", ast.Not: "logical_not",
}  # fmt: skip


def read(text: str, constants: dict[str, torch.Tensor] | None = None) -> Loops:
    """The loops that `show` wrote as `text`."""
    tree = ast.parse(text)
    function, *rest = tree.body
    if not isinstance(function, ast.FunctionDef):
        _refuse(function)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    inputs = tuple(_declared(a) for a in function.args.args)
    held = {a.arg: _declared(a) for a in function.args.kwonlyargs}
    buffers = {b.name: b for b in (*inputs, *held.values())}
    nodes: list[Node] = []
    outputs: list[Any] = []
    for s in function.body:
        origins = tuple(comments[s.lineno].split(", ")) if s.lineno in comments else ()
        match s:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=None):
                buffers[name] = _buffer(name, kind)
            case ast.For():
                nodes.append(_compute(s, buffers, origins))
            case ast.Assign() | ast.Expr():
                nodes.append(_extern(s, buffers, origins))
            case ast.Return(value=value):
                items = value.elts if isinstance(value, ast.Tuple) else [value]
                outputs = [_argument(x, buffers) for x in items]
            case _:
                _refuse(s)
    lines: dict[str, str] = next((ast.literal_eval(s.value) for s in rest if isinstance(s, ast.Assign)), {})
    values = dict(constants or {})
    for b in held.values():
        if b.name not in values:
            values[b.name] = torch.zeros(b.span, dtype=b.dtype, device=b.device).as_strided(b.size, b.stride)
    return Loops(inputs, tuple(nodes), tuple(outputs), values, lines)


def _refuse(node: ast.AST) -> NoReturn:
    raise SyntaxError(f"line {getattr(node, 'lineno', '?')}: not loops text: {ast.unparse(node)}")


# ---- types ---------------------------------------------------------------------------------------------------------


def _declared(a: ast.arg) -> Buffer:
    return _buffer(a.arg, a.annotation)


def _buffer(name: str, node: Any) -> Buffer:
    device = torch.device("cpu")
    if isinstance(node, ast.BinOp):
        match node.right:
            case ast.Name(id=kind):
                device = torch.device(kind)
            case ast.Call(func=ast.Name(id=kind), args=[ast.Constant(value=k)]):
                device = torch.device(kind, k)
        node = node.left
    match node:
        case ast.Subscript(value=ast.Name(id=dtype), slice=layout):
            return Buffer(name, _dtype(dtype), device, *_layout(layout))
    _refuse(node or ast.Name(name))


def _dtype(name: str) -> torch.dtype:
    return NAMES.get(name) or getattr(torch, name)


def _layout(node: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    items = node.elts if isinstance(node, ast.Tuple) else [node]
    if any(isinstance(i, ast.Slice) for i in items):
        pairs = [(ast.literal_eval(i.lower), ast.literal_eval(i.upper)) for i in items]
        return tuple(n for n, _ in pairs), tuple(s for _, s in pairs)
    size = tuple(ast.literal_eval(i) for i in items)
    return size, row_major(size)


# ---- library calls -------------------------------------------------------------------------------------------------


def _extern(s: Any, buffers: dict[str, Buffer], origins: tuple[str, ...]) -> Extern:
    names: list[str] = []
    if isinstance(s, ast.Assign):
        target = s.targets[0]
        names = [n.id for n in (target.elts if isinstance(target, ast.Tuple) else [target])]
    call, library, ordered = s.value, True, False
    reason: Any = ""
    match call:
        case ast.Call(func=ast.Name(id="library" | "fallback" as kind), args=[inner, ast.Constant(value=reason)]):
            call, library = inner, kind == "library"
    match call:
        case ast.Call(func=ast.Name(id="ordered"), args=[inner]):
            call, ordered = inner, True
    if not isinstance(call, ast.Call):
        _refuse(s)
    operator: Any = torch.ops
    for part in ast.unparse(call.func).split("."):
        operator = getattr(operator, part)
    return Extern(
        tuple(None if n == "_" else buffers[n] for n in names),
        operator,
        tuple(_argument(a, buffers) for a in call.args),
        tuple((k.arg, _argument(k.value, buffers)) for k in call.keywords),
        library,
        reason,
        ordered,
        origins,
    )


def _argument(node: Any, buffers: dict[str, Buffer]) -> Any:
    match node:
        case ast.Constant(value=x):
            return x
        case ast.Name(id="inf" | "nan" as name):
            return float(name)
        case ast.Name(id=name):
            b = buffers[name]
            return Ref(name, b.size, b.stride)
        case ast.Subscript(value=ast.Name(id=name), slice=layout):
            return Ref(name, *_layout(layout))
        case ast.Subscript(value=ast.BinOp(left=ast.Name(id=name), right=ast.Constant(value=k)), slice=layout):
            return Ref(name, *_layout(layout), k)
        case ast.Call(func=ast.Name(id="number"), args=[x]):
            return replace(_argument(x, buffers), number=True)
        case ast.Tuple(elts=items):
            return tuple(_argument(x, buffers) for x in items)
        case ast.List(elts=items):
            return [_argument(x, buffers) for x in items]
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return getattr(torch, name)
        case ast.Call(func=ast.Attribute(attr="device"), args=[ast.Constant(value=x)]):
            return torch.device(x)
        case ast.Call(func=ast.Name(id="bits"), args=[ast.Constant(value=x)]):
            return _from_bits(x)
        case ast.UnaryOp(op=ast.USub(), operand=x):
            return -_argument(x, buffers)
        case ast.BinOp(op=ast.Add() | ast.Sub()):  # a complex number
            return ast.literal_eval(node)
    _refuse(node)


def _from_bits(x: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", x))[0]


# ---- loops ---------------------------------------------------------------------------------------------------------


def _compute(s: Any, buffers: dict[str, Buffer], origins: tuple[str, ...]) -> Compute:
    variables = _variables(s)
    names: dict[str, Expr] = {v.name: v for v in variables}
    body, inner = list(s.body), None
    if isinstance(body[-1], ast.For):
        inner = _variables(body[-1])
        names.update((v.name, v) for v in inner)
        body = [*body[:-1], *body[-1].body]
    *lets, last = body
    for let in lets:
        if not (isinstance(let, ast.Assign) and isinstance(let.targets[0], ast.Name)):
            _refuse(let)
        names[let.targets[0].id] = _expr(let.value, names, buffers)
    if not isinstance(last, ast.Assign):
        _refuse(last)
    target = last.targets[0]
    stores = target.elts if isinstance(target, ast.Tuple) else [target]
    at = tuple(_index(_operand(t.slice, names, buffers)) for t in stores)
    loop: Loop
    match last.value:
        case ast.Call(func=ast.Name(id=kind), args=[x]) if inner is not None and kind in REDUCTIONS:
            loop = Reduction(kind, variables, inner, _expr(x, names, buffers))
        case ast.Call(func=ast.Name(id=name), args=[x], keywords=[ast.keyword(arg="along", value=ast.Name(id=axis))]):
            loop = Scan(name.removeprefix("scan_"), variables, variables.index(names[axis]), _expr(x, names, buffers))
        case x:
            loop = Pointwise(variables, _expr(x, names, buffers))
    return Compute(tuple(buffers[t.value.id] for t in stores), at, loop, origins)


def _variables(s: Any) -> tuple[Expr, ...]:
    names = s.target.elts if isinstance(s.target, ast.Tuple) else [s.target]
    return tuple(var(n.id, ast.literal_eval(size)) for n, size in zip(names, s.iter.args, strict=True))


def _expr(node: ast.expr, names: dict[str, Expr], buffers: dict[str, Buffer]) -> Expr:
    x = _operand(node, names, buffers)
    return x if isinstance(x, Expr) else _index(x)


def _index(x: Any) -> Expr:
    return ex.integer(x) if type(x) is int else x


def _operand(node: Any, names: dict[str, Expr], buffers: dict[str, Buffer]) -> Any:
    """An expression, or a bare Python literal whose dtype the operator around it decides."""

    def inner(x: ast.expr) -> Any:
        return _operand(x, names, buffers)

    match node:
        case ast.Constant(value=x):
            return x
        case ast.Name(id=name):
            return names[name] if name in names else float(name)  # inf, nan
        case ast.Subscript(value=ast.Name(id=name), slice=at):
            return ex.load(name, _index(inner(at)), buffers[name].dtype)
        case ast.UnaryOp(op=op, operand=x):
            return _apply(_BINARY[type(op)], [inner(x)])
        case ast.BinOp(left=a, op=op, right=b) | ast.Compare(left=a, ops=[op], comparators=[b]):
            return _apply(_BINARY[type(op)], [inner(a), inner(b)])
        case ast.BoolOp(op=op, values=[a, b]):
            return _apply(_BINARY[type(op)], [inner(a), inner(b)])
        case ast.Call(func=ast.Name(id="bits"), args=[ast.Constant(value=x)]):
            return _from_bits(x)
        case ast.Call(func=ast.Name(id="index"), args=[x, ast.Constant(value=size)]):
            return make("index", (inner(x), size), INDEX)
        case ast.Call(func=ast.Name(id="value"), args=[x]):
            return make("value", (_index(inner(x)),), torch.int64)
        case ast.Call(func=ast.Name(id=name), args=[x]) if name in NAMES or _is_dtype(name):
            x, dtype = inner(x), _dtype(name)
            return make("cast", (x,), dtype) if isinstance(x, Expr) else ex.const(x, dtype)
        case ast.Call(func=ast.Name(id=name), args=args):
            return _apply(name, [inner(x) for x in args])
    _refuse(node)


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


def _apply(op: str, args: list[Any]) -> Any:
    if not any(isinstance(a, Expr) for a in args):
        return -args[0]  # the one operator that `show` applies to a literal
    if any(isinstance(a, Expr) and a.is_index for a in args):
        return _index_arithmetic(op, *args)
    group = args[1:] if op in ("where", "masked") else args
    dtype = next(a.dtype for a in group if isinstance(a, Expr))
    full = tuple(a if isinstance(a, Expr) else ex.const(a, dtype) for a in args)
    boolean = op in ATOMS and ATOMS[op].result == "bool"
    return make(op, full, torch.bool if boolean else full[-len(group)].dtype)


def _index_arithmetic(op: str, a: Any, b: Any = None) -> Expr:
    match op:
        case "add":
            return ex.add(a, b)
        case "sub":
            return ex.add(a, ex.mul(b, -1))
        case "mul":
            return ex.mul(b, a) if type(a) is int else ex.mul(a, b)
        case "neg":
            return ex.mul(a, -1)
        case "div_floor":
            return ex.floordiv(a, b)
        case "remainder":
            return ex.mod(a, b)
    raise SyntaxError(f"{op} is no operator on indices")
