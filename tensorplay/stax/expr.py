"""The expression: what a loop body, a memory index and a rewriting rule are made of.

In: operator names and arguments.  Out: interned, immutable `Expr` nodes.
Always: identity is equality (two equal expressions are one object), so common subexpressions vanish by
construction and every walk is memoized by the node itself; every walk is iterative, since a chain may be longer
than Python's recursion limit.

Two kinds of expression share the class.  *Index* expressions (`dtype is INDEX`) are mathematical integers that
never overflow: loop variables, affine sums, floor division and remainder by a positive constant.  They are kept
in a normal form by their constructors (`add`, `mul`, `floordiv`, `mod`) and carry their exact range.  *Value*
expressions are scalars of a torch dtype with the semantics of the operator that they name.

    var(name, size)              0 <= name < size                                            INDEX
    integer(k)                                                                               INDEX
    affine (k, ((term, c), ..))  k + sum(c * term); terms are var, floordiv, mod, index      INDEX
    floordiv (x, d), mod (x, m)  Python's // and % by a positive constant                    INDEX
    index (value, size)          the value, checked to lie in [0, size) when it runs         INDEX
    const (scalar,)              a literal, compared by type and bits
    load (buffer, index)         the element of a buffer at a linear offset (in elements)
    value (index,)               an index as an int64 value (arange)
    cast (x,)                    conversion to `dtype`, rounding or wrapping as torch does
    masked (cond, x, other)      x where cond holds, else other; loads in x happen only where cond holds
    anything else                a row of `ops/pointwise.py`, such as add, exp, where
"""

from __future__ import annotations

import hashlib
import math
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

INDEX = "index"  # the dtype of index expressions
_TABLE: weakref.WeakValueDictionary[tuple, Expr] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()
_NONE: frozenset[Expr] = frozenset()


class Expr:
    """One interned node.  Build it with the functions below, never directly."""

    __slots__ = ("__weakref__", "args", "digest", "dtype", "free", "high", "low", "op")
    op: str
    args: tuple[Any, ...]
    dtype: Any  # a torch.dtype, or INDEX
    free: frozenset[Expr]  # the loop variables that it depends on
    digest: bytes  # content hash, equal across processes
    low: Any  # range of an index expression, inclusive; None for values
    high: Any

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("expressions are immutable")

    def __reduce__(self) -> tuple:
        return make, (self.op, self.args, self.dtype)

    def __copy__(self) -> Expr:
        return self

    def __deepcopy__(self, memo: object) -> Expr:
        return self

    @property
    def is_index(self) -> bool:
        return self.dtype is INDEX

    @property
    def name(self) -> str:
        """The name of a loop variable or of a loaded buffer."""
        return self.args[0]

    @property
    def children(self) -> tuple[Expr, ...]:
        """The operand expressions, in order."""
        if self.op == "affine":
            return tuple(term for term, _ in self.args[1])
        return tuple(a for a in self.args if type(a) is Expr)

    def __repr__(self) -> str:
        from .loops.text import show_expr

        return show_expr(self)


def _key(value: Any) -> Any:
    """Tells 1, 1.0 and True, 0.0 and -0.0 apart, and makes NaN equal to itself."""
    if type(value) is Expr or type(value) is str or type(value) is int:
        return value
    if type(value) is float:
        return ("f", struct.pack("<d", value))
    if type(value) is complex:
        return ("c", struct.pack("<dd", value.real, value.imag))
    if type(value) is tuple:
        return tuple(map(_key, value))
    return (type(value).__name__, value)


def _feed(h: Any, value: Any) -> None:
    if type(value) is Expr:
        h.update(value.digest)
    elif type(value) is tuple:
        h.update(b"(")
        for item in value:
            _feed(h, item)
        h.update(b")")
    elif type(value) is float:
        h.update(b"f" + struct.pack("<d", value))
    else:
        h.update(f"{type(value).__name__}:{value!r};".encode())


def make(op: str, args: tuple[Any, ...], dtype: torch.dtype | str) -> Expr:
    """The node `op(args)`; no simplification. Prefer the constructors below for index expressions."""
    key = (op, dtype, tuple(map(_key, args)))
    found = _TABLE.get(key)
    if found is not None:
        return found
    node = object.__new__(Expr)
    put = object.__setattr__
    put(node, "op", op)
    put(node, "args", args)
    put(node, "dtype", dtype)
    h = hashlib.blake2b(f"{op}|{dtype}|".encode(), digest_size=12)
    _feed(h, args)
    put(node, "digest", h.digest())
    free: frozenset[Expr] = _NONE
    if op == "var":
        free = frozenset((node,))
    else:
        for child in node.children:
            if child.free is not free and not child.free <= free:
                free = child.free | free if free else child.free
    put(node, "free", free)
    low, high = _range(node) if dtype is INDEX else (None, None)
    put(node, "low", low)
    put(node, "high", high)
    with _LOCK:
        return _TABLE.setdefault(key, node)


def _range(node: Expr) -> tuple[int, int]:
    args = node.args
    match node.op:
        case "var":
            return 0, max(args[1] - 1, 0)
        case "integer":
            return args[0], args[0]
        case "index":
            return 0, max(args[1] - 1, 0)
        case "mod":
            return 0, args[1] - 1
        case "floordiv":
            return args[0].low // args[1], args[0].high // args[1]
        case "affine":
            low = high = args[0]
            for term, c in args[1]:
                low += c * (term.low if c > 0 else term.high)
                high += c * (term.high if c > 0 else term.low)
            return low, high
    raise ValueError(f"not an index expression: {node.op}")


# ---- index expressions -------------------------------------------------------------------------------------------


def var(name: str, size: int) -> Expr:
    """A loop variable with 0 <= name < size."""
    return make("var", (name, size), INDEX)


def integer(k: int) -> Expr:
    return make("integer", (k,), INDEX)


def index(value: Expr, size: int) -> Expr:
    """An integer value used as an index; running it with a value outside [0, size) is an error, never a wild read."""
    if value.op == "value" and value.args[0].low >= 0 and value.args[0].high < size:
        return value.args[0]
    return make("index", (value, size), INDEX)


def parts(x: Expr) -> tuple[int, tuple[tuple[Expr, int], ...]]:
    """`x` as constant + ((term, coefficient), ...)."""
    if x.op == "affine":
        return x.args
    if x.op == "integer":
        return x.args[0], ()
    return 0, ((x, 1),)


def _order(item: tuple[Expr, int]) -> tuple:
    term = item[0]
    return (0, len(term.args[0]), term.args[0], term.args[1]) if term.op == "var" else (1, 0, term.op, term.digest)


def affine(constant: int, terms: Iterable[tuple[Expr, int]]) -> Expr:
    """constant + sum(c * term) in normal form: terms collected, ordered, and x//m*m + x%m joined to x."""
    collected: dict[Expr, int] = {}
    pending = list(terms)
    while pending:
        term, c = pending.pop()
        if term.op == "affine" or term.op == "integer":
            k, inner = parts(term)
            constant += c * k
            pending.extend((t, c * d) for t, d in inner)
        else:
            collected[term] = collected.get(term, 0) + c
    joined = True
    while joined:
        joined = False
        for term, c in list(collected.items()):
            if term.op == "mod" and c:
                x, m = term.args
                quotient = floordiv(x, m)
                if quotient.op != "affine" and collected.get(quotient, 0) == c * m:
                    del collected[term], collected[quotient]
                    k, inner = parts(x)
                    constant += c * k
                    for t, d in inner:
                        collected[t] = collected.get(t, 0) + c * d
                    joined = True
                    break
    items = tuple(sorted(((t, c) for t, c in collected.items() if c), key=_order))
    if not items:
        return integer(constant)
    if constant == 0 and len(items) == 1 and items[0][1] == 1:
        return items[0][0]
    return make("affine", (constant, items), INDEX)


def add(*xs: Expr | int) -> Expr:
    constant, terms = 0, []
    for x in xs:
        if type(x) is int:
            constant += x
        else:
            terms.append((x, 1))
    return affine(constant, terms)


def mul(x: Expr | int, c: int) -> Expr:
    """A multiple of an index by a constant."""
    return integer(x * c) if type(x) is int else affine(0, ((x, c),))


def floordiv(x: Expr, d: int) -> Expr:
    """x // d with d > 0, simplified from divisibility and ranges."""
    if d == 1:
        return x
    k, terms = parts(x)
    outer = [(t, c // d) for t, c in terms if c % d == 0]
    rest = [(t, c) for t, c in terms if c % d]
    out_k, k = divmod(k, d)
    inner = affine(k, rest)
    if 0 <= inner.low and inner.high < d:
        return affine(out_k, outer)
    shared = _shared(rest, k, d)
    if shared:
        g, divisible = shared
        inner, d = affine(k // g, [(t, c // g) for t, c in divisible]), d // g
        quotient = floordiv(inner, d)
    elif inner.op == "floordiv":
        quotient = floordiv(inner.args[0], inner.args[1] * d)
    else:
        quotient = make("floordiv", (inner, d), INDEX)
    return affine(out_k, [*outer, (quotient, 1)])


def mod(x: Expr, m: int) -> Expr:
    """x % m with m > 0, simplified from divisibility and ranges."""
    if m == 1:
        return integer(0)
    k, terms = parts(x)
    rest = [(t, c % m if abs(c) > m else c) for t, c in terms if c % m]
    k %= m
    inner = affine(k, rest)
    if 0 <= inner.low and inner.high < m:
        return inner
    shared = _shared(rest, k, m)
    if shared:
        g, divisible = shared
        small = affine(k % g, [(t, c) for t, c in rest if c % g])
        return add(mul(mod(affine(k // g, [(t, c // g) for t, c in divisible]), m // g), g), small)
    if inner.op == "mod" and inner.args[1] % m == 0:
        return mod(inner.args[0], m)
    return make("mod", (inner, m), INDEX)


def _shared(terms: list[tuple[Expr, int]], k: int, d: int) -> tuple[int, list[tuple[Expr, int]]] | None:
    """The largest g > 1 dividing d such that the terms not divisible by g stay within [0, g)."""
    for g in sorted({math.gcd(c, d) for _, c in terms}, reverse=True):
        if g == 1:
            return None
        small = affine(k % g, [(t, c) for t, c in terms if c % g])
        if 0 <= small.low and small.high < g:
            return g, [(t, c) for t, c in terms if c % g == 0]
    return None


def coefficient(x: Expr, v: Expr) -> int | None:
    """The constant c with x = c * v + (something free of v), or None where there is none."""
    c = 0
    for term, k in parts(x)[1]:
        if term is v:
            c = k
        elif v in term.free:
            return None
    return c


def linear(point: Iterable[Expr], stride: Iterable[int], offset: int = 0) -> Expr:
    """The linear offset sum(i_k * stride_k) + offset of a point of a strided tensor."""
    return affine(offset, list(zip(point, stride, strict=True)))


# ---- value expressions -------------------------------------------------------------------------------------------


def const(scalar: bool | int | float, dtype: torch.dtype) -> Expr:
    """A literal of `dtype`; the scalar is converted to the kind of `dtype` (bool, int or float)."""
    kind = bool if dtype == torch.bool else float if dtype.is_floating_point else int
    return make("const", (kind(scalar),), dtype)


def load(buffer: str, at: Expr, dtype: torch.dtype) -> Expr:
    """The element of `buffer` at linear offset `at`, in the buffer's own dtype."""
    return make("load", (buffer, at), dtype)


def value(x: Expr, dtype: torch.dtype = torch.int64) -> Expr:
    """An index as a value."""
    return cast(make("value", (x,), torch.int64), dtype)


def cast(x: Expr, dtype: torch.dtype) -> Expr:
    """Conversion as `Tensor.to` does it; a cast to the same dtype is no cast."""
    return x if x.dtype == dtype else make("cast", (x,), dtype)


def masked(cond: Expr, x: Expr, other: Expr) -> Expr:
    """x where cond holds, else other; nothing in x is read where cond does not hold."""
    return make("masked", (cond, x, other), x.dtype)


def in_range(x: Expr, low: int, high: int) -> Expr:
    """The boolean value low <= x < high, folded where the range of x decides it."""
    if x.low >= low and x.high < high:
        return const(True, torch.bool)
    if x.high < low or x.low >= high:
        return const(False, torch.bool)
    tests = []
    if x.low < low:
        tests.append(make("ge", (value(x), const(low, torch.int64)), torch.bool))
    if x.high >= high:
        tests.append(make("lt", (value(x), const(high, torch.int64)), torch.bool))
    return tests[0] if len(tests) == 1 else make("logical_and", tuple(tests), torch.bool)


# ---- walks -------------------------------------------------------------------------------------------------------


def postorder(*roots: Expr) -> Iterator[Expr]:
    """Every distinct node below the roots, operands before users."""
    seen: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(r, False) for r in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((c, False) for c in reversed(node.children) if c not in seen)


def rebuild(node: Expr, new: Callable[[Expr], Expr]) -> Expr:
    """The node with each operand replaced by `new(operand)`, index expressions in normal form again."""
    match node.op:
        case "affine":
            return affine(node.args[0], [(new(t), c) for t, c in node.args[1]])
        case "floordiv":
            return floordiv(new(node.args[0]), node.args[1])
        case "mod":
            return mod(new(node.args[0]), node.args[1])
        case "index":
            return index(new(node.args[0]), node.args[1])
    args = tuple(new(a) if type(a) is Expr else a for a in node.args)
    return node if all(a is b for a, b in zip(args, node.args, strict=True)) else make(node.op, args, node.dtype)


def rewrite(
    root: Expr,
    change: Callable[[Expr], Expr | None],
    keep: Callable[[Expr], bool] | None = None,
    given: dict[Expr, Expr] | None = None,
) -> Expr:
    """Rebuilds `root` from its leaves; `change(node)` after its operands were rewritten, None to leave it.

    Nodes for which `keep` holds are returned as they are, without a look below them; nodes in `given` become what
    stands there, and what stands there is not rewritten again.
    """
    done: dict[Expr, Expr] = {} if given is None else dict(given)
    stack: list[tuple[Expr, bool]] = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if not ready:
            if keep is not None and keep(node):
                done[node] = node
                continue
            stack.append((node, True))
            stack.extend((c, False) for c in node.children if c not in done)
        else:
            new = rebuild(node, done.__getitem__)
            changed = change(new)
            done[node] = new if changed is None else changed
    return done[root]


def substitute(root: Expr, at: dict[Expr, Expr]) -> Expr:
    """`root` with loop variables replaced: the substitution lemma's left side. Linear in the distinct nodes."""
    at = {v: x for v, x in at.items() if v is not x and v in root.free}
    if not at:
        return root
    targets = frozenset(at)
    return rewrite(root, lambda _: None, keep=lambda n: n.free.isdisjoint(targets), given=at)


def loads(*roots: Expr) -> Iterator[Expr]:
    """The distinct load nodes below the roots."""
    return (n for n in postorder(*roots) if n.op == "load")
