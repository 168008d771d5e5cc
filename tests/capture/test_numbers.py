"""Numbers that `Tensor.item()` reads stay symbolic: one version for every value, and eager's results and exceptions."""

from __future__ import annotations

import builtins
import copy
import json
import marshal
import math
import operator
import pickle
import random
import statistics
import warnings
from contextlib import ExitStack
from contextlib import suppress as quiet

import pytest
import torch
from torch import optim

import tensorplay as tp
from tensorplay.capture.numbers import ARITHMETIC, COMPARISONS
from tensorplay.testing import N


def same(a, b):
    if isinstance(a, torch.Tensor):
        bound = {torch.bfloat16: 2**-7, torch.float16: 2**-9}.get(a.dtype, 1e-5) if isinstance(b, torch.Tensor) else 0
        return type(a) is type(b) and a.dtype == b.dtype and a.stride() == b.stride() and torch.allclose(a, b, bound, bound / 8, equal_nan=True)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    close = isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-6)
    return type(a) is type(b) and (a == b or (a != a and b != b) or close)


def outcome(f, args):
    args = copy.deepcopy(args)
    try:
        return f(*args), args
    except Exception as error:
        return type(error), str(error)


def follow(f, calls, versions=1, **how):
    """Compiled and eager agree on every call, results and arguments."""
    cf = tp.compile(f, **{"strict_native": True, **how})
    for args in calls:
        want, got = outcome(f, args), outcome(cf, args)
        assert same(got, want), (args, got, want)
    assert N(cf) == versions
    return cf


X = torch.linspace(-2, 3, 12).reshape(3, 4)
VALUES = [torch.tensor(v) for v in (0.5, 2.0, -3.25, 1e-3, 7.0)]


def scalar(dtype=torch.float32):
    return [(X.to(dtype), v) for v in VALUES]


PROGRAMS = {
    "operand": lambda x, t: x * t.item() + t.item() - x / t.item(),
    "left operand": lambda x, t: 2 - t.item() - x + t.item() / (x + 9) + (t.item() * x),
    "alpha": lambda x, t: torch.add(x, x, alpha=t.item()).sub(x, alpha=t.item() + 1),
    "value": lambda x, t: torch.addcdiv(x, x, x + 5, value=-t.item()).addcmul(x, x, value=t.item() / 3),
    "weight": lambda x, t: torch.lerp(x, x + 1, t.item()),
    "bounds": lambda x, t: x.clamp(-abs(t.item()), abs(t.item()) + 1).clamp_min(t.item()),
    "comparison": lambda x, t: (x > t.item()) | (t.item() >= x) | (x == t.item()),
    "fill": lambda x, t: (x.masked_fill(x > 0, t.item()), torch.where(x > 1, x, t.item()), torch.full((2, 3), t.item()), x.clone().fill_(t.item())),
    "tensor": lambda x, t: (torch.tensor(t.item()) + x, torch.tensor(t.item(), dtype=torch.float64), torch.full_like(x, t.item())),
    "assigned": lambda x, t: (y := x.clone(), y.__setitem__((slice(None), 1), t.item()), y)[2],
    "in place": lambda x, t: x.clone().mul_(t.item()).add_(t.item()).div_(3 + abs(t.item())),
    "power": lambda x, t: (x.abs() + 0.1) ** t.item(),
    "returned": lambda x, t: (x * 2, t.item(), {"half": t.item() / 2, "both": [t.item(), -t.item()]}),
    "arithmetic": lambda x, t: x * ((1 - 0.9 ** t.item()) / 3 + abs(t.item()) % 2 - t.item() // 2),
    "of a sum": lambda x, t: x / (x.abs().sum().item() + t.item() * x.mean().item()),
    "across a write": lambda x, t: (a := t.item(), t.add_(1), x * a + t.item())[2],
    "of a number": lambda x, t: x + (x * t.item()).sum().item(),
    "lists": lambda x, t: torch._foreach_mul(torch._foreach_add([x, x + 1], [t.item(), 2.0]), t.item()),
    "only a number": lambda x, t: t.item() * 2 + x.sum().item(),
    "division of integers": lambda x, t: x.long() * t.item(),
    "matrix": lambda x, t: torch.addmm(x, x, torch.eye(4), beta=t.item(), alpha=2),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_version_serves_every_value(name):
    how = {"strict_native": name not in ("matrix", "division of integers")}
    versions = len(VALUES) if name in ("matrix", "assigned") else 2 if name == "of a number" else 1
    follow(PROGRAMS[name], scalar(), versions, **how)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_number_rounds_as_pythons_does(dtype):
    def f(x, t):
        s = t.item()
        return x * s, x + s, torch.add(x, x, alpha=s), x / s, x - 1 / s, x.clone().fill_(s), x > s

    follow(f, scalar(dtype))


def test_counts():
    def f(x, t):
        n = (x > t).sum().item()
        return x.sum() / n, x * n, n, n + 1, -n, n * 0.5

    follow(f, [(X, t) for t in VALUES[:4]] + [(X, torch.tensor(-9.0))], 2)


def test_a_computed_number_is_a_constant_until_another_is_computed():
    def f(x):
        return x * x.max().item() if x.dim() == 2 else x + x.max().item()

    cf = follow(f, [(X,), (X,), (X + 0,)])
    assert cf.versions[0].captured.by_value and cf.versions[0].gates
    cf = follow(f, [(X,), (2 * X,), (X,), (3 * X,), (-X,), (X[0],), (X[0] * 2,)], 3)  # known to vary, it varies everywhere
    assert [len(v.gates) for v in cf.versions] == [1, 0, 0]
    assert cf.log == ["recompiling 'f': control-flow gate outcomes match the traced branch", *cf.log[1:]] and len(cf.log) == 2


@pytest.mark.parametrize("level", ["eager", "aot_eager", "stax"])
def test_every_level_computes_numbers(level):
    follow(PROGRAMS["arithmetic"], scalar(), backend=level, strict_native=False)


def test_levels_below_the_graph():
    cf = follow(PROGRAMS["returned"], scalar())
    (version,) = tp.explain(cf).versions[:1] and cf.versions
    for level in ("graph", "ops", "loops", "plan", "kernels"):
        assert same(version.run_at(level, (X, VALUES[3]), {}), PROGRAMS["returned"](X, VALUES[3]))
    from tensorplay.stax.loops.read import read

    assert str(read(str(version.program.loops))) == str(version.program.loops)


# ---- where a number becomes something else -----------------------------------------------------------------------------


def test_a_branch_is_a_gate_on_its_outcome():
    follow(lambda x, t: x * t.item() if t.item() > 1 else x - t.item(), scalar(), 2)
    follow(lambda x, t: x if t.item() else x + 1, [*scalar(), (X, torch.tensor(0.0)), (X, torch.tensor(-0.0))], 2)


ASKING = {
    "text": lambda x, t: (x, f"{t.item():.2f} {t.item()}", str(t.item()), repr(t.item()), "%.1f" % t.item()),  # noqa: UP031
    "function": lambda x, t: x * math.sqrt(abs(t.item())) + math.floor(t.item()),
    "rounding": lambda x, t: x * round(t.item()) + int(t.item()) + float(t.item()),
    "key": lambda x, t: x * {t.item(): 3}[t.item()],
    "member": lambda x, t: x + (t.item() in (0.5, 7.0)),
    "method": lambda x, t: x * t.item().is_integer() + t.item().real,
    "json": lambda x, t: (x, json.dumps({"a": t.item()})),
    "statistics": lambda x, t: x * statistics.mean([t.item(), 2.0]),
    "type": lambda x, t: x * 2 if type(t.item()) is float else x,
    "size": lambda x, t: torch.zeros(int(abs(t.item())) + 1) + t.item(),
    "range": lambda x, t: torch.arange(0, abs(t.item()) + 1),
    "copied": lambda x, t: x * copy.deepcopy([t.item()])[0] + math.trunc(t.item()),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKING)
def test_other_uses_are_constants_of_their_version(name):
    cf = tp.compile(ASKING[name], recompile_limit=16)
    for args in scalar() * 2:
        assert same(outcome(cf, args), outcome(ASKING[name], args))


def test_a_number_is_a_float_to_the_program():
    seen = []

    def f(x, t):
        s = t.item()
        seen.append((isinstance(s, float), isinstance(s, int), isinstance(s, torch.Tensor), hasattr(s, "shape"), isinstance(t.long().item(), int)))
        return x * s

    tp.compile(f)(X, VALUES[0])
    assert set(seen) == {(True, False, False, False, True)}


def test_nothing_symbolic_is_left_in_objects():
    class Meter:
        last = None

    meter = Meter()

    def f(x, t):
        meter.last = t.item()
        return x * t.item()

    cf = tp.compile(f)
    for x, t in scalar():
        cf(x, t)
        assert type(meter.last) is float and meter.last == t.item()


# ---- exceptions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [1.0, 0.0])
def test_division_by_zero_raises_as_in_eager(first):
    calls = [(X, torch.tensor(v)) for v in (first, 0.0, 2.0, 0.0, math.inf, math.nan)]
    cf = tp.compile(lambda x, t: x.add_(1 / t.item()))
    for args in calls:
        assert same(outcome(cf, args), outcome(lambda x, t: x.add_(1 / t.item()), args))


def test_a_caught_exception_is_a_branch():
    def f(x, t):
        try:
            return x * (1 / t.item())
        except ZeroDivisionError:
            return x

    cf = tp.compile(f, recompile_limit=16)
    for v in (1.0, 0.0, 3.0, 0.0):
        args = (X, torch.tensor(v))
        assert same(outcome(cf, args), outcome(f, args))


def test_powers_overflow_and_turn_complex_as_in_python():
    f = lambda x, t: x * t.item() ** 1.5  # noqa: E731
    cf = tp.compile(f)
    for v in (2.0, -8.0, 1e300, 0.0):
        args = (X.double(), torch.tensor(v, dtype=torch.float64))
        want, got = outcome(f, args), outcome(cf, args)
        assert want[0] is got[0] or (want[0].dtype, torch.equal(want[0], got[0])) == (got[0].dtype, True)


@pytest.mark.parametrize("backend", ["eager", "stax"])
@pytest.mark.parametrize("base", [-2, -2.5, -math.inf, 3])
def test_powers_of_constants(base, backend):
    f = lambda x, t: (base ** t.item(), x + 1)  # noqa: E731
    cf = tp.compile(f, backend=backend)
    for v in (3.0, 2.0, 0.5, -1.5, 4.0):
        args = (X, torch.tensor(v, dtype=torch.float64))
        want, got = outcome(f, args)[0][0], outcome(cf, args)[0][0]
        assert type(want) is type(got) and (want == got or want != want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_numbers_that_do_not_fit_raise_as_in_eager(dtype):
    f = lambda x, t: torch.full_like(x, t.item())  # noqa: E731
    cf = tp.compile(f)
    for v in (1.0, 1e6, 1e39, math.inf, math.nan):
        args = (X.to(dtype), torch.tensor(v, dtype=torch.float64))
        assert same(outcome(cf, args), outcome(f, args))


# ---- programs ----------------------------------------------------------------------------------------------------------


def random_program(seed):
    rng = random.Random(seed)
    names, lines = ["t.item()", "2.0", "x.sum().item()", "3"], []
    for k in range(rng.randrange(2, 6)):
        a, b = rng.choice(names), rng.choice(names)
        lines.append(f"n{k} = " + rng.choice([f"{a} + {b}", f"{a} * {b}", f"{a} - {b}", f"{a} / {b}", f"-{a}", f"abs({a}) + 1", f"0.5 ** ({a} % 4)"]))
        names.append(f"n{k}")
        lines.append("x = " + rng.choice([f"x + n{k}", f"x * n{k}", f"(x / (abs(n{k}) + 1))", f"torch.where(x > n{k}, x, n{k})", f"x.clone().add_(x, alpha=n{k})"]))
        if rng.random() < 0.3:
            lines.append("t.mul_(0.5)")
        if rng.random() < 0.2:
            lines.append(f"x = x.tanh() if n{k} > 0 else x.relu()")
    space = {"torch": torch}
    exec("def f(x, t):\n" + "".join(f"    {line}\n" for line in lines) + f"    return x, {names[-1]}", space)
    return space["f"]


@pytest.mark.parametrize("seed", range(30))
def test_random_programs(seed):
    f = random_program(seed)
    cf = tp.compile(f, recompile_limit=64)
    for v in (1.0, 2.5, 0.0, -4.0, math.nan):
        args = (X, torch.tensor(v))
        assert same(outcome(cf, args), outcome(f, args)), v


@pytest.mark.parametrize("name", ARITHMETIC + COMPARISONS)
def test_every_operator_of_python(name):
    op, values = getattr(operator, name), (0.5, 2.0, 7.0)

    def f(x, t):
        return x + op(t.item(), 2) + op(3.0, t.item())

    outcomes = {(op(v, 2), op(3.0, v)) for v in values}
    follow(f, [(X, torch.tensor(v)) for v in values], 1 if name in ARITHMETIC else len(outcomes))


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adam, optim.NAdam, optim.Adamax, optim.Adagrad])
def test_an_optimizer_needs_one_version_for_all_its_steps(kind):
    def run(compiled):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
        optimizer = kind(model.parameters(), 0.01)
        step = tp.compile(optimizer.step) if compiled else optimizer.step
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(4, 5)).pow(2).mean().backward()
            step()
        return list(model.parameters()), [dict(s) for s in optimizer.state.values()], step

    with warnings.catch_warnings():  # the first step makes state
        warnings.simplefilter("ignore")
        ours, state, step = run(True)
    theirs, expected, _ = run(False)
    assert all(torch.allclose(a, b, 1e-5, 1e-7) for a, b in zip(ours, theirs))
    assert all(torch.equal(a["step"], b["step"]) for a, b in zip(state, expected))
    assert N(step) == 1 and not step.versions[0].gates


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD, optim.NAdam])
def test_a_rate_in_a_tensor_follows_its_schedule_in_one_version(kind):
    def run(compiled):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        optimizer = kind(model.parameters(), torch.tensor(0.01))
        schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        step = tp.compile(optimizer.step) if compiled else optimizer.step
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(4, 5)).pow(2).mean().backward()
            step()
            schedule.step()
        return list(model.parameters()), step

    (ours, step), (theirs, _) = run(True), run(False)
    assert all(torch.allclose(a, b, 1e-5, 1e-7) for a, b in zip(ours, theirs))
    assert N(step) == 1 and not step.versions[0].gates


def test_capture_of_many_written_tensors_is_one_run(monkeypatch):
    from tensorplay.capture import tracer

    runs = []
    once = tracer._once
    monkeypatch.setattr(tracer, "_once", lambda *args: runs.append(1) or once(*args))
    tensors = [torch.zeros(3) for _ in range(50)]

    def f(xs, y):
        for x in xs:
            x.add_(y)

    tp.compile(f, strict_native=True)(tensors, torch.ones(3))
    assert len(runs) == 1 and all(torch.equal(t, torch.ones(3)) for t in tensors)


# ---- found by attacks --------------------------------------------------------------------------------------------------


class Swallow:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return True


def swallowed(x, t):
    with Swallow():
        return x * (1 / t.item())
    return x


def suppressed(x, t):
    with quiet(Exception):
        marshal.dumps(t.item())
        return x * (1 / t.item())
    return x


def stacked(x, t):
    with ExitStack() as stack:
        stack.callback(lambda: x.add_(1))
        return x * (1 / t.item())


def at_last(x, t):
    try:
        return x * (1 / t.item())
    finally:
        x.add_(1)


@pytest.mark.parametrize("f", [swallowed, suppressed, stacked, at_last])
def test_code_that_meets_exceptions_gets_constants(f):
    cf = tp.compile(f, recompile_limit=16)
    for v in (2.0, 0.0, 3.0, 0.0):
        assert same(outcome(cf, (X, torch.tensor(v))), outcome(f, (X, torch.tensor(v))))


UNUSED = {
    "quotient": lambda x, t: (1 / t.item(), x + 1)[1],
    "power": lambda x, t: (t.item() ** -3 + 1, x + 1)[1],
    "product": lambda x, t: (x * (1 / (2 * t.item())), x + 1)[1],
    "shape": lambda x, t: torch.zeros_like(x * (1 / t.item())),
    "complex": lambda x, t: (x.add_(1), t.sub_(0.5), x * (t.item() ** 0.5 % 2), x.mul_(2))[2],
}


@pytest.mark.parametrize("level", ["eager", "aot_eager", "stax"])
@pytest.mark.parametrize("name", UNUSED)
def test_arithmetic_raises_whatever_becomes_of_its_result(name, level):
    follow(UNUSED[name], [(X, torch.tensor(v)) for v in (2.0, 0.0, 5.0)], strict_native=False, backend=level)


@pytest.mark.parametrize("level", ["eager", "aot_eager", "stax"])
def test_a_raise_leaves_the_generator_and_the_modes_of_eager(level):
    def f(x, t):
        with torch.no_grad():
            return torch.rand(3) * (1 / t.item())

    cf = tp.compile(f, backend=level)
    for v in (1.0, 0.0):
        left = []
        for g in (f, cf):
            torch.manual_seed(0)
            found = outcome(g, (X, torch.tensor(v)))
            left.append((found, torch.rand(1), torch.is_grad_enabled()))
            torch.set_grad_enabled(True)
        assert same(*left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_roots_are_no_powers(dtype):
    x = torch.tensor([-math.inf, math.inf, math.nan, -0.0, 0.0, 4.0], dtype=dtype)
    for f in (lambda x, t: x ** t.item(), lambda x, t: torch.float_power(x, t.item())):
        cf = tp.compile(f)
        for v in (3.0, 0.5, -0.5, 0.0, -1.0):
            want, got = f(x, torch.tensor(v)), cf(x, torch.tensor(v))
            assert same(got, want) and torch.equal(got.signbit()[want == 0], want.signbit()[want == 0])


def test_a_tensor_of_integers_complains_as_in_eager():
    for dtype in (torch.int64, torch.uint8, torch.bool):
        f = lambda x, t: torch.tensor(t.item(), dtype=dtype)  # noqa: B023, E731
        cf = tp.compile(f, recompile_limit=16)
        for v in (1.0, -2.0, 300.0, math.inf, math.nan):
            assert same(outcome(cf, (X, torch.tensor(v))), outcome(f, (X, torch.tensor(v))))


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, torch.scalar_tensor])
def test_a_tensor_of_a_number_that_does_not_fit(make):
    f = lambda x, t: (make(t.item()), make(t.item() * 2))  # noqa: E731
    for dtype, values in ((torch.float64, (2.0, 1e39, 1e300, math.inf)), (torch.int64, (3, 2**62, -(2**63)))):
        for backend in ("eager", "stax"):
            cf = tp.compile(f, backend=backend)
            for v in values:
                args = (X, torch.tensor(v, dtype=dtype))
                assert same(outcome(cf, args), outcome(f, args))


PROBES = {
    "pickle": lambda x, t: (x, pickle.dumps([t.item()])),
    "attribute": lambda x, t: (x, hasattr(t.item(), "value"), hasattr(t.item(), "node"), hasattr(t.item(), "__dict__")),
    "builtins": lambda x, t: (x, str(builtins.type(t.item()))),
    "symbol": lambda x, t: (x, isinstance(t.item(), (torch.SymFloat, torch.SymInt))),
    "vars": lambda x, t: (x, len(dir(t.item()))),
}


@pytest.mark.parametrize("name", PROBES)
def test_nothing_tells_a_number_from_a_float(name):
    assert same(outcome(tp.compile(PROBES[name]), (X, VALUES[0])), outcome(PROBES[name], (X, VALUES[0])))


def test_verify_takes_numbers_and_training_steps():
    linear = torch.nn.Linear(4, 4)

    def step(x, t):
        linear.weight.grad = None
        loss = linear(x).pow(2).mean() * t.item()
        loss.backward()
        with torch.no_grad():
            linear.weight.sub_(linear.weight.grad, alpha=0.1)
        return loss.detach()

    def read(x, t):
        linear.weight.detach().mul_(t.item())
        return linear.weight.sum().item(), (x * 1.1).sum().item()

    for f in (step, read):
        cf, before = tp.compile(f, verify=True), linear.weight.detach().clone()
        for v in (0.5, 2.0):
            left = []
            for g in (f, cf):
                linear.weight.data.copy_(before)
                left.append((g(X, torch.tensor(v)), linear.weight.detach().clone()))
            assert same(left[1], left[0])


def test_a_gate_on_a_negative_zero_keeps_its_sign():
    cf = tp.compile(lambda x, t: torch.nan_to_num(x, t.item()))
    x = torch.tensor([math.nan, 1.0])
    for v in (0.0, -0.0, 0.0):
        assert torch.equal(cf(x, torch.tensor(v)).signbit(), torch.nan_to_num(x, v).signbit())


def test_numbers_that_may_raise_keep_their_order():
    def scaled(x, s, i):
        z = x * s.item()
        n, c = z.norm().item() / 2, s.item() / 3
        return z * n * c

    def between(x, s, i):
        a, k = s.item() / 2, 5 // i.item()
        y = torch.dropout(x * a, 0.5, True)
        b, m = s.item() / 3, 7 % i.item()
        return (y * b + k * m) * (s.item() / 4) * s.item() ** 0.5

    for f in (scaled, between):
        cf = tp.compile(f, strict_native=True)
        for s, i in ((0.2, 2), (0.3, 3), (0.4, 4), (0.5, 5)):
            args = (torch.ones(6), torch.tensor(s), torch.tensor(i))
            torch.manual_seed(0)
            want = f(*args), torch.rand(1)
            torch.manual_seed(0)
            assert all(map(torch.equal, (cf(*args), torch.rand(1)), want))
    for g in (between, cf):
        torch.manual_seed(0)
        with pytest.raises(ZeroDivisionError, match="integer division or modulo by zero"):
            g(torch.ones(6), torch.tensor(0.5), torch.tensor(0))
        assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(0)))  # nothing was drawn
