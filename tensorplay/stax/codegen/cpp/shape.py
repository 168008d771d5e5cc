"""What a kernel computes, made ready for writing: inlined values, reductions in passes, the loop along the lanes.

In: a `Kernel` of the plan.  Out: a `Shape`: every store of the kernel as an expression over loads from outside and
from reductions, each with the pass in which it can be computed.
Always: pass p may read the reductions of passes before p; a value of a Pointwise node is inlined where it is read, so
it lives in a register; Welford is two reductions, the mean and the sum of squared deviations from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from ....errors import UnsupportedError
from ...expr import Expr, affine, cast, integer, load, make, parts, postorder, rebuild, substitute, var
from ...loops.nodes import Compute, Pointwise, Reduction, Scan
from ...schedule.plan import Kernel
from .lanes import slope, walk_values

HEAVY = {  # cycles of a vector of each operator; 1 for the rest
    "exp": 8, "log": 9, "tanh": 14, "erf": 14, "sigmoid": 12, "div": 5, "sqrt": 6, "rsqrt": 10, "pow": 60, "sin": 25,
    "cos": 25, "tan": 40, "exp2": 15, "expm1": 25, "log1p": 25, "log2": 20, "log10": 20, "asin": 30, "acos": 30,
    "atan": 30, "atan2": 50, "sinh": 30, "cosh": 30, "asinh": 50, "acosh": 50, "atanh": 40, "erfc": 60, "lgamma": 120,
    "hypot": 20, "fmod": 200, "nextafter": 100, "remainder": 200, "div_floor": 200, "div_trunc": 200,
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One output of a reduction: the buffer, where it is stored, and whether memory holds it."""

    name: str
    dtype: torch.dtype
    at: Expr
    stored: bool

    @property
    def read(self) -> Expr:
        """The expression by which later values read it."""
        return load(self.name, self.at, self.dtype)


@dataclass(frozen=True)
class Fold:
    """A reduction over the kernel's rdims. `results` may hold None where nobody reads one."""

    kind: str  # a kind of nodes.REDUCTIONS, or 'mean'
    body: Expr
    results: tuple[Result, ...]
    level: int
    origin: str


@dataclass(frozen=True)
class Store:
    """An element that is written at every point (`full`) or once a row."""

    name: str
    dtype: torch.dtype
    at: Expr
    value: Expr
    full: bool
    level: int
    origin: str


@dataclass(frozen=True)
class Shape:
    """A kernel as folds and stores."""

    name: str
    dims: tuple[Expr, ...]
    rdims: tuple[Expr, ...]
    folds: tuple[Fold, ...]
    stores: tuple[Store, ...]
    scan: Compute | None
    level: dict[Expr, int]

    @property
    def passes(self) -> int:
        return 1 + max([f.level for f in self.folds] + [s.level for s in self.stores if s.full], default=0)

    @property
    def roots(self) -> list[Expr]:
        return [f.body for f in self.folds] + [s.value for s in self.stores]

    @property
    def points(self) -> int:
        n = 1
        for v in self.dims + self.rdims:
            n *= v.args[1]
        return n

    @property
    def empty_reduction(self) -> bool:
        return any(v.args[1] == 0 for v in self.rdims)


def shape_of(kernel: Kernel, written_inputs: Iterable[str]) -> Shape:
    """The kernel with its values inlined and its passes numbered."""
    kernel = _collapse(_without_ones(kernel))
    full = frozenset(kernel.rdims)
    produced: dict[str, Expr] = {}  # buffers of this kernel that are values in registers
    reductions: set[str] = set()
    memo: dict[Expr, Expr] = {}
    level: dict[Expr, int] = {}
    folds: list[Fold] = []
    stores: list[Store] = []
    scan = None
    ready: dict[str, int] = {}  # reduction result -> level of its readers
    written: set[str] = set()
    for node in kernel.nodes:
        for read in node.reads:
            if read in written:
                raise UnsupportedError(f"kernel {kernel.name} reads {read} after writing it back")
        body = _inline(node.loop.body, produced, memo)
        _levels(body, ready, level)
        origin = node.origins[0] if node.origins else ""
        if isinstance(node.loop, Scan):
            scan = replace(node, loop=replace(node.loop, body=body))
            continue
        if isinstance(node.loop, Pointwise):
            buffer = node.outputs[0]
            value = cast(body, buffer.dtype)
            level[value] = level[body]
            if buffer.name in written_inputs:
                written.add(buffer.name)
            else:
                produced[buffer.name] = value
                memo.pop(load(buffer.name, node.at[0], buffer.dtype), None)
            if buffer.name not in kernel.local:
                everywhere = not full or bool(full & frozenset(node.vars))
                stores.append(Store(buffer.name, buffer.dtype, node.at[0], value, everywhere, level[body], origin))
            continue
        assert isinstance(node.loop, Reduction)
        results = tuple(
            Result(b.name, b.dtype, at, b.name not in kernel.local) for b, at in zip(node.outputs, node.at, strict=True)
        )
        reductions.update(r.name for r in results)
        written.update(r.name for r in results if r.name in written_inputs)
        first = level[body]
        if node.loop.kind == "welford":
            mean = Result(f"{results[0].name}'mean", body.dtype, node.at[0], False)
            folds.append(Fold("mean", body, (mean, results[0]), first, origin))
            ready[mean.name] = ready[results[0].name] = first + 1
            off = make("sub", (body, mean.read), body.dtype)
            square = make("mul", (off, off), body.dtype)
            _levels(square, ready, level)
            folds.append(Fold("sum", square, (results[1],), first + 1, origin))
            ready[results[1].name] = first + 2
        else:
            folds.append(Fold(node.loop.kind, body, results, first, origin))
            for r in results:
                ready[r.name] = first + 1
    return Shape(kernel.name, kernel.dims, kernel.rdims, tuple(folds), tuple(stores), scan, level)


def _levels(root: Expr, ready: dict[str, int], level: dict[Expr, int]) -> None:
    for node in postorder(root):
        if node not in level:
            found = max((level[c] for c in node.children), default=0)
            if node.op == "load":
                found = max(found, ready.get(node.args[0], 0))
            level[node] = found


def _inline(root: Expr, produced: dict[str, Expr], memo: dict[Expr, Expr]) -> Expr:
    """`root` with loads of the kernel's own pointwise buffers replaced by their values; linear over all nodes."""
    stack: list[tuple[Expr, bool]] = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if node in memo:
            continue
        if node.op == "load" and node.args[0] in produced:
            memo[node] = produced[node.args[0]]
        elif not ready:
            stack.append((node, True))
            stack += [(c, False) for c in node.children if c not in memo]
        else:
            new = rebuild(node, memo.__getitem__) if node.children else node
            memo[node] = new
            memo[new] = new
    return memo[root]


# ---- loops ---------------------------------------------------------------------------------------------------------


def _replaced(kernel: Kernel, at: dict[Expr, Expr], dims: tuple[Expr, ...], rdims: tuple[Expr, ...]) -> Kernel:
    gone = frozenset(at)

    def renamed(variables: tuple[Expr, ...]) -> tuple[Expr, ...]:
        out: list[Expr] = []
        for v in variables:
            new = at.get(v, v)
            out += [u for u in ((new,) if new.op == "var" else ()) if u not in out]
        return tuple(out)

    nodes = []
    for node in kernel.nodes:
        loop, body = node.loop, substitute(node.loop.body, at)
        if isinstance(loop, Scan):
            if loop.vars[loop.axis] in gone:
                return kernel
            axis = loop.vars[loop.axis]
            variables = renamed(loop.vars)
            loop = Scan(loop.kind, variables, variables.index(axis), body)
        elif isinstance(loop, Reduction):
            loop = Reduction(loop.kind, renamed(loop.vars), renamed(loop.rvars), body)
        else:
            loop = Pointwise(renamed(loop.vars), body)
        nodes.append(replace(node, loop=loop, at=tuple(substitute(a, at) for a in node.at)))
    return replace(kernel, dims=dims, rdims=rdims, nodes=tuple(nodes))


def _without_ones(kernel: Kernel) -> Kernel:
    scans = [n.loop.vars[n.loop.axis] for n in kernel.nodes if isinstance(n.loop, Scan)]
    at = {v: integer(0) for v in kernel.dims + kernel.rdims if v.args[1] == 1 and v not in scans}
    keep = [v for v in kernel.rdims if v not in at]
    if kernel.rdims and not keep:  # a reduction keeps one loop
        keep = [kernel.rdims[-1]]
        del at[kernel.rdims[-1]]
    if not at:
        return kernel
    return _replaced(kernel, at, tuple(v for v in kernel.dims if v not in at), tuple(keep))


def _indices(kernel: Kernel) -> list[Expr]:
    out: dict[Expr, None] = {}
    for node in kernel.nodes:
        out.update(dict.fromkeys(node.at))
        for n in postorder(node.loop.body):
            if n.op == "load":
                out[n.args[1]] = None
            elif n.op == "value":
                out[n.args[0]] = None
    return list(out)


def _collapse(kernel: Kernel) -> Kernel:
    """Adjacent loops that every index sees as one become one."""
    for group in (kernel.dims, kernel.rdims):
        variables = list(group)
        k = len(variables) - 2
        while k >= 0:
            a, b = variables[k], variables[k + 1]
            if any(isinstance(n.loop, Scan) and n.loop.vars[n.loop.axis] in (a, b) for n in kernel.nodes):
                k -= 1
                continue
            if all(_joins(x, a, b) for x in _indices(kernel)) and all(
                (a in n.vars + n.rvars) == (b in n.vars + n.rvars) for n in kernel.nodes
            ):
                joined = var(a.name, a.args[1] * b.args[1])
                dims = tuple(joined if v is b else v for v in kernel.dims if v is not a)
                rdims = tuple(joined if v is b else v for v in kernel.rdims if v is not a)
                split = {a: integer(0), b: joined}
                kernel = _replaced(kernel, split, dims, rdims)
                variables[k : k + 2] = [joined]
            k -= 1
    return kernel


def _joins(x: Expr, a: Expr, b: Expr) -> bool:
    ca = cb = 0
    for term, c in parts(x)[1]:
        if term is a:
            ca = c
        elif term is b:
            cb = c
        elif a in term.free or b in term.free:
            return False
    return ca == cb * b.args[1]


# ---- the loop along the lanes --------------------------------------------------------------------------------------


def accesses(shape: Shape, n: int) -> list[tuple[Expr, float]]:
    """Memory offsets with their weights: a store counts more than a load, a half or byte less than a word."""
    out: dict[tuple[Expr, str], float] = {}
    own = {r.name for f in shape.folds for r in f.results}
    roots = shape.roots + ([shape.scan.loop.body] if shape.scan else [])
    for node in walk_values(*roots):
        if node.op == "load" and node.args[0] not in own:
            out[node.args[1], node.args[0]] = 1.0
    stores = [(s.at, s.name) for s in shape.stores]
    if shape.scan:
        stores += [(at, b.name) for at, b in zip(shape.scan.at, shape.scan.outputs, strict=True)]
    for at, name in stores:
        out[at, name] = 1.5
    return [(x, weight) for (x, _), weight in out.items()]


def lane_score(shape: Shape, v: Expr, n: int) -> float:
    """How well the memory accesses of a kernel suit lanes along `v`: the share that is contiguous."""
    size = v.args[1]
    if size < 2:
        return -1.0
    score = 0.0
    for x, weight in accesses(shape, n):
        if v not in x.free:
            continue
        step = slope(x, v, n)
        score += weight if step == 1 else 0.3 * weight if step == 0 else -0.7 * weight
    return score * min(1.0, size / n)


def cycles(roots: Iterable[Expr]) -> int:
    """A rough cost of one vector step."""
    return sum(HEAVY.get(n.op, 1) for n in walk_values(*roots))


def flat(variables: tuple[Expr, ...]) -> Expr:
    """The position in row-major order of a point of these variables."""
    total, step = integer(0), 1
    for v in reversed(variables):
        total = affine(0, [(total, 1), (v, step)])
        step *= v.args[1]
    return total
