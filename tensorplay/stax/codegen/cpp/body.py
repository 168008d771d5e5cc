"""From expressions to C++ statements: what stands inside a loop.

In: expressions and the block in which their value is needed.  Out: lines in that block, or in an enclosing one where
the value does not change: everything is computed once, in the outermost loop where it can be.
Always: a value that varies along the vector variable is a vector of N lanes, any other is a scalar; what stands under
a `masked` condition is computed only where the condition holds and never leaves its block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy
import torch

from ....errors import UnsupportedError
from ...dtypes import TABLE, compute
from ...expr import Expr, cast, const, parts
from ...ops.atoms import ATOMS
from .lanes import INT32, narrow, slope, walk_values

CHECKED = {"div_floor": 1, "div_trunc": 1, "remainder": 1, "fmod": 1}  # integer operators that refuse a zero divisor
_ON_INTEGERS = {"remainder": "mod_int({0}, {1})", "fmod": "rem_int({0}, {1})"}
_ON_MASKS = {
    "maximum": "{0} | {1}", "minimum": "{0} & {1}", "mul": "{0} & {1}", "eq": "~({0} ^ {1})", "ne": "{0} ^ {1}",
    "lt": "~{0} & {1}", "le": "~{0} | {1}", "gt": "{0} & ~{1}", "ge": "{0} | ~{1}",
}  # fmt: skip
_ON_BOOLS = {
    "maximum": "{0} | {1}", "minimum": "{0} & {1}", "mul": "{0} & {1}", "logical_not": "!{0}", "bitwise_not": "!{0}",
}  # fmt: skip
_TAKES_SCALAR = frozenset(("clamp_min", "clamp_max", "maximum", "minimum"))  # functions of a vector and a scalar
HALF = (torch.bfloat16, torch.float16)
MARK = "\0"  # between a line and its comment


def aligned(lines: Iterable[str], column: int = 76) -> str:
    """Lines with their comments in one column where they fit."""
    out = []
    for line in lines:
        text, mark, comment = line.partition(MARK)
        out.append(f"{text:<{column}}  // {comment}" if mark else text)
    return "\n".join(out)


@dataclass(eq=False)
class Block:
    """One C++ block that is being written: its lines so far and the values at hand in it."""

    parent: Block | None = None
    vars: frozenset[Expr] = frozenset()  # the loop variables that it introduces
    closed: bool = False  # under a condition or lane by lane: values are computed here and stay here
    lane: bool = False  # one lane at a time: the vector variable stands for a single element
    barrier: bool = False  # reductions finish here: what depends on them goes no further out
    live: str = ""  # the lanes that exist: '' (all), 'n' (a tail), or a mask
    lines: list[str] = field(default_factory=list)
    values: dict[Expr, str] = field(default_factory=dict)

    def line(self, text: str, comment: str = "") -> None:
        *head, last = text.split("\n")
        self.lines += head
        self.lines.append(f"{last}{MARK}{comment}" if comment else last)

    def close(self, header: str, footer: str = "}") -> None:
        """Hands the lines to the parent as a nested block; without a header, as they are."""
        assert self.parent is not None
        if not header:
            self.parent.lines += self.lines
            return
        self.parent.lines.append(header)
        self.parent.lines += ["  " + line for line in self.lines]
        self.parent.lines.append(footer)


class Body:
    """Writes the expressions of one kernel."""

    def __init__(self, v: Expr | None, n: int, roots: Iterable[Expr], level: dict[Expr, int]) -> None:
        self.v, self.n = v, n
        self.fits = narrow(walk_values(*roots), v) if v is not None else {}
        self.level = level
        self.arguments: dict[str, str] = {}  # buffer -> parameter
        self.outputs: frozenset[str] = frozenset()  # buffers that the kernel stores
        self.written: set[str] = set()
        self.dry = False  # checks only: nothing is stored
        self.dtypes: dict[str, torch.dtype] = {}
        self.arrays: dict[str, tuple[str, Expr, str]] = {}  # buffer that lives in an array: name, index, correction
        self.kept: dict[Expr, tuple[str, Expr]] = {}  # value kept since an earlier pass: array, index
        self.checks: list[tuple[str, str]] = []  # message, origin
        self.origin = ""
        self.names: dict[str, int] = {}

    # ---- names and places ---------------------------------------------------------------------------------------

    def fresh(self, stem: str = "tmp") -> str:
        k = self.names[stem] = self.names.get(stem, -1) + 1
        return f"{stem}{k}"

    def argument(self, buffer: str, dtype: torch.dtype, write: bool = False) -> str:
        """The parameter that points to a buffer of the graph."""
        if buffer not in self.arguments:
            self.arguments[buffer] = self.fresh("out" if buffer in self.outputs else "in")
            self.dtypes[buffer] = dtype
        if write:
            self.written.add(buffer)
        return self.arguments[buffer]

    def vector(self, e: Expr, b: Block) -> bool:
        return self.v is not None and self.v in e.free and not b.lane

    def register(self, e: Expr, b: Block) -> str:
        """The C++ element type that holds `e` in registers."""
        if e in self.fits and self.vector(e, b):
            return "i32"
        return TABLE[compute(e.dtype)].name if e.dtype is not torch.bool else "bool"

    def find(self, e: Expr, block: Block) -> str | None:
        b: Block | None = block
        while b is not None:
            if e in b.values:
                return b.values[e]
            if b.lane and not block.lane:
                raise AssertionError("a lane block is closed by its own loop")
            if b.lane and self.v in e.free and not (b.parent is not None and b.parent.lane):
                return None  # outside it is a vector
            b = b.parent
        return None

    def home(self, e: Expr, b: Block) -> Block:
        """The outermost block in which `e` can be computed."""
        while not b.closed and b.parent is not None and not (b.vars & e.free):
            if b.barrier and self.level.get(e, 0):
                break
            b = b.parent
        return b

    # ---- indices ------------------------------------------------------------------------------------------------

    def index(self, x: Expr, b: Block) -> str:
        """An index as C++ text. Checked values in it are at hand already."""
        memo: dict[Expr, str] = {}
        stack = [(x, False)]
        while stack:
            node, ready = stack.pop()
            if node in memo:
                continue
            inner = node.args[:1] if node.op in ("floordiv", "mod") else node.children
            if not ready and node.op in ("affine", "floordiv", "mod"):
                stack.append((node, True))
                stack += [(c, False) for c in inner]
            else:
                memo[node] = self._index(node, memo, b)
        return memo[x]

    def _index(self, node: Expr, memo: dict[Expr, str], b: Block) -> str:
        match node.op:
            case "var":
                return f"({node.name} + k)" if b.lane and node is self.v else node.name
            case "integer":
                return str(node.args[0])
            case "affine":
                order = sorted(node.args[1], key=lambda item: -abs(item[1]))  # outer loops first
                terms = [
                    memo[t] if c == 1 else f"-{_atomic(memo[t])}" if c == -1 else f"{c} * {_atomic(memo[t])}"
                    for t, c in order
                ]
                if node.args[0]:
                    terms.append(str(node.args[0]))
                return " + ".join(terms).replace("+ -", "- ")
            case "floordiv" | "mod":
                x, d = node.args
                if x.low < 0:
                    return f"{'floor_index' if node.op == 'floordiv' else 'mod_index'}({memo[x]}, {d})"
                return f"({_atomic(memo[x])} {'/' if node.op == 'floordiv' else '%'} {d})"
            case "index":
                found = self.find(node, b)
                assert found is not None
                return found
        raise UnsupportedError(f"index expression {node.op}")

    def offset(self, pointer: str, x: Expr, b: Block) -> str:
        text = self.index(x, b)
        return pointer if text == "0" else f"{pointer} + {text}".replace("+ -", "- ")

    # ---- values -------------------------------------------------------------------------------------------------

    def need(self, root: Expr, block: Block) -> str:
        """The text of `root`'s value in `block`."""
        stack: list[tuple[Expr, Block, bool]] = [(root, block, False)]
        while stack:
            e, b, ready = stack.pop()
            if ready:
                b.values[e] = self.masked(e, b) if e.op == "masked" and not self.plain(e) else self.define(e, b)
            elif self.find(e, b) is None:
                home = self.home(e, b)
                stack.append((e, home, True))
                stack += [(c, home, False) for c in reversed(self.operands(e, home))]
        text = self.find(root, block)
        assert text is not None
        return text

    def operands(self, e: Expr, b: Block) -> list[Expr]:
        """What must be at hand before `e` is written."""
        if e in self.kept and not b.lane:
            return []
        if e.op in ("load", "value"):
            x = e.args[1] if e.op == "load" else e.args[0]
            if self.vector(e, b) and slope(x, self.v, self.n) is None:
                return []  # its own lane block asks for them
            return indirect(x)
        if e.op == "masked" and not self.plain(e):
            return [e.args[0], e.args[2]]
        return list(e.children)

    def plain(self, e: Expr) -> bool:
        """Whether the value of a `masked` may be computed everywhere: it reads no memory and checks nothing."""
        return all(
            n.op not in ("load", "index") and not (n.op in CHECKED and not n.dtype.is_floating_point)
            and not (n.op == "value" and indirect(n.args[0]))
            for n in walk_values(e.args[1])
        )  # fmt: skip

    def literal(self, e: Expr, ctype: str) -> str:
        """A constant as C++ text, exactly."""
        x = e.args[0]
        if ctype in ("f32", "f64"):
            x = float(x)
            if e.dtype in HALF:
                x = float(torch.tensor(x, dtype=e.dtype))
            suffix = "f" if ctype == "f32" else ""
            if x != x:
                return f'__builtin_nan{suffix}("")'
            short = str(numpy.float32(x)) if ctype == "f32" else repr(x)  # the shortest text that reads back exactly
            x = float(short)
            if x in (float("inf"), -float("inf")):
                return f"{'-' if x < 0 else ''}__builtin_inf{suffix}()"
            return f"{short}{suffix}"
        if ctype == "bool":
            return "true" if x else "false"
        if ctype == "i64":
            return f"{x}l" if x > -(2**63) else "(-9223372036854775807l - 1)"
        if ctype == "i32":
            return str(x) if x > INT32[0] else "(-2147483647 - 1)"
        return f"({ctype}){x}"

    def operand(self, e: Expr, b: Block, ctype: str, as_vector: bool, direct: bool = False) -> str:
        """The text of an operand as `ctype`, as a vector where the operator wants one."""
        if self.vector(e, b):
            text = self.find(e, b)
            assert text is not None, e.op
            return f"cast<{ctype}>({text})" if self.register(e, b) != ctype else text
        if e.op == "const":
            text = self.literal(e, ctype)
        else:
            text = self.find(e, b) or ""
            assert text, e.op
            if self.register(e, b) != ctype:
                text = f"({ctype}){text}"
        if as_vector and not (direct and ctype in ("f32", "f64", "i32", "i64")):
            return f"splat<N>({text})"
        return f"({text})" if text.startswith("-") and direct else text

    def define(self, e: Expr, b: Block) -> str:
        """Writes the statement that computes `e` from operands at hand; gives its name."""
        op, vec = e.op, self.vector(e, b)
        if e in self.kept and vec:
            return self.put(b, f"load<N>({self.kept_at(e, b)}{self.tail(b)})", "kept")
        match op:
            case "const":
                return self.literal(e, self.register(e, b))
            case "load":
                return self.put(b, self.load(e, b, vec), e.name)
            case "value":
                return self.put(b, self.index_value(e, b, vec), "index")
            case "index":
                return self.checked_index(e, b)
            case "cast":
                text = self.convert(e, b, vec)
                plain = text.isidentifier() or text.endswith("[u]") or e.args[0].op == "const"
                return text if plain else self.put(b, text, f"to {TABLE[e.dtype].name}")
            case "masked":
                op = "where"
        atom = ATOMS.get(op)
        if atom is None or atom.cpp is None:
            raise UnsupportedError(f"{op}: no C++ spelling")
        return self.put(b, self.apply(op, e, b, vec), op)

    def keep(self, e: Expr, array: str, at: Expr) -> None:
        """From here on the value of `e` stands in an array, lane beside lane."""
        assert self.v is not None
        if slope(at, self.v, self.n) != 1:
            raise UnsupportedError("a kept value whose lanes do not lie side by side")
        self.kept[e] = (array, at)

    def kept_at(self, e: Expr, b: Block) -> str:
        array, at = self.kept[e]
        return f"&{array}[{self.index(at, b)}]"

    def put(self, b: Block, text: str, comment: str) -> str:
        name = self.fresh()
        b.line(f"const auto {name} = {text};", comment)
        return name

    def tail(self, b: Block) -> str:
        return f", {b.live}" if b.live else ""

    def narrow_and_scalar(self, pair: list[Expr], b: Block) -> tuple[Expr, Expr] | None:
        """A pair of int64 values of which one is a vector of narrow integers and the other the same in all lanes."""
        for x, y in (pair, reversed(pair)):
            if y.dtype is torch.int64 and y.op != "const" and self.vector(x, b) and x in self.fits and not self.vector(y, b):
                return x, y
        return None

    def apply(self, op: str, e: Expr, b: Block, vec: bool) -> str:
        """An atom on its operands."""
        args, spelled = list(e.args), ATOMS["where" if op == "masked" else op].cpp
        assert spelled is not None
        conditional = op == "where"
        typed = args[1:] if conditional else args
        if vec and op in ("eq", "ne") and (sides := self.narrow_and_scalar(typed, b)) is not None:
            found = f"same_index({self.find(sides[0], b)}, {self.operand(sides[1], b, 'i64', False)})"
            return found if op == "eq" else f"~{found}"
        if vec and all(a in self.fits or (a.op == "const" and INT32[0] <= a.args[0] <= INT32[1]) for a in typed
                       if a.dtype is torch.int64) and (e in self.fits or e.dtype is torch.bool):  # fmt: skip
            ctype = self.register(typed[0], b)
            if typed[0].dtype is torch.int64:
                ctype = "i32"
        else:
            ctype = TABLE[compute(typed[0].dtype)].name if typed[0].dtype is not torch.bool else "bool"
        if ctype == "bool" and not conditional:
            spelled = (_ON_MASKS if vec else _ON_BOOLS).get(op, spelled)
        elif op in _ON_INTEGERS and not e.dtype.is_floating_point:
            spelled = _ON_INTEGERS[op]
        if op in CHECKED and not e.dtype.is_floating_point:
            self.check_divisor(args[1], b, ctype)
        if conditional and not vec:
            cond, x, y = (self.operand(a, b, "bool" if i == 0 else ctype, False) for i, a in enumerate(args))
            return f"{cond} ? {x} : {y}"
        direct = not spelled[0].isalpha()
        mixed = vec and any(self.vector(a, b) for a in typed)  # a scalar operand may stay one
        if conditional:
            cond = self.operand(args[0], b, "bool", True)
            return spelled.format(cond, *(self.operand(a, b, ctype, True, direct=mixed) for a in typed))
        mixed = mixed and (direct or (op in _TAKES_SCALAR and self.vector(args[0], b)))
        texts = [self.operand(a, b, ctype, vec, direct=not vec or (mixed and ctype != "bool")) for a in args]
        text = spelled.format(*texts)
        if vec:
            if e.dtype is torch.bool and ctype != "bool" and _width(ctype) * self.n != self.bytes:
                return f"flags({text})"
            return text
        if ctype in ("i8", "i16", "u8") and e.dtype is not torch.bool:
            return f"({ctype})({text})"
        if ctype == "bool" and e.dtype is torch.bool:
            return f"(bool)({text})"
        return text

    bytes = 64  # of a vector register of the target; set by the kernel's writer

    def check_divisor(self, divisor: Expr, b: Block, ctype: str) -> None:
        if divisor.op == "const" and divisor.args[0] != 0:
            return
        k = self.check("ZeroDivisionError")
        if self.vector(divisor, b):
            zero = f"flags({self.operand(divisor, b, ctype, True)} == 0)"
            if b.live:
                zero = f"both({zero}, {b.live})"
            b.line(f"if (any({zero})) fail(code, {k});")
        else:
            b.line(f"if ({self.operand(divisor, b, ctype, False)} == 0) fail(code, {k});")

    def check(self, message: str) -> int:
        if (message, self.origin) not in self.checks:
            self.checks.append((message, self.origin))
        return self.checks.index((message, self.origin)) + 1

    def checked_index(self, e: Expr, b: Block) -> str:
        value, size = e.args
        if size == 0:
            raise UnsupportedError("an index into an empty dimension")
        name = self.fresh("at")
        b.line(f"i64 {name} = {self.operand(value, b, 'i64', False)};")
        b.line(f"if ((u64){name} >= {size}) {{ fail(code, {self.check('index out of range')}); {name} = 0; }}")
        return name

    def index_value(self, e: Expr, b: Block, vec: bool) -> str:
        x = e.args[0]
        ctype = "i32" if e in self.fits else "i64"
        if not vec:
            return f"(i64)({self.index(x, b)})"
        step = slope(x, self.v, self.n)
        if step is None:
            return self.lanewise(b, lambda inner: f"({ctype})({self.index_of(x, inner)})")
        return f"iota<N>(({ctype})({self.index(x, b)}), ({ctype}){step})"

    def index_of(self, x: Expr, b: Block) -> str:
        for inner in indirect(x):
            self.need(inner, b)
        return self.index(x, b)

    def load(self, e: Expr, b: Block, vec: bool) -> str:
        buffer, x = e.args
        if buffer in self.arrays:
            pointer, x, correction = self.arrays[buffer]
            half = ""
        else:
            pointer, correction = self.argument(buffer, e.dtype), ""
            half = self.tail(b)
        if not vec:
            if buffer in self.arrays:
                place = f"{pointer}[{self.index(x, b)}{correction}]"
                return f"get(&{place})" if e.dtype is torch.bool else place
            if e.dtype in HALF or e.dtype is torch.bool:
                return f"get({self.offset(pointer, x, b)})"
            return f"{pointer}[{self.index(x, b)}]"
        step = slope(x, self.v, self.n)
        if step == 1:
            return f"load<N>({self.offset(pointer, x, b)}{correction}{half})"
        masked = b.live not in ("", "n")
        if step == 0 and not masked:  # the same element in every lane, but not in every vector
            return f"splat<N>(get({self.offset(pointer, x, b)}))"
        if step is None or masked:
            return self.lanewise(b, lambda inner: f"get({pointer} + {self.index_of(x, inner)})")
        return f"load_strided<N>({self.offset(pointer, x, b)}, {step}, {b.live or 'All()'})"

    def lanewise(self, b: Block, result) -> str:
        """A loop over the live lanes, each computed as a scalar."""
        inner = Block(b, closed=True, lane=True)
        text = result(inner)
        lines = [f"lanewise<N>({b.live or 'All()'}, [&](int k) INLINE {{"]
        lines += ["  " + line for line in inner.lines]
        lines += [f"  return {text};", "})"]
        if not inner.lines:
            return f"lanewise<N>({b.live or 'All()'}, [&](int k) INLINE {{ return {text}; }})"
        return "\n".join(lines)

    def convert(self, e: Expr, b: Block, vec: bool) -> str:
        """Tensor.to, on registers."""
        x = e.args[0]
        source, to = x.dtype, e.dtype
        if x.op == "const":  # as torch converts it: a compiler folds what is out of range in its own way
            folded = const(torch.tensor(x.args[0], dtype=source).to(to).item(), to)
            return self.literal(folded, self.register(folded, b))
        have = self.register(x, b)
        text = self.find(x, b)
        assert text is not None
        want = TABLE[compute(to)].name
        if to is torch.bool:
            if vec:
                return f"truth({text})"
            return f"{text} != 0"
        if source is torch.bool:
            return f"from_mask<{want}>({text})" if vec else f"({want}){text}"
        if have != want:
            text = f"cast<{want}>({text})" if vec else f"cast_lane<{want}>({text})"
        if to in HALF and source is not to:
            text = f"round_{TABLE[to].name}({text})"
        return text

    def masked(self, e: Expr, b: Block) -> str:
        """A value that exists only where its condition holds."""
        cond, x, other = e.args
        vec, ctype = self.vector(e, b), self.register(e, b)
        name = self.fresh()
        kind = ("mask<N>" if ctype == "bool" else f"vec<{ctype}, N>") if vec else ctype
        b.line(f"{kind} {name} = {self.operand(other, b, ctype, vec)};", "masked")
        if self.vector(cond, b):
            live = self.fresh("live")
            flag = self.find(cond, b)
            b.line(f"const mask<N> {live} = {f'both({flag}, {b.live})' if b.live else flag};")
            inner = Block(b, closed=True, live=live)
            self.need(x, inner)
            inner.line(f"{name} = where({live}, {self.operand(x, inner, ctype, True)}, {name});")
            inner.close(f"if (any({live})) {{")
        else:
            inner = Block(b, closed=True, live=b.live, lane=b.lane)
            self.need(x, inner)
            inner.line(f"{name} = {self.operand(x, inner, ctype, vec)};")
            inner.close(f"if ({self.operand(cond, b, 'bool', False)}) {{")
        return name

    # ---- stores -------------------------------------------------------------------------------------------------

    def store(self, buffer: str, dtype: torch.dtype, at: Expr, e: Expr, b: Block) -> None:
        """Writes the value of `e` to element `at` of a buffer in memory."""
        value = unrounded(e, dtype)
        self.need(value, b)
        for inner in indirect(at):
            self.need(inner, b)
        if self.dry:
            return
        pointer = self.argument(buffer, dtype, write=True)
        vec = self.v is not None and (self.v in e.free or self.v in at.free) and not b.lane
        ctype = TABLE[compute(dtype)].name if dtype is not torch.bool else "bool"
        text = self.operand(value, b, ctype, vec)
        if not vec:
            plain = dtype not in HALF and dtype is not torch.bool
            where = self.index(at, b)
            b.line(f"{pointer}[{where}] = {text};" if plain else f"put({self.offset(pointer, at, b)}, {text});", buffer)
            return
        step = slope(at, self.v, self.n)
        if step == 1:
            b.line(f"store<N>({self.offset(pointer, at, b)}, {text}{self.tail(b)});", buffer)
        elif step is not None:
            b.line(f"store_strided<N>({self.offset(pointer, at, b)}, {step}, {text}, {b.live or 'All()'});", buffer)
        else:
            lane = Block(b, closed=True, lane=True)
            b.line(f"store_at<N>({pointer}, {text}, {b.live or 'All()'}, [&](int k) INLINE {{ return {self.index(at, lane)}; }});", buffer)


def _atomic(text: str) -> str:
    return text if text.isidentifier() or (text.startswith("(") and text.endswith(")") and text.count("(") == 1) else f"({text})"


def _width(ctype: str) -> int:
    return {"f32": 4, "f64": 8, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1}[ctype]


def unrounded(e: Expr, dtype: torch.dtype) -> Expr:
    """What is handed to a store of `dtype`, which rounds."""
    value = cast(e, dtype)
    while dtype in HALF and value.op == "cast" and value.args[0].dtype in (torch.float32, dtype):
        value = value.args[0]
    return value


def indirect(x: Expr) -> list[Expr]:
    """The checked values inside an index, outermost."""
    out: list[Expr] = []
    stack = [x]
    while stack:
        node = stack.pop()
        if node.op == "index":
            out.append(node)
        elif node.op in ("affine", "floordiv", "mod"):
            stack += [t for t, _ in parts(node)[1]] if node.op == "affine" else [node.args[0]]
    return out
