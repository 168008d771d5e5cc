"""Every atom, for every dtype and tier, against its reference in torch: exact, or within units in the last place."""

from __future__ import annotations

import math

import pytest
import torch

from tensorplay.stax.codegen.detect import tiers
from tensorplay.stax.expr import make
from tensorplay.stax.ops.atoms import ATOMS

from .harness import at, buffer, kernel, plan_of, pointwise, run, space

KINDS = {
    "f": (torch.float32, torch.float64),
    "i": (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    "b": (torch.bool,),
}
EXACT = frozenset(
    ["add", "sub", "mul", "div", "neg", "abs", "maximum", "minimum", "fmax", "fmin", "clamp_min", "clamp_max", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "lshift", "rshift", "where", "isnan", "isinf", "signbit", "copysign", "nextafter", "floor", "ceil", "trunc", "round", "div_floor", "div_trunc", "remainder", "fmod"]
)
EITHER_ZERO = ("fmax", "fmin")  # of 0 and -0 the C library may choose
N = 1001


def specials(dtype: torch.dtype) -> list:
    if dtype == torch.bool:
        return [True, False]
    if dtype.is_floating_point:
        i = torch.finfo(dtype)
        return [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, i.tiny, -i.tiny, i.tiny / 8, i.max, i.min, math.inf,
                -math.inf, math.nan, 1e-3, 87.0, -87.0, 104.0, -104.0, 89.0, 709.0, 3.0, 7.0, i.eps, 1e10, -1e10, 8388609.0]  # fmt: skip
    i = torch.iinfo(dtype)
    return [0, 1, 2, 3, 5, i.max, i.min, i.max - 1, i.min + 1, 7, 8, 31]


def operand(dtype: torch.dtype, k: int) -> torch.Tensor:
    """All pairs of special values first, then random ones."""
    g = torch.Generator().manual_seed(k)
    s = torch.tensor(specials(dtype), dtype=dtype)
    grid = s.repeat(len(s)) if k % 2 else s.repeat_interleave(len(s))
    if dtype == torch.bool:
        rest = torch.rand(N, generator=g) < 0.5
    elif dtype.is_floating_point:
        rest = torch.randn(N, generator=g, dtype=torch.float64).mul(10.0 ** (k % 3)).to(dtype)
    else:
        rest = torch.randint(-100, 100, (N,), generator=g).to(dtype)
    return torch.cat([grid, rest])[:N]


def operands(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    atom = ATOMS[name]
    count = atom.reference.__code__.co_argcount if hasattr(atom.reference, "__code__") else 0
    if not count:
        count = 1 if name in UNARY else 2
    xs = [operand(dtype, k) for k in range(count)]
    if name == "where":
        xs[0] = operand(torch.bool, 5)
    if (name == "fmod" and dtype.is_floating_point) or (name == "remainder" and dtype.is_floating_point):
        # eager's vector fmod gives NaN where the quotient overflows and for denormal divisors; ours is exact
        xs[1][xs[1].abs() < 1e-30] = 1.5
        xs[0][(xs[0] / xs[1]).abs() > 1e30] = 5.5
    if name == "lcm" and dtype != torch.uint8:  # eager dies of a signal where it divides the smallest by -1
        xs = [x.masked_fill(x == torch.iinfo(dtype).min, 6) for x in xs]
    if name in ("div_floor", "div_trunc") or (name in ("remainder", "fmod") and not dtype.is_floating_point):
        xs[1][xs[1] == 0] = 1
        if dtype != torch.uint8:  # the smallest by -1 overflows: no meaning in eager either
            xs[1][xs[1] == -1] = 3
    return xs


UNARY = frozenset(
    ["neg", "abs", "logical_not", "bitwise_not", "isnan", "isinf", "signbit", "floor", "ceil", "trunc", "round", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "lgamma", "sigmoid"]
)


def ulps(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest distance in units in the last place; infinite where one is NaN or infinite and the other is not."""
    same = (got == want) | (got.isnan() & want.isnan())
    if bool(same.all()):
        return 0.0
    g, w = got[~same], want[~same]
    if not bool((g.isfinite() & w.isfinite()).all()):
        return math.inf
    ints = torch.int32 if got.dtype == torch.float32 else torch.int64
    low = torch.iinfo(ints).min

    def ordered(x: torch.Tensor) -> list[int]:
        i = x.view(ints)
        return torch.where(i < 0, low - i, i).tolist()  # as Python's numbers: exact beyond 2**53, and no overflow

    return float(max(abs(a - b) for a, b in zip(ordered(g), ordered(w), strict=True)))


def cases():
    for name, atom in ATOMS.items():
        for kind in atom.kinds:
            yield from ((name, dtype) for dtype in KINDS[kind])


def batch(isa: str, names_dtypes, size: int = N):
    """All of these atoms in one compilation; gives (name, dtype, inputs, output)."""
    inputs, buffers, kernels, todo = [], [], [], []
    for k, (name, dtype) in enumerate(names_dtypes):
        xs = [x[:size] for x in operands(name, dtype)]
        bs = [buffer(f"x{k}_{j}", x) for j, x in enumerate(xs)]
        i = space((size,))
        result = torch.bool if ATOMS[name].result == "bool" else dtype
        body = make(name, tuple(at(b, i) for b in bs), result)
        kernels.append(kernel(i, [pointwise(f"y{k}", (size,), body)]))
        inputs += xs
        buffers += bs
        todo.append((name, dtype, xs))
    outs = run(plan_of(buffers, kernels), inputs, isa)
    return [(*t, y) for t, y in zip(todo, outs, strict=True)]


@pytest.mark.parametrize("isa", tiers())
@pytest.mark.parametrize("kind", "fib")
def test_atoms_equal_their_reference(isa, kind):
    wrong = []
    for name, dtype, xs, got in batch(isa, [(n, d) for n, d in cases() if d in KINDS[kind]]):
        want = ATOMS[name].reference(*xs)
        assert got.dtype == want.dtype
        if name in EXACT or not dtype.is_floating_point:
            same = (got == want) if not got.is_floating_point() else (
                ((got == want) & ((got.signbit() == want.signbit()) | (name in EITHER_ZERO))) | (got.isnan() & want.isnan()))  # fmt: skip
            if not bool(same.all()):
                k = int((~same).nonzero()[0])
                wrong.append((name, dtype, [x[k].item() for x in xs], got[k].item(), want[k].item(), int((~same).sum())))
        else:
            # against the function itself: torch in double, rounded once
            exact = ATOMS[name].reference(*[x.double() for x in xs]).to(dtype) if dtype == torch.float32 else want
            bad = min(ulps(got, want), ulps(got, exact))
            zeros = (got == 0) & (want == 0) & (got.signbit() != want.signbit())
            bad = math.inf if name not in EITHER_ZERO and bool(zeros.any()) else bad
            if bad > 4:
                d = [(x.item(), *(y[i].item() for y in xs[1:]), got[i].item(), want[i].item()) for i, x in enumerate(xs[0])
                     if ulps(got[i : i + 1], want[i : i + 1]) > 4 or zeros[i]][:4]  # fmt: skip
                wrong.append((name, dtype, bad, d))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("isa", tiers())
def test_hyperbolic_functions_up_to_the_largest_number(isa):
    """Eager's are infinite there or not, depending on where the number stands."""
    for dtype, numbers in ((torch.float32, (87.9, 88.5, 89.4, 90.0)), (torch.float64, (708.9, 709.5, 710.4, 711.0))):
        x = torch.tensor([sign * n for n in (*numbers, math.inf, 0.0, 1.0) for sign in (1, -1)] * 5, dtype=dtype)
        b, i = buffer("x", x), space((len(x),))
        kernels = [kernel(i, [pointwise(name, (len(x),), make(name, (at(b, i),), dtype))]) for name in ("sinh", "cosh")]
        for name, got in zip(("sinh", "cosh"), run(plan_of([b], kernels), [x], isa), strict=True):
            exact = getattr(torch, name)(x.double()).to(dtype) if dtype == torch.float32 else torch.stack([getattr(torch, name)(t) for t in x])
            assert ulps(got, exact) <= 4, (name, dtype)
