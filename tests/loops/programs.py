"""Random loop-level programs: every construct, ordinary and special values, operations whose result is exact."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch

from tensorplay.stax import expr as ex
from tensorplay.stax.expr import Expr, const, load, make, var
from tensorplay.stax.loops.nodes import Buffer, Compute, Extern, Loops, Node, Pointwise, Reduction, Ref, Scan, row_major

CPU = torch.device("cpu")
F32, F64, I64, I32, B1 = torch.float32, torch.float64, torch.int64, torch.int32, torch.bool
SPECIAL = (0.0, -0.0, 1e-40, -1e-45, 1.0, -1.5, 3e38, math.inf, -math.inf, math.nan)
# exactly rounded whatever the layout, so that transformed programs agree to the bit
EXACT = {
    "f": ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "neg", "abs", "sqrt", "floor", "round", "fmax"),
    "i": ("add", "sub", "mul", "maximum", "minimum", "neg", "bitwise_and", "bitwise_xor", "div_floor", "remainder"),
    "b": ("logical_and", "logical_or", "logical_xor", "logical_not"),
}
TESTS = ("eq", "ne", "lt", "le", "gt", "ge")
UNARY = frozenset({"neg", "abs", "sqrt", "floor", "round", "logical_not"})


def kind(dtype: torch.dtype) -> str:
    return "b" if dtype == B1 else "f" if dtype.is_floating_point else "i"


def buffer(name: str, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int] | None = None) -> Buffer:
    return Buffer(name, dtype, CPU, tuple(size), tuple(stride) if stride is not None else row_major(size))


def whole(b: Buffer) -> Ref:
    return Ref(b.name, b.size, b.stride)


def tensor(b: Buffer, seed: int) -> torch.Tensor:
    """Values for an input: special ones among ordinary ones."""
    g = torch.Generator().manual_seed(seed)
    n = max(b.span, 1)
    if b.dtype == B1:
        t = torch.randint(0, 2, (n,), generator=g).bool()
    elif b.dtype.is_floating_point:
        t = torch.randn(n, generator=g, dtype=torch.float64).to(b.dtype)
        some = torch.randint(0, 4 * len(SPECIAL), (n,), generator=g)
        t = torch.where(some < len(SPECIAL), torch.tensor(SPECIAL, dtype=b.dtype)[some % len(SPECIAL)], t)
    else:
        t = torch.randint(-9, 10, (n,), generator=g).to(b.dtype)
    return t.as_strided(b.size, b.stride)


class Programs:
    """Draws one program: `Programs(seed).loops()`."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.readable: list[Buffer] = []
        self.nodes: list[Node] = []

    def loops(self, nodes: int = 4) -> Loops:
        r = self.random
        size = tuple(r.choice((1, 2, 3, 5)) for _ in range(r.choice((0, 1, 2, 2, 3))))
        if r.random() < 0.1 and size:
            size = (0, *size[1:])
        inputs = []
        for k in range(r.randint(1, 3)):
            order = list(range(len(size)))
            r.shuffle(order)
            stride = [0] * len(size)
            step = 1
            for d in order:
                stride[d] = 0 if r.random() < 0.1 else step
                step *= max(size[d], 1) + (r.random() < 0.2)
            inputs.append(buffer(f"x{k}", r.choice((F32, F32, F64, I64, I32, B1)), size, stride))
        constants = {"c": tensor(buffer("c", F32, (7,)), 1)}
        self.readable = [*inputs, buffer("c", F32, (7,))]
        for k in range(nodes):
            self.node(k, size)
        made = [b for n in self.nodes for b in n.writes]
        outputs = tuple(whole(self.named(m)) for m in r.sample(made, r.randint(1, len(made))))
        if r.random() < 0.3:
            outputs += (whole(inputs[0]), None)
        return Loops(tuple(inputs), tuple(self.nodes), outputs, constants, {"add": "model.py:3"})

    def named(self, name: str) -> Buffer:
        return next(b for b in self.readable if b.name == name)

    def node(self, k: int, size: tuple[int, ...]) -> None:
        r = self.random
        vars_ = tuple(var(f"i{d}", n) for d, n in enumerate(size))
        draw = r.random()
        origins = tuple(r.sample(("add", "mul", "relu"), r.randint(0, 2)))
        if draw < 0.1:
            source = r.choice([b for b in self.readable if b.size == size] or self.readable)
            if source.dtype != B1:
                out = buffer(f"buf{k}", source.dtype, source.size)
                args = (whole(source), whole(source))
                self.nodes.append(Extern((out,), torch.ops.aten.add.Tensor, args, (("alpha", 2),), origins=origins))
                self.readable.append(out)
                return
        if draw < 0.4:
            rvars = tuple(var(f"r{d}", r.choice((0, 1, 3, 4) if d else (1, 2, 5))) for d in range(r.randint(1, 2)))
            body = self.value(vars_ + rvars, 3)
            kinds = ("amax", "amin", "argmax", "argmin", "max_index", "sum", "prod")
            which = r.choice(("any", "all")) if body.dtype == B1 else r.choice(kinds)
            if any(v.args[1] == 0 for v in rvars) and which not in ("sum", "prod", "any", "all"):
                which = "amax"
            outs = [buffer(f"buf{k}", I64 if which.startswith("arg") else body.dtype, size)]
            if which == "max_index":
                outs.append(buffer(f"buf{k}_index", I64, size))
            loop = Reduction(which, vars_, rvars, body)
        elif draw < 0.5 and size:
            body = self.value(vars_, 3, (F32, F64, I64))
            loop = Scan("max_index", vars_, r.randrange(len(size)), body)
            outs = [buffer(f"buf{k}", body.dtype, size), buffer(f"buf{k}_index", I64, size)]
        else:
            loop = Pointwise(vars_, self.value(vars_, 5))
            stride = row_major(size)
            if len(size) == 2 and r.random() < 0.5 and 0 not in size:
                stride = (1, size[0])
            outs = [buffer(f"buf{k}", loop.body.dtype, size, stride)]
        self.nodes.append(Compute(tuple(outs), tuple(b.at(vars_) for b in outs), loop, origins))
        self.readable += outs

    def index(self, vars_: tuple[Expr, ...], n: int) -> Expr:
        """An index expression within [0, n)."""
        r = self.random
        x = ex.integer(r.randint(0, 5))
        for v in r.sample(vars_, min(len(vars_), 3)):
            x = ex.add(x, ex.mul(v, r.choice((1, 2, 3, -1))))
        if r.random() < 0.3:
            x = ex.floordiv(x, r.choice((2, 3)))
        if r.random() < 0.2:
            return ex.index(make("remainder", (ex.value(x), const(n, I64)), I64), n)
        return ex.mod(x, n)

    def leaf(self, vars_: tuple[Expr, ...]) -> Expr:
        r = self.random
        usable = [b for b in self.readable if b.span]
        draw = r.random()
        if draw < 0.15 or not usable:
            dtype = r.choice((F32, I64, B1))
            choices = {"f": SPECIAL, "i": (0, 1, -3, 7), "b": (True, False)}
            return const(r.choice(choices[kind(dtype)]), dtype)
        if draw < 0.25 and vars_:
            return ex.value(self.index(vars_, 9))
        b = r.choice(usable)
        if len(b.size) <= len(vars_) and all(n == v.args[1] for n, v in zip(b.size, vars_)) and r.random() < 0.6:
            return load(b.name, b.at(vars_[: len(b.size)]), b.dtype)
        return load(b.name, b.at([self.index(vars_, n) for n in b.size]), b.dtype)

    def value(self, vars_: tuple[Expr, ...], depth: int, dtypes: Sequence[torch.dtype] = (F32, F64, I64, I32, B1)) -> Expr:
        r = self.random
        pool = [self.leaf(vars_) for _ in range(3)]
        for _ in range(r.randint(0, 3 * depth)):
            a = r.choice(pool)
            b = ex.cast(r.choice(pool), a.dtype)
            draw = r.random()
            if draw < 0.15:
                pool.append(ex.cast(a, r.choice((F32, F64, B1)) if a.dtype.is_floating_point else r.choice(dtypes)))
            elif draw < 0.25:
                cond = make(r.choice(TESTS), (a, b), B1)
                pool.append(make("where", (cond, a, b), a.dtype))
            elif draw < 0.35 and vars_:
                v = r.choice(vars_)
                usable = [x for x in self.readable if x.span > 1]
                if usable:
                    x = r.choice(usable)
                    at = ex.add(v, -1)
                    inside = load(x.name, at, x.dtype)
                    cond = ex.in_range(at, 0, x.span)
                    pool.append(ex.masked(cond, inside, ex.cast(const(0, I64), x.dtype)))
            else:
                op = r.choice(EXACT[kind(a.dtype)])
                if op in ("div_floor", "remainder"):
                    b = const(r.choice((1, 2, -3)), a.dtype)
                pool.append(make(op, (a,) if op in UNARY else (a, b), a.dtype))
        last = pool[-1]
        if last.dtype in dtypes:
            return last
        return ex.cast(last, dtypes[0])
