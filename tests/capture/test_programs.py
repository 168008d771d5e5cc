"""Programs of many kinds, run eagerly and compiled: language, modules, recurrent layers; natively where kernels matter."""

# ruff: noqa: B006  (mutable defaults are what is tested)
import contextlib
import copy
import dataclasses
import functools
import itertools
import sys
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensorplay as tp
from tensorplay.capture.callee import callee

from .sequences import CASES, T, case, check

NATIVE = {}
XS = [(T(1, 2, 3),), (T(-1, 2, -3),), (T(1, 2, 3),)]


def native(f):
    """A case whose kernels matter: it runs through the compiler as well."""
    NATIVE[f.__name__] = f
    return case(f)


@case
def generator_with_send():
    def averages():
        total = 0
        while (y := (yield total)) is not None:
            total = total + y

    def f(x):
        it = averages()
        next(it)
        first, second = it.send(x), it.send(x * 2)
        it.close()
        return first, second

    return f, XS


@case
def generator_with_finally():
    def f(x):
        log = []

        def parts():
            try:
                yield x
                yield x * 2
            finally:
                log.append(x.sum())

        for y in parts():
            if y.sum() > 0:
                break
        return y, log

    return f, XS


@dataclasses.dataclass
class Pair:
    a: object
    b: object


@case
def match_statement():
    def f(x, c):
        match c:
            case {"k": v, **rest}:
                return x * v + len(rest)
            case Pair(a=1, b=b):
                return x * b
            case [a, *r] if x.sum() > 0:
                return x * a + len(r)
            case [a, *_]:
                return x - a
            case str() as s:
                return x * len(s)
            case None | True:
                return x
            case _:
                return -x

    subjects = ({"k": 2, "z": 1}, Pair(1, 5), Pair(2, 5), [3, 4], [3], "ab", None, True, 1.5, Pair(1, 6), {"k": 3})
    return f, [*[(T(1, 2), c) for c in subjects], (-T(1, 2), [3, 4])]


@case
def finally_after_a_raise_that_depends_on_data():
    def f(x):
        y = x.clone()
        try:
            if x.sum() < 0:
                raise ValueError(f"negative {x.sum().item():.2f}")
            return y * 2
        finally:
            x.mul_(3)

    xs = [T(1, 2, 3), T(-1, -2, -3), T(-1, -2, -4), T(1, 2, 3)]
    return f, [(x,) for x in xs], lambda: [x.clone() for x in xs]


@case
def descriptor_with_a_set():
    class Field:
        def __set_name__(self, owner, name):
            self.name = "_" + name

        def __get__(self, instance, owner=None):
            return self if instance is None else getattr(instance, self.name)

        def __set__(self, instance, value):
            setattr(instance, self.name, value)

    class M(nn.Module):
        k = Field()

        def __init__(self):
            super().__init__()
            self.k = 2.0

        def forward(self, x):
            return x * self.k

    m = M()
    return m, [*XS, lambda: setattr(m, "k", 3.0), *XS]


@case
def module_with_getattr():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.settings = nn.Linear(3, 3), {"z": 2}

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def forward(self, x):
            return x @ self.weight * self.settings["z"] + self.bias

    torch.manual_seed(1)
    m = M()
    other = nn.Parameter(torch.ones(3, 3))
    return m, [*XS, lambda: setattr(m.inner, "weight", other), *XS, lambda: m.settings.update(z=5), *XS]


@case
def iteration_of_module_and_parameter_dictionaries():
    torch.manual_seed(1)
    layers = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.ReLU()})
    values = nn.ParameterDict({"u": torch.ones(3), "v": torch.zeros(3)})

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.values = layers, values

        def forward(self, x):
            for name, layer in self.layers.items():
                x = layer(x) + len(name)
            for name, value in self.values.items():
                x = x * (1 if name == "u" else 2) + value
            return x

    def add():
        layers["c"] = nn.Tanh()
        values["w"] = torch.full((3,), 7.0)

    return M(), [*XS, add, *XS, lambda: layers.pop("a"), *XS]


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: torch.Tensor
    n: int = 1


@case
def dataclass_replace():
    return lambda c: dataclasses.replace(c, a=c.a * 2, n=c.n + 1), [(Frozen(T(1, 2)),), (Frozen(T(2, 2), 4),), (Frozen(T(1, 2)),)]


@case
def closures_over_loop_variables():
    def f(x):
        late = [lambda y: y * i for i in range(3)]  # noqa: B023
        early = [lambda y, i=i: y * i for i in range(3)]
        return [g(x) for g in late + early]

    return f, XS


@case
def nonlocal_writes():
    def f(x):
        n = 0

        def step():
            nonlocal n, x
            n += 1
            x = x + n

        step()
        step()
        return x, n

    return f, XS


@case
def cache_in_a_default_argument():
    def f(x, cache={}):
        if len(x) not in cache:
            cache[len(x)] = torch.arange(len(x), dtype=torch.float32)
        return x + cache[len(x)]

    return f, [*XS, (T(1, 2),), (T(3, 4),), *XS]


@case
def partial_that_is_replaced():
    def g(a, b, c=1):
        return a * b + c

    p = functools.partial(g, 2.0, c=3)

    def f(x):
        return p(x)

    def change():
        nonlocal p
        p = functools.partial(g, 2.0, c=4)

    return f, [*XS, change, *XS]


@case
def methods_of_every_kind():
    class Owner:
        z = 5

        def __init__(self):
            self.k = 2

        def m(self, x):
            return x * self.k

        @classmethod
        def c(cls, x):
            return x + cls.z

        @staticmethod
        def s(x):
            return x - 1

    o = Owner()
    m, c = o.m, Owner.c
    return (lambda x: m(x) + c(x) + Owner.s(x)), [*XS, lambda: setattr(o, "k", 7), *XS, lambda: setattr(Owner, "z", 9), *XS]


@case
def cached_tensor():
    @functools.cache
    def h(n):
        return torch.arange(n, dtype=torch.float32)

    return lambda x: x * h(len(x)), [*XS, (T(1, 2),), *XS]


@case
def arithmetic_of_sizes():
    def f(x):
        s = x.shape
        return x.new_zeros((*s[:-1], 6)), s.numel(), x.expand(torch.Size([2, *s])), s, s + s, s * 2

    return f, [*XS, (T(1, 2),), (torch.ones(2, 3),)]


@case
def generator_as_an_argument():
    g, h = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)

    def f(x, g):
        return x + torch.rand(3, generator=g) + torch.randn(3, generator=g)

    steps = [(T(1, 2, 3), g), (T(1, 2, 3), h), (T(1, 2, 3), g), (T(1, 2, 3), None)]
    return f, steps, lambda: (g.get_state().sum(), h.get_state().sum())


@case
def context_managers_of_the_program():
    class Depth:
        depth = 0

        def __enter__(self):
            Depth.depth += 1
            return Depth.depth

        def __exit__(self, *error):
            Depth.depth -= 1
            return True

    @contextlib.contextmanager
    def scaled(k):
        yield k * 2

    def f(x):
        with Depth() as a, scaled(3) as b, contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            c = stack.enter_context(Depth())
            stack.callback(lambda: None)
            x = x * a * b * c
            if x.sum() < 0:
                raise KeyError
            return x
        return x - 1

    return f, XS, lambda: Depth.depth


@case
def values_of_a_thread():
    local = threading.local()
    local.k, local.t = 2, torch.ones(3)

    class Own(threading.local):
        k = 1

    own = Own()

    def f(x):
        return x * local.k + local.t * own.k + getattr(local, "more", 0)

    def change():
        local.t, own.k = torch.zeros(3), 7

    return f, [*XS, lambda: setattr(local, "k", 5), *XS, change, *XS, lambda: setattr(local, "more", 1), *XS]


@case
def weak_references():
    class Owner:
        k = 2

    held = [Owner()]
    w, d, k = weakref.ref(held[0]), weakref.WeakValueDictionary(a=held[0]), weakref.WeakKeyDictionary({held[0]: 4})

    def f(x):
        return x * (w().k if w() is not None else 9) + len(d) + len(k) + k.get(d.get("a"), 0)

    return f, [*XS, lambda: setattr(held[0], "k", 3), *XS, held.clear, *XS]


@case
def operators_of_the_program():
    class V:
        __hash__ = None

        def __init__(self, t):
            self.t = t

        def __add__(self, o):
            return V(self.t + o.t)

        def __matmul__(self, o):
            return (self.t * o.t).sum()

        def __eq__(self, o):
            return bool((self.t == o.t).all())

        def __len__(self):
            return len(self.t)

        def __bool__(self):
            return bool(self.t.sum() > 0)

        def __contains__(self, v):
            return bool((self.t == v).any())

        def __iter__(self):
            return iter(self.t)

    def f(x):
        a, b = V(x), V(x * 2)
        return [a @ b, len(a + b), a == b, 2.0 in a, *a, x if a else -x]

    return f, XS


@case
def exceptions_that_carry_tensors():
    class E(Exception):
        def __init__(self, v):
            super().__init__("v")
            self.v = v

    def f(x):
        try:
            try:
                raise E(x * 2)
            except E as e:
                raise RuntimeError("b") from e
        except RuntimeError as r:
            return r.__cause__.v

    return f, XS


@case
def builtins_over_tensors():
    def f(x):
        return (
            sorted([x[0], x[1], x[2]], key=lambda t: -t), max(x), min(list(x)), sum(x), any(t > 2 for t in x),
            [*reversed(x)], list(zip(x, x * 2)), list(enumerate(x)), {i: t for i, t in enumerate(x)}, str(x), f"{x[0]:.1f}",
            list(itertools.chain([x], [x])), functools.reduce(torch.add, [x, x, x]), list(map(torch.neg, [x, x])),
        )  # fmt: skip

    return f, [*XS, (T(100, 2, 3),)]


@case
def indices_of_every_kind():
    indices = (
        slice(None, None, 2), slice(1, None), ..., None, (slice(0, 1), None), [0, 2], [2, 0], torch.tensor([0, 1]), True, range(2)
    )  # fmt: skip
    return lambda x, s: x[s], [(T(1, 2, 3), s) for s in indices]


@case
def functional_call():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    p = {k: v.detach().clone() for k, v in m.named_parameters()}
    q = {k: v + 1 for k, v in p.items()}
    b = {k: v.clone() for k, v in m.named_buffers()}
    x = torch.randn(4, 3)

    def f(p, b, x):
        return torch.func.functional_call(m, (p, b), (x,))

    return f, [(p, b, x), (q, b, x), (p, b, x)], lambda: ({k: v.clone() for k, v in b.items()}, m[1].running_mean.clone())


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).T


@case
def parametrization_that_is_removed():
    torch.manual_seed(0)
    m = nn.Linear(3, 3)
    torch.nn.utils.parametrize.register_parametrization(m, "weight", Symmetric())

    def f(x):
        with torch.nn.utils.parametrize.cached():
            return m(x), m.weight

    return f, [*XS, lambda: torch.nn.utils.parametrize.remove_parametrizations(m, "weight"), *XS]


@native
def spectral_norm_in_training():
    torch.manual_seed(0)
    m = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    return m, [*XS, m.eval, *XS], lambda: [b.clone() for b in m.buffers()]


@native
def recurrent_layer_with_dropout():
    torch.manual_seed(0)
    m = nn.LSTM(3, 4, num_layers=2, dropout=0.5, bidirectional=True)
    return m, [(torch.ones(5, 2, 3),), (torch.ones(5, 2, 3),), m.eval, (torch.ones(5, 2, 3),)]


def packed(lengths):
    torch.manual_seed(2)
    x = torch.randn(len(lengths), 5, 3)
    return nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False)


@native
def packed_sequences_of_equal_size_and_other_lengths():
    torch.manual_seed(0)
    m = nn.GRU(3, 4, batch_first=True)

    def f(p):
        out, h = m(p)
        return nn.utils.rnn.pad_packed_sequence(out, batch_first=True), h

    return f, [(packed([4, 4, 1]),), (packed([4, 3, 2]),), (packed([3, 3, 3]),), (packed([4, 4, 1]),)]


@native
def packing_inside():
    torch.manual_seed(0)
    m, x = nn.LSTM(3, 4, batch_first=True), torch.randn(2, 5, 3)

    def f(x, lengths):
        p = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, h = m(p)
        return nn.utils.rnn.pad_packed_sequence(out, batch_first=True), h

    return f, [(x, torch.tensor(n)) for n in ([5, 3], [2, 5], [5, 3], [2, 4])]


@native
def recurrent_cell_in_a_loop():
    torch.manual_seed(0)
    m = nn.LSTMCell(3, 4)

    def f(x, s):
        for t in x:
            s = m(t, s)
        return s

    return f, [(torch.ones(5, 2, 3), (torch.zeros(2, 4), torch.zeros(2, 4))), (torch.ones(4, 2, 3), None)]


@native
def attention_in_eval_and_training():
    torch.manual_seed(0)
    m, x = nn.MultiheadAttention(4, 2, batch_first=True).eval(), torch.randn(2, 3, 4)
    mask = torch.tensor([[False, False, True], [False, True, True]])

    def f(x, mask=None, weights=True):
        with torch.no_grad():
            return m(x, x, x, key_padding_mask=mask, need_weights=weights)

    return f, [(x,), (x, mask), (x, mask, False), (x, None, False), m.train, (x, mask)]


@native
def embedding_that_writes_its_weight():
    w = torch.arange(12.0).reshape(4, 3)
    steps = [(torch.tensor(i),) for i in ([1, 2], [3, 2], [0, 0])]
    return lambda i: F.embedding(i, w, max_norm=1.0), steps, w.clone


@native
def batch_norm_that_averages():
    m, x = nn.BatchNorm1d(3, momentum=None), torch.randn(4, 3)
    return m, [(x,), (x * 2,), (x,), m.eval, (x,)], lambda: [b.clone() for b in m.buffers()]


@native
def writes_to_the_data_of_a_parameter():
    p = nn.Parameter(T(1, 2, 3))

    def f(x):
        p.data.add_(x)
        return p * 2

    return f, XS, lambda: p.detach().clone()


@native
def exchanges_the_data_of_a_parameter():
    p = nn.Parameter(T(1, 2, 3))

    def f(x):
        p.data = x * 2
        return p * 2

    return f, XS, lambda: p.detach().clone()


@native
def least_squares_whose_residuals_depend_on_the_rank():
    torch.manual_seed(0)
    a = torch.randn(4, 2)

    def f(a, b):
        r = torch.linalg.lstsq(a, b, driver="gelsd")
        return r.residuals.shape[0], r.solution

    return f, [(a, torch.ones(4, 1)), (torch.ones(4, 2), torch.ones(4, 1)), (copy.deepcopy(a), torch.ones(4, 1))]


def hidden(g):
    """A function where no walk finds it: only an object of C refers to it."""
    return slice(g)


@case
def state_of_a_closure_that_no_walk_finds():
    def make(k):
        state = {"k": k, "t": torch.ones(3)}

        def g(x, more={"m": 1}):
            return x * state["k"] * more["m"] + state["t"]

        return g, state

    (a, first), (b, second) = make(2), make(3)
    held = hidden(a), hidden(b)

    def f(x):
        return held[0].stop(x) + held[1].stop(x)

    def replace():
        second["k"], first["t"] = 7, torch.zeros(3)

    def default():
        b.__defaults__ = ({"m": 4},)

    return f, [*XS, lambda: first.update(k=5), *XS, replace, *XS, default, *XS]


@case
def effect_of_a_closure_that_no_walk_finds():
    log = []

    def g(x):
        log.append(1)
        return x * 2

    held = hidden(g)
    return lambda x: held.stop(x), XS, lambda: len(log)


@pytest.mark.parametrize("name", CASES[__name__])
def test_program(name):
    check(CASES[__name__][name])


@pytest.mark.parametrize("name", NATIVE)
def test_program_through_kernels(name):
    check(NATIVE[name], backend="stax", tolerance=1e-5)


def test_the_function_of_a_frame():
    def f(x, k=2):
        return callee(sys._getframe()), x, k

    assert f(1)[0] is f and (lambda: callee(sys._getframe()))() is not None and callee(sys._getframe()).__code__.co_name.startswith("test_")
    assert next(callee(sys._getframe()) for _ in range(1)).__name__ == "<genexpr>"


def test_what_capture_itself_runs_is_no_state():
    c = tp.compile(lambda x, w: (torch.relu(x + w) * 2).sum(-1), backend="eager")
    c(torch.ones(4, 8), torch.ones(4, 8))
    text = c.versions[0].text
    assert "frozenset" not in text and "__init__" not in text and "tensorplay" not in text and text.count("if ") <= 4, text
