"""The statements of a Triton kernel that compute values: index vectors, loads, operators.

In: expressions, driven by what is stored and reduced.  Out: statements, in two lists: those that run once a program
and those of the walk along a row (one list where the row is held in registers).
Always: evaluation is iterative and memoized by the node. A load is masked by the index vectors that its offset has,
and by the conditions of the `masked` around it; what was read without a condition may be used under any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from ....errors import UnsupportedError
from ...dtypes import TABLE
from ...expr import Expr
from ...loops.nodes import Buffer, Pointwise, Reduction
from ...schedule.plan import Kernel
from .spell import cast, full, literal, spelling

NAMED = 60  # longer index text gets a name


@dataclass(frozen=True)
class Value:
    """A value at hand: its text (a name, or index arithmetic), the index vectors that its shape has, and whether it
    read memory."""

    text: str
    x: bool = False
    r: bool = False
    reads: bool = False


Guard = tuple[Value, ...]  # conditions that hold where an expression is evaluated
Key = tuple[Expr, Guard]


@dataclass
class Values:
    """Values of one kernel, as they come into being."""

    kernel: Kernel
    outer: list[str] = field(default_factory=list)
    inner: list[str] = field(default_factory=list)
    rows: dict[Key, Value] = field(default_factory=dict)  # values that do not change along the row
    walk: dict[Key, Value] = field(default_factory=dict)  # values of the current walk
    done: dict[str, Value] = field(default_factory=dict)  # results of complete reductions, by buffer
    slots: dict[str, str] = field(default_factory=dict)  # buffer -> pointer argument
    last: bool = True  # nobody walks the row again
    checked: bool = False  # asserts run-time indices
    count: int = 0

    def __post_init__(self) -> None:
        k = self.kernel
        self.makers = {b.name: (n, b) for n in k.nodes for b in n.outputs}
        self.rowed = bool(k.rdims) or any(isinstance(n.loop, Reduction) for n in k.nodes)
        self.xnumel, self.rnumel = (prod(v.args[1] for v in vs) for vs in (k.dims, k.rdims))
        self.rmask = True  # whether a block of the row may reach beyond it
        self.unit = "[1, 1]" if self.rowed else "[1]"

    # ---- statements ----

    def name(self, prefix: str = "tmp") -> str:
        self.count += 1
        return f"{prefix}{self.count - 1}"

    def say(self, text: str, like: Iterable[Value], reads: bool = False, comment: str = "") -> Value:
        """A statement that computes `text`, of the common shape of `like`."""
        x, r, read = shape(like)
        name = self.name()
        (self.inner if r else self.outer).append(f"{name} = {text}" + (f"  # {comment}" if comment else ""))
        return Value(name, x, r, read or reads)

    def mask(self, x: bool, r: bool, guard: Guard = ()) -> str:
        masks = [m for m, on in (("xmask", x), ("r0_mask", r and self.rmask)) if on]
        return " & ".join([*masks, *(g.text for g in guard)])

    def block(self, x: bool, r: bool) -> str:
        """The shape that has these index vectors."""
        if not self.rowed:
            return "[XBLOCK]" if x else "[1]"
        return f"[{'XBLOCK' if x else 1}, {'R0_BLOCK' if r else 1}]"

    def spread(self, v: Value, x: bool, r: bool) -> str:
        """The text of `v` as a block of this shape; what has no index vector may be a scalar."""
        if (v.x, v.r) == (x, r) and (x or r):
            return v.text
        if v.text.lstrip("-").isdigit():
            return f"tl.full({self.block(x, r)}, {v.text}, tl.int64)"
        return f"tl.broadcast_to({v.text}, {self.block(x, r)})"

    def slot(self, buffer: str, prefix: str) -> str:
        """The pointer argument of a buffer."""
        if buffer not in self.slots:
            self.slots[buffer] = f"{prefix}{sum(s.startswith(prefix) for s in self.slots.values())}"
        return self.slots[buffer]

    # ---- evaluation ----

    def value(self, root: Expr) -> Value:
        """The value of `root`; says what it needs and is not at hand yet."""
        stack: list[Key] = [(root, ())]
        while stack:
            node, guard = stack[-1]
            if self.find(node, guard) is None:
                missing = [w for w in self.operands(node, guard) if self.find(*w) is None]
                if missing:
                    stack.extend(reversed(missing))
                    continue
                v = self.emit(node, guard)
                (self.walk if v.r else self.rows)[node, guard if v.reads else ()] = v
            stack.pop()
        return self.hand(root, ())

    def find(self, node: Expr, guard: Guard) -> Value | None:
        for key in ((node, ()), (node, guard)):
            v = self.rows.get(key) or self.walk.get(key)
            if v is not None:
                return v
        return None

    def hand(self, node: Expr, guard: Guard) -> Value:
        v = self.find(node, guard)
        assert v is not None, node
        return v

    def operands(self, node: Expr, guard: Guard) -> list[Key]:
        """What must be at hand before `node` is said."""
        if node.op == "masked":
            cond, x, other = node.args
            c = self.find(cond, guard)
            return [(cond, guard)] if c is None else [(x, (*guard, c)), (other, guard)]
        if node.op == "load" and node.name in self.makers:
            loop = self.makers[node.name][0].loop
            return [(loop.body, ())] if isinstance(loop, Pointwise) else []
        return [(c, guard) for c in node.children]

    def emit(self, node: Expr, guard: Guard) -> Value:
        args = node.args
        if node.op == "const":
            return self.say(full(args[0], node.dtype, self.unit), ())
        if node.op == "load":
            return self.own(node) if node.name in self.makers else self.load(node, guard)
        if node.op == "masked":
            c = self.hand(args[0], guard)
            vs = (c, self.hand(args[1], (*guard, c)), self.hand(args[2], guard))
            return self.say(f"tl.where({', '.join(v.text for v in vs)})", vs, comment="masked")
        operands = [self.hand(c, guard) for c in node.children]
        if node.is_index:
            return self.index(node, operands, guard)
        if node.op == "value":
            constant = args[0].op == "integer"
            text = full(args[0].args[0], node.dtype, self.unit) if constant else f"({operands[0].text}).to(tl.int64)"
            return self.say(text, operands)
        if node.op == "cast":
            return self.say(cast(operands[0].text, args[0].dtype, node.dtype), operands)
        template = spelling(node.op, args[-1].dtype)
        if template is None:
            raise UnsupportedError(f"{node.op} of {args[-1].dtype} has no Triton spelling")
        return self.say(template.format(*(v.text for v in operands)), operands, comment=node.op)

    def own(self, node: Expr) -> Value:
        """A value that this kernel made, in the dtype of its buffer."""
        maker, buffer = self.makers[node.name]
        if not isinstance(maker.loop, Pointwise):
            return self.done[node.name]
        return self.stored(self.hand(maker.loop.body, ()), maker.loop.body.dtype, buffer)

    def stored(self, v: Value, have: torch.dtype, buffer: Buffer) -> Value:
        """The value as its buffer holds it."""
        return v if have == buffer.dtype else self.say(cast(v.text, have, buffer.dtype), [v])

    def load(self, node: Expr, guard: Guard) -> Value:
        at = self.hand(node.args[1], guard)
        x, r, _ = shape([at, *guard])
        options = []
        if mask := self.mask(x, r, guard):
            policy = f"eviction_policy='{'evict_first' if self.last and x else 'evict_last'}'"
            zero = literal(0.0 if node.dtype.is_floating_point else 0)
            options = [mask, *([policy] if r else []), f"other={zero}"]
        where = self.spread(at, x, r) if guard else at.text  # a mask needs a block of pointers
        pointer = f"{self.slot(node.name, 'in_ptr')} + {where}"
        text = f"tl.load({', '.join([pointer, *options])})"
        if TABLE[node.dtype].name == "b1":
            text += ".to(tl.int1)"
        return self.say(text, [at, *guard], True, node.name)

    def index(self, node: Expr, operands: Sequence[Value], guard: Guard) -> Value:
        """Index arithmetic. Triton's `//` and `%` truncate, so an operand that may be negative is moved first."""
        args = node.args
        match node.op:
            case "var":
                return Value(node.name, node in self.kernel.dims, node in self.kernel.rdims)
            case "integer":
                return Value(str(args[0]))
            case "affine":
                terms = [
                    (c, v.text if v.text.isidentifier() or v.text.startswith("(") else f"({v.text})")
                    for v, (_, c) in zip(operands, args[1], strict=True)
                ]
                pieces = [("-" if c < 0 else "+", t if abs(c) == 1 else f"{abs(c)}*{t}") for c, t in terms]
                if args[0]:
                    pieces.append(("-" if args[0] < 0 else "+", str(abs(args[0]))))
                text = " ".join(f"{sign} {t}" for sign, t in pieces).removeprefix("+ ")
                return self.short(f"({text})", operands)
            case "floordiv" | "mod":
                d = args[1]
                up = max(-(args[0].low // d), 0)
                operand = f"({operands[0].text} + {up * d})" if up else operands[0].text
                text = f"{operand} {'//' if node.op == 'floordiv' else '%'} {d}"
                return self.short(f"({text} - {up})" if up and node.op == "floordiv" else f"({text})", operands)
            case "index":
                (v,) = operands
                inside = f"({v.text} >= 0) & ({v.text} < {args[1]})"
                if mask := self.mask(v.x, v.r, guard):
                    inside = f"({inside}) | ~({mask})"
                text = f'tl.device_assert({inside}, "index out of range: 0 <= {v.text} < {args[1]}")'
                (self.inner if shape([v, *guard])[1] else self.outer).append(text)
                self.checked = True
                return Value(v.text, v.x, v.r, True)  # checked under this guard only
        raise UnsupportedError(f"{node.op} is no index")

    def short(self, text: str, operands: Sequence[Value]) -> Value:
        if len(text) > NAMED:
            return self.say(text, operands)
        return Value(text, *shape(operands))


def shape(values: Iterable[Value]) -> tuple[bool, bool, bool]:
    """The index vectors that the values have together, and whether one of them read memory."""
    x = r = reads = False
    for v in values:
        x, r, reads = x or v.x, r or v.r, reads or v.reads
    return x, r, reads
