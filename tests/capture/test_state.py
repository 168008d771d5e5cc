# ruff: noqa: B006  (default arguments that change are what is tested)
"""State outside of the arguments: every change between two calls shows, as in eager."""

import collections
import contextvars
import dataclasses
import enum
import functools
import gc
import itertools
import operator
import os
import random
import sys
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import tensorplay as tp
from tensorplay.capture.reach import Reach

from .sequences import CASES, T, case, check

other = types.ModuleType("othermod")
exec("K = 2.0\nclass C:\n    z = 3.0\ndef g(x): return x * K\ndef h(x): return x * C.z", other.__dict__)
other.__dict__["__file__"] = "othermod.py"
sys.modules["othermod"] = other
t = torch.ones(3)


@case
def nested_config():
    class Cfg:
        pass

    c = Cfg()
    c.inner = Cfg()
    c.inner.deep = Cfg()
    c.inner.deep.k = 2.0
    return (lambda x: x * c.inner.deep.k), [
        (t,),
        lambda: setattr(c.inner.deep, "k", 5.0),
        (t,),
        lambda: setattr(c.inner, "deep", types.SimpleNamespace(k=7.0)),
        (t,),
    ]


@case
def dataclass_cfg():
    @dataclasses.dataclass
    class D:
        a: float = 1.0
        b: list = dataclasses.field(default_factory=lambda: [1.0, 2.0])

    d = D()
    return (lambda x: x * d.a + d.b[1]), [
        (t,),
        lambda: setattr(d, "a", 3.0),
        (t,),
        lambda: d.b.__setitem__(1, 9.0),
        (t,),
        lambda: d.b.append(3),
        (t,),
    ]


@case
def frozen_dc():
    @dataclasses.dataclass(frozen=True)
    class D:
        a: float = 1.0

    box = [D()]
    return (lambda x: x * box[0].a), [(t,), lambda: box.__setitem__(0, D(4.0)), (t,)]


@case
def dict_of_lists():
    d = {"a": [1.0, 2.0], "b": {"c": [3.0]}}
    return (lambda x: x * d["a"][1] + d["b"]["c"][-1]), [
        (t,),
        lambda: d["a"].__setitem__(1, 5.0),
        (t,),
        lambda: d["b"].__setitem__("c", [8.0]),
        (t,),
        lambda: d["b"]["c"].append(1.0),
        (t,),
    ]


@case
def dict_iteration():
    d = {"a": 1.0}

    def f(x):
        for k, v in d.items():
            x = x * v + len(k)
        return x

    return f, [(t,), lambda: d.__setitem__("bbb", 2.0), (t,), lambda: d.pop("a"), (t,)]


@case
def dict_missing_key():
    d = {}
    return (lambda x: x * d.get("k", 2.0)), [(t,), lambda: d.__setitem__("k", 5.0), (t,)]


@case
def dict_in_then_swap():
    d = {"a": 1}
    return (lambda x: x * 2 if "k" in d else x), [(t,), lambda: (d.pop("a"), d.__setitem__("k", 1)), (t,)]


@case
def dict_keys_swap():
    d = {"a": 1}

    def f(x):
        for k in d:
            x = x * len(k)
        return x

    return f, [(t,), lambda: (d.pop("a"), d.__setitem__("kkk", 1)), (t,)]


@case
def set_contents():
    s = {"a"}
    return (lambda x: x * 2 if "k" in s else x), [(t,), lambda: (s.discard("a"), s.add("k")), (t,)]


@case
def class_attr():
    class C:
        k = 2.0

    return (lambda x: x * C.k), [(t,), lambda: setattr(C, "k", 3.0), (t,)]


@case
def class_attr_inst():
    class C:
        k = 2.0

    c = C()
    return (lambda x: x * c.k), [
        (t,),
        lambda: setattr(C, "k", 3.0),
        (t,),
        lambda: setattr(c, "k", 9.0),
        (t,),
        lambda: delattr(c, "k"),
        (t,),
    ]


@case
def class_attr_base():
    class B:
        k = 2.0

    class C(B):
        pass

    c = C()
    return (lambda x: x * c.k), [(t,), lambda: setattr(B, "k", 3.0), (t,), lambda: setattr(C, "k", 9.0), (t,)]


@case
def hasattr_later():
    class C:
        pass

    c = C()
    return (lambda x: x * c.k if hasattr(c, "k") else x), [(t,), lambda: setattr(c, "k", 3.0), (t,)]


@case
def getattr_default():
    class C:
        pass

    c = C()
    return (lambda x: x * getattr(c, "k", 1.0)), [(t,), lambda: setattr(c, "k", 3.0), (t,)]


@case
def getattr_dynamic():
    class C:
        pass

    c = C()
    c.ab = 2.0
    return (lambda x: x * getattr(c, "a" + "b")), [(t,), lambda: setattr(c, "ab", 3.0), (t,)]


@case
def vars_read():
    c = types.SimpleNamespace(q=1.0)
    return (lambda x: x * sum(vars(c).values())), [
        (t,),
        lambda: setattr(c, "q", 3.0),
        (t,),
        lambda: setattr(c, "r", 3.0),
        (t,),
    ]


@case
def globals_read():
    g = {"torch": torch, "KK": 2.0}
    exec("def f(x): return x * globals()['K' + 'K']", g)
    return g["f"], [(t,), lambda: g.__setitem__("KK", 7.0), (t,)]


@case
def module_const():
    return (lambda x: x * other.K), [
        (t,),
        lambda: setattr(other, "K", 4.0),
        (t,),
        lambda: setattr(other, "K", 2.0),
        (t,),
    ]


@case
def module_func_const():
    return (lambda x: other.g(x)), [(t,), lambda: setattr(other, "K", 4.0), (t,), lambda: setattr(other, "K", 2.0)]


@case
def module_func_inner_import():
    def f(x):
        import othermod

        return othermod.h(x) * othermod.K

    return f, [
        (t,),
        lambda: setattr(other, "K", 4.0),
        (t,),
        lambda: setattr(other.C, "z", 5.0),
        (t,),
        lambda: (setattr(other, "K", 2.0), setattr(other.C, "z", 3.0)),
    ]


@case
def from_import_inner():
    def f(x):
        from othermod import K

        return x * K

    return f, [(t,), lambda: setattr(other, "K", 4.0), (t,), lambda: setattr(other, "K", 2.0)]


@case
def partial_fn():
    def g(a, x, k=1.0):
        return x * a * k

    p = functools.partial(g, 2.0, k=3.0)
    box = {"p": p}
    return (lambda x: box["p"](x)), [
        (t,),
        lambda: box.__setitem__("p", functools.partial(g, 5.0, k=3.0)),
        (t,),
        lambda: box["p"].keywords.__setitem__("k", 11.0),
        (t,),
    ]


@case
def partial_direct():
    def g(a, x, k=1.0):
        return x * a * k

    p = functools.partial(g, 2.0, k=3.0)
    return p, [(t,), lambda: p.keywords.__setitem__("k", 11.0), (t,)]


@case
def partial_list():
    items = [2.0]

    def g(a, x):
        return x * a[0]

    p = functools.partial(g, items)
    return p, [(t,), lambda: items.__setitem__(0, 11.0), (t,)]


@case
def lru():
    c = {"k": 2.0}

    @functools.lru_cache
    def g(n):
        return c["k"] * n

    return (lambda x: x * g(3)), [(t,), lambda: c.__setitem__("k", 5.0), (t,), lambda: g.cache_clear(), (t,)]


@case
def lru_tensor():
    @functools.lru_cache
    def g(n):
        return torch.ones(n) * 2

    return (lambda x: x * g(3)), [(t,), (t,), (t * 2,)]


@case
def prop():
    class C:
        def __init__(s):
            s._k = 2.0

        @property
        def k(s):
            return s._k * 2

    c = C()
    return (lambda x: x * c.k), [(t,), lambda: setattr(c, "_k", 5.0), (t,)]


@case
def prop_class_changed():
    class C:
        @property
        def k(s):
            return 2.0

    c = C()
    return (lambda x: x * c.k), [(t,), lambda: setattr(C, "k", property(lambda s: 5.0)), (t,)]


@case
def method_replaced():
    class C:
        def g(s, x):
            return x * 2

    c = C()
    return (lambda x: c.g(x)), [
        (t,),
        lambda: setattr(C, "g", lambda s, x: x * 3),
        (t,),
        lambda: setattr(c, "g", lambda x: x * 4),
        (t,),
    ]


@case
def function_replaced():
    def a(x):
        return x * 2

    def b(x):
        return x * 3

    ns = types.SimpleNamespace(g=a)
    return (lambda x: ns.g(x)), [(t,), lambda: setattr(ns, "g", b), (t,)]


@case
def code_replaced():
    def a(x):
        return x * 2

    def b(x):
        return x * 3

    return (lambda x: a(x)), [(t,), lambda: setattr(a, "__code__", b.__code__), (t,)]


@case
def own_code_replaced():
    def a(x):
        return x * 2

    def b(x):
        return x * 3

    return a, [(t,), lambda: setattr(a, "__code__", b.__code__), (t,)]


@case
def mutable_default():
    def f(x, acc=[1.0]):
        return x * acc[0]

    return f, [(t,), lambda: f.__defaults__[0].__setitem__(0, 4.0), (t,)]


@case
def defaults_replaced():
    def f(x, k=2.0):
        return x * k

    return f, [(t,), lambda: setattr(f, "__defaults__", (7.0,)), (t,)]


@case
def kwdefaults_replaced():
    def f(x, *, k=2.0):
        return x * k

    return f, [(t,), lambda: setattr(f, "__kwdefaults__", {"k": 7.0}), (t,)]


@case
def inner_default():
    def g(x, k=2.0):
        return x * k

    return (lambda x: g(x)), [(t,), lambda: setattr(g, "__defaults__", (7.0,)), (t,)]


@case
def enum_state():
    class E(enum.Enum):
        A = 1
        B = 2

    c = types.SimpleNamespace(e=E.A)
    return (lambda x: x * 2 if c.e is E.A else x * 3), [(t,), lambda: setattr(c, "e", E.B), (t,)]


@case
def enum_value():
    class E(enum.IntEnum):
        A = 1
        B = 2

    c = types.SimpleNamespace(e=E.A)
    return (lambda x: x * int(c.e)), [(t,), lambda: setattr(c, "e", E.B), (t,)]


@case
def environ():
    os.environ["TPX"] = "2"
    return (lambda x: x * float(os.environ["TPX"])), [(t,), lambda: os.environ.__setitem__("TPX", "3"), (t,)]


@case
def environ_get():
    os.environ.pop("TPX", None)
    return (lambda x: x * float(os.environ.get("TPX", "1"))), [(t,), lambda: os.environ.__setitem__("TPX", "3"), (t,)]


@case
def getenv():
    os.environ.pop("TPX", None)
    return (lambda x: x * float(os.getenv("TPX", "1"))), [(t,), lambda: os.environ.__setitem__("TPX", "3"), (t,)]


@case
def numpy_scalar():
    c = types.SimpleNamespace(k=np.float32(2.0))
    return (lambda x: x * c.k), [(t,), lambda: setattr(c, "k", np.float32(3.0)), (t,)]


@case
def numpy_array():
    a = np.array([1.0, 2.0])
    return (lambda x: x * float(a[1])), [(t,), lambda: a.__setitem__(1, 5.0), (t,)]


@case
def numpy_array_asT():
    a = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    return (lambda x: x * torch.from_numpy(a)), [(t,), lambda: a.__setitem__(1, 5.0), (t,)]


@case
def numpy_array_tensor():
    a = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    return (lambda x: x * torch.tensor(a)), [(t,), lambda: a.__setitem__(1, 5.0), (t,)]


@case
def numpy_arg():
    def f(x, a):
        return x * torch.as_tensor(a)

    return f, [(t, np.ones(3, np.float32)), (t, np.ones(3, np.float32) * 2)]


@case
def list_to_tensor():
    items = [1.0, 2.0, 3.0]
    return (lambda x: x * torch.tensor(items)), [(t,), lambda: items.__setitem__(1, 5.0), (t,)]


@case
def list_of_ints_shape():
    items = [3, 1]
    return (lambda x: x.reshape(items)), [(t,), lambda: items.reverse(), (t,)]


@case
def iter_counter():
    c = itertools.count()
    return (lambda x: x * next(c)), [(t,), (t,), (t,)]


@case
def iter_cycle():
    c = itertools.cycle([1.0, 2.0])
    return (lambda x: x * next(c)), [(t,), (t,), (t,)]


@case
def iter_list():
    c = iter([1.0, 2.0, 3.0])
    return (lambda x: x * next(c)), [(t,), (t,), (t,)]


@case
def gen_state():
    def g():
        k = 0
        while True:
            k += 1
            yield float(k)

    c = g()
    return (lambda x: x * next(c)), [(t,), (t,), (t,)]


@case
def gen_in_obj():
    class C:
        def __init__(s):
            s.c = itertools.count()

        def __call__(s, x):
            return x * next(s.c)

    return C(), [(t,), (t,), (t,)]


@case
def py_random():
    return (lambda x: x * random.random()), [(t,), (t,)]


@case
def own_random():
    r = random.Random(3)
    return (lambda x: x * r.random()), [(t,), (t,)]


@case
def fresh_random():
    return (lambda x: x * random.Random(3).random()), [(t,), (t,)]


@case
def np_random():
    return (lambda x: x * np.random.rand()), [(t,), (t,)]


@case
def np_generator():
    g = np.random.default_generator if hasattr(np.random, "default_generator") else np.random.default_rng(3)
    return (lambda x: x * g.random()), [(t,), (t,)]


@case
def torch_generator():
    g = torch.Generator().manual_seed(3)
    return (lambda x: x + torch.rand(3, generator=g)), [(t,), (t,), (t,)], lambda: g.get_state().tolist()[:40]


@case
def tensor_pyattr():
    w = torch.ones(3)
    w.k = 2.0
    return (lambda x: x * w * w.k), [(t,), lambda: setattr(w, "k", 5.0), (t,)]


@case
def arg_pyattr():
    x1, x2 = torch.ones(3), torch.ones(3)
    x1.k = 2.0
    x2.k = 3.0
    return (lambda x: x * x.k), [(x1,), (x2,), lambda: setattr(x1, "k", 9.0), (x1,)]


@case
def arg_pyattr_tensor():
    x1, x2 = torch.ones(3), torch.ones(3)
    x1.w = torch.ones(3)
    x2.w = torch.ones(3) * 3
    return (lambda x: x * x.w), [(x1,), (x2,)]


@case
def param_attr():
    m = nn.Linear(3, 3)
    m.weight.scale = 2.0
    return (lambda x: x * m.weight.scale), [(t,), lambda: setattr(m.weight, "scale", 4.0), (t,)]


@case
def arg_grad_attr():
    x1 = torch.ones(3, requires_grad=True)
    return (lambda x: x.detach() * (2.0 if x.grad is None else x.grad)), [(x1,), lambda: x1.sum().backward(), (x1,)]


@case
def contextvar():
    v = contextvars.ContextVar("v", default=2.0)
    return (lambda x: x * v.get()), [(t,), lambda: v.set(5.0), (t,)]


@case
def descriptor():
    class D:
        def __init__(s):
            s.v = 2.0

        def __get__(s, o, c):
            return s.v

    d = D()

    class C:
        k = d

    c = C()
    return (lambda x: x * c.k), [(t,), lambda: setattr(d, "v", 4.0), (t,)]


@case
def getattr_hook():
    class C:
        def __init__(s):
            s.d = {"k": 2.0}

        def __getattr__(s, n):
            return s.d[n]

    c = C()
    return (lambda x: x * c.k), [(t,), lambda: c.d.__setitem__("k", 5.0), (t,)]


@case
def slots_obj():
    class C:
        __slots__ = ("k",)

    c = C()
    c.k = 2.0
    return (lambda x: x * c.k), [(t,), lambda: setattr(c, "k", 5.0), (t,)]


@case
def weakref_state():
    class C:
        pass

    import weakref

    c = C()
    c.k = 2.0
    r = weakref.ref(c)
    return (lambda x: x * r().k), [(t,), lambda: setattr(c, "k", 5.0), (t,)]


@case
def deque_state():
    d = collections.deque([1.0, 2.0])
    return (lambda x: x * d[0]), [(t,), lambda: d.rotate(1), (t,)]


@case
def counter_state():
    d = collections.Counter("aab")
    return (lambda x: x * d["a"]), [(t,), lambda: d.update("a"), (t,)]


@case
def mappingproxy():
    b = {"k": 2.0}
    d = types.MappingProxyType(b)
    return (lambda x: x * d["k"]), [(t,), lambda: b.__setitem__("k", 5.0), (t,)]


@case
def chainmap():
    b = {"k": 2.0}
    d = collections.ChainMap({}, b)
    return (lambda x: x * d["k"]), [(t,), lambda: b.__setitem__("k", 5.0), (t,), lambda: d.__setitem__("k", 6.0), (t,)]


@case
def userdict():
    d = collections.UserDict(k=2.0)
    return (lambda x: x * d["k"]), [(t,), lambda: d.__setitem__("k", 5.0), (t,)]


@case
def bytearray_state():
    b = bytearray(b"\x02")
    return (lambda x: x * b[0]), [(t,), lambda: b.__setitem__(0, 7), (t,)]


@case
def array_state():
    import array

    b = array.array("d", [2.0])
    return (lambda x: x * b[0]), [(t,), lambda: b.__setitem__(0, 7.0), (t,)]


@case
def memoryview_state():
    b = bytearray(b"\x02")
    m = memoryview(b)
    return (lambda x: x * m[0]), [(t,), lambda: b.__setitem__(0, 7), (t,)]


@case
def fractions_state():
    import fractions

    c = types.SimpleNamespace(k=fractions.Fraction(1, 2))
    return (lambda x: x * float(c.k)), [(t,), lambda: setattr(c, "k", fractions.Fraction(1, 4)), (t,)]


@case
def datetime_state():
    import datetime

    c = types.SimpleNamespace(k=datetime.timedelta(seconds=2))
    return (lambda x: x * c.k.total_seconds()), [(t,), lambda: setattr(c, "k", datetime.timedelta(seconds=4)), (t,)]


@case
def path_state():
    import pathlib

    c = types.SimpleNamespace(k=pathlib.Path("ab"))
    return (lambda x: x * len(str(c.k))), [(t,), lambda: setattr(c, "k", pathlib.Path("abcde")), (t,)]


@case
def builtin_method_hides():
    items = [1.0]
    g = items.__getitem__
    return (lambda x: x * g(0)), [(t,), lambda: items.__setitem__(0, 6.0), (t,)]


@case
def itemgetter_state():
    d = {"a": 2.0, "b": 5.0}
    box = [operator.itemgetter("a")]
    return (lambda x: x * box[0](d)), [(t,), lambda: box.__setitem__(0, operator.itemgetter("b")), (t,)]


@case
def module_list_attr():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.ks = [1.0, 2.0]
            s.d = {"a": {"b": 3.0}}
            s.cfg = types.SimpleNamespace(z=1.0)

        def forward(s, x):
            return x * s.ks[0] + s.d["a"]["b"] + s.cfg.z

    m = M()
    return m, [
        (t,),
        lambda: m.ks.__setitem__(0, 4.0),
        (t,),
        lambda: m.d["a"].__setitem__("b", 8.0),
        (t,),
        lambda: setattr(m.cfg, "z", 12.0),
        (t,),
    ]


@case
def module_children_change():
    m = nn.Sequential(nn.ReLU(), nn.Tanh())
    return m, [(t,), lambda: m.append(nn.Sigmoid()), (t,), lambda: m.__setitem__(0, nn.Tanh()), (t,)]


@case
def module_added_attr():
    class M(nn.Module):
        def forward(s, x):
            return x * 2 if hasattr(s, "extra") else x

    m = M()
    return m, [(t,), lambda: setattr(m, "extra", 1), (t,)]


@case
def module_buffer_none():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.register_buffer("b", None)

        def forward(s, x):
            return x if s.b is None else x * s.b

    m = M()
    return m, [(t,), lambda: setattr(m, "b", torch.ones(3) * 3), (t,)]


@case
def dropout_p():
    m = nn.Dropout(0.0)
    return m, [(t,), lambda: setattr(m, "p", 1.0), (t,), lambda: m.eval(), (t,)]


@case
def module_state_len():
    m = nn.ModuleDict({"a": nn.ReLU()})

    def f(x):
        for k in m:
            x = m[k](x) * len(k)
        return x

    return f, [(t,), lambda: m.update({"bbb": nn.Tanh()}), (t,)]


@case
def isinstance_type_swap():
    class A:
        k = 2.0

    class B:
        k = 3.0

    a = A()
    return (lambda x: x * type(a).k), [(t,), lambda: setattr(a, "__class__", B), (t,)]


@case
def closure_rebind():
    k = 2.0

    def f(x):
        return x * k

    def setk():
        nonlocal k
        k = 5.0

    return f, [(t,), setk, (t,)]


@case
def nested_closure():
    k = 2.0

    def outer(x):
        def inner(y):
            return y * k

        return inner(x)

    def setk():
        nonlocal k
        k = 5.0

    return outer, [(t,), setk, (t,)]


@case
def global_in_comprehension():
    g = {"ks": [1.0, 2.0], "torch": torch}
    exec("def f(x): return sum(x * k for k in ks)", g)
    return g["f"], [(t,), lambda: g["ks"].append(3.0), (t,)]


@case
def metaclass_attr():
    class M(type):
        k = 2.0

    class C(metaclass=M):
        pass

    return (lambda x: x * C.k), [(t,), lambda: setattr(M, "k", 5.0), (t,)]


@case
def module_names_that_serve_the_instances():
    class M(type):
        __module__ = property(lambda cls: ["not", "a", "name"])
        k = 2.0

    class C(metaclass=M):
        def __init__(self):
            self.a = 3.0

    class D:
        __module__ = property(lambda self: "an instance's")
        a = 2.0

    c, d = C(), D()
    steps = [lambda: setattr(M, "k", 5.0), lambda: setattr(c, "a", 7.0), lambda: setattr(D, "a", 4.0), lambda: setattr(d, "a", 9.0)]
    return (lambda x: x * C.k + c.a * d.a), [(t,), *[step for change in steps for step in (change, (t,))]]


@case
def containers_that_answer_otherwise():
    class Table(collections.OrderedDict):
        def __getitem__(self, key):
            return (lambda kind, k: kind(k))(*super().__getitem__(key))

        def __iter__(self):
            return iter(("neither", "of", "them"))

        def __len__(self):
            return 7

    class Line(list):
        __getitem__ = __iter__ = __len__ = None

    table, line = Table(a=(float, 2.0), b=(int, 3)), Line([1.0, 2.0])
    made = collections.defaultdict(lambda: 5.0, k=2.0)

    def f(x):
        return x * table["a"] * list.__getitem__(line, 0) * made["k"] + list(dict.keys(table)).index("b")

    return f, [
        (t,),
        lambda: dict.__setitem__(table, "a", (float, 7.0)),
        (t,),
        lambda: list.__setitem__(line, 0, 3.0),
        (t,),
        lambda: made.pop("k"),
        (t,),
        lambda: table.move_to_end("a"),
        (t,),
        lambda: table.pop("a"),
        (t,),
    ]


def test_a_large_program_is_followed_only_where_it_is_named(monkeypatch):
    """Computed names and names of modules concern code that runs: two hundred modules that nothing names stay closed."""
    for k in range(200):
        monkeypatch.setitem(sys.modules, f"large{k}", types.ModuleType(f"large{k}"))
    for k in range(200):
        text = f"import large{(k + 1) % 200} as other\ndef f(x): return other.g(x)\ndef g(x): return other.f(x) + {k}"
        exec(text, sys.modules[f"large{k}"].__dict__)
    begin = types.ModuleType("begin")
    exec(
        "import importlib, sys\nclass A:\n  def __init__(self): self.k0 = 2.0\n"
        "  def other(self, n): return sys.modules[n].f(importlib.import_module(n).__dict__['g'])\n"
        "  def __call__(self, x): return x * self.__dict__['k' + str(0)]\na = A()\ndef f(x): return a(x)",
        begin.__dict__,
    )
    reached = []
    follow = Reach._function
    monkeypatch.setattr(Reach, "_function", lambda self, function, source: (reached.append(function), follow(self, function, source)))
    compiled, x = tp.compile(begin.f, backend="eager", strict_native=True), torch.ones(2)
    assert compiled(x).tolist() == [2.0, 2.0]
    begin.a.k0 = 5.0
    assert compiled(x).tolist() == [5.0, 5.0] and len(reached) < 20


@case
def singledispatch():
    @functools.singledispatch
    def g(k, x):
        return x * 2

    return (lambda x: g(1, x)), [(t,), lambda: g.register(int, lambda k, x: x * 7), (t,)]


@case
def tensor_in_set_get():
    store = {"w": T(1, 2, 3)}
    return (lambda x: x * store["w"]), [
        (t,),
        lambda: store.__setitem__("w", T(4, 5, 6)),
        (t,),
        lambda: store["w"].mul_(2),
        (t,),
    ]


@case
def namedtuple_state():
    P = collections.namedtuple("P", "a b")
    box = [P(1.0, 2.0)]
    return (lambda x: x * box[0].b), [(t,), lambda: box.__setitem__(0, P(1.0, 8.0)), (t,)]


@case
def tuple_global():
    g = {"ks": (1.0, (2.0, 3.0)), "torch": torch}
    exec("def f(x): return x * ks[1][0]", g)
    return g["f"], [
        (t,),
        lambda: g.__setitem__("ks", (1.0, (5.0, 3.0))),
        (t,),
        lambda: g.__setitem__("ks", (1.0, 4.0, 3)),
        (t,),
    ]


@case
def len_of_other():
    items = [1, 2]
    return (lambda x: x * len(items)), [(t,), lambda: items.append(1), (t,)]


@case
def string_state():
    c = types.SimpleNamespace(mode="a")
    return (lambda x: {"a": x * 2, "b": x * 3}[c.mode]), [(t,), lambda: setattr(c, "mode", "b"), (t,)]


@case
def builtin_shadow():
    g = {"torch": torch}
    exec("def f(x): return x * len('ab')", g)
    return g["f"], [(t,), lambda: g.__setitem__("len", lambda s: 9), (t,)]


@case
def grad_of_global_req():
    w = torch.ones(3)
    return (lambda x: x * w), [(t,), lambda: w.requires_grad_(), (t,)]


@case
def torch_flag():
    return (lambda x: x * (2 if torch.backends.mkldnn.enabled else 3)), [(t,)]


@case
def num_threads():
    return (lambda x: x * torch.get_num_threads()), [
        (t,),
        lambda: torch.set_num_threads(2),
        (t,),
        lambda: torch.set_num_threads(1),
        (t,),
    ]


@case
def default_dtype_read():
    return (lambda x: x * (2 if torch.get_default_dtype() == torch.float32 else 3)), [
        (t,),
        lambda: torch.set_default_dtype(torch.float64),
        (t,),
        lambda: torch.set_default_dtype(torch.float32),
        (t,),
    ]


def _module(**names):
    module = types.ModuleType("made by the program")
    module.__dict__.update(names)
    return module


settings = _module()


@case
def one_module_named_in_two_functions():
    settings.a, settings.b = 1.0, 2.0

    def inner(x):
        return x * settings.b

    return (lambda x: inner(x) + settings.a), [
        (t,),
        lambda: setattr(settings, "b", 5.0),
        (t,),
        lambda: setattr(settings, "a", 7.0),
        (t,),
    ]


@case
def module_in_a_cell():
    m = _module(k=2.0, g=lambda x: x + 1)
    return (lambda x: m.g(x) * m.k), [
        (t,),
        lambda: setattr(m, "k", 3.0),
        (t,),
        lambda: setattr(m, "g", lambda x: x - 1),
        (t,),
        lambda: delattr(m, "k"),
        (t,),
    ]


@case
def module_in_an_object():
    box = types.SimpleNamespace(m=[_module(k=2.0, inner=_module(k=3.0))])

    def inner(x):
        return x + box.m[0].inner.k

    return (lambda x: inner(x) * box.m[0].k), [
        (t,),
        lambda: setattr(box.m[0].inner, "k", 5.0),
        (t,),
        lambda: setattr(box.m[0], "k", 7.0),
        (t,),
    ]


@case
def attributes_made_on_demand():
    class Box:
        def __getattr__(self, name):
            return {"k": k}[name]  # KeyError for any other name

    k = 2.0
    box = Box()

    def change():
        nonlocal k
        k = 3.0

    return (lambda x: x * box.k), [(t,), change, (t,)]


# state of a program in a namespace of its own: how it begins, the body of f, what changes between the calls
BETWEEN = {
    "library_function": ("act = F.relu", "return act(x - 2)", "act = F.silu", "act = torch.sin"),
    "library_class": ("A = nn.ReLU", "return A()(x - 2)", "A = nn.SiLU"),
    "builtin_class": ("A = float", "return x * A(2.5)", "A = int", "A = lambda v: v + 9.0"),
    "library_module": ("M = math", "return x * float(M.sqrt(4))", "M = np", "M = types.SimpleNamespace(sqrt=lambda v: v)"),
    "exception_class": ("E = ValueError", "try:\n  raise KeyError\nexcept E: return x\nexcept LookupError: return -x", "E = KeyError"),
    "checked_class": ("A = list", "return x * 2 if isinstance([], A) else x", "A = dict", "A = (dict, list)"),
    "context_class": ("A = torch.no_grad", "with A(): return x.requires_grad_() * 2", "A = torch.enable_grad"),
    "class_in_an_attribute": ("c = types.SimpleNamespace(A=nn.ReLU)", "return c.A()(x - 2)", "c.A = nn.SiLU"),
    "class_in_a_class": ("class C: A = float", "return x * C.A(2.5)", "C.A = int"),
    "class_in_a_list": ("c = [nn.ReLU]", "return c[0]()(x - 2)", "c[0] = nn.SiLU"),
    "module_in_a_list": ("c = [torch, F]", "for m in c: x = m.relu(x) + 1\nreturn x", "c.pop()", "c[0] = np"),
    "class_as_default": ("def h(x, A=float): return x * A(2.5)", "return h(x)", "h.__defaults__ = (int,)"),
    "class_in_a_module": (
        "class M(nn.Module):\n  def forward(self, x): return self.act(x - 2) * self.A(2.5)\nm = M(); m.act, m.A = F.relu, float",
        "return m(x)", "m.act = F.silu", "m.A = int",
    ),
    "weak_values": (
        "class A: k = 2.0\na = A(); w = weakref.WeakValueDictionary(a=a)",
        "v = w.get('a')\nreturn -x if v is None else x * v.k", "a.k = 5.0", "del a",
    ),
    "weak_keys": (
        "class A: pass\na, b = A(), A(); w = weakref.WeakKeyDictionary({a: 2.0, b: 3.0})",
        "for v in w.values(): x = x * v\nreturn x", "w[a] = 5.0", "del b",
    ),
    "event": ("e = threading.Event()", "return x * 2 if e.is_set() else x", "e.set()", "e.clear()"),
    "event_that_is_set": ("e = threading.Event()", "r = x * 2 if e.is_set() else x\ne.set()\nreturn r", "pass", "e.clear()"),
    "lock": ("e = threading.Lock()", "return x * 2 if e.locked() else x", "e.acquire()", "e.release()"),
    "semaphore": ("e = threading.Semaphore(3)", "with e: return x * e._value", "e.acquire()"),
    "queue": ("q = queue.Queue(); [q.put(float(k)) for k in range(4)]", "return x * q.get_nowait()", "pass"),
    "size_of_a_queue": ("q = queue.Queue()", "return x * q.qsize()", "q.put(1)"),
    "future": ("q = concurrent.futures.Future()", "return x * q.result() if q.done() else x", "q.set_result(3.0)"),
    "null_context": ("q = contextlib.nullcontext(2.0)", "with q as k: return x * k", "q.enter_result = 5.0"),
    "bound_arguments": ("q = inspect.signature(lambda a: 0).bind(1.0)", "return x * q.arguments['a']", "q.arguments['a'] = 4.0"),
    "number_of_ctypes": ("q = ctypes.c_double(2.0)", "return x * q.value", "q.value = 3.0"),
    "structure_of_ctypes": ("class P(ctypes.Structure): _fields_ = [('a', ctypes.c_int)]\nq = P(2)", "return x * q.a", "q.a = 7"),
    "mapped_memory": ("q = mmap.mmap(-1, 8)", "return x * q[0]", "q[0] = 5"),
    "name_of_the_thread": ("threading.current_thread().name = 'b'", "return x * len(threading.current_thread().name)", "threading.current_thread().name = 'abc'"),
    "path": ("", "return x * 2 if os.path.exists('..') else x", "pass"),
    "collector": ("", "return x * 2 if gc.isenabled() else x", "gc.disable()", "gc.enable()"),
    "seed": ("", "return x * torch.initial_seed()", "torch.manual_seed(7)"),
    "listed_names": ("class A: pass\na = A()", "return x * len([n for n in dir(a) if n[0] == 'k'])", "A.k = 1"),
    "subclasses": ("class A: pass", "return x * len(A.__subclasses__())", "class B(A): pass"),
    "registered_class": (
        "class A(abc.ABC): pass\nclass B: pass\nb = B()", "return x * 2 if isinstance(b, A) else x", "A.register(B)",
    ),
    "view_of_a_dictionary": ("d = {'a': 2.0}; v = d.values()", "for k in v: x = x * k\nreturn x", "d['a'] = 5.0", "d['b'] = 7.0"),
    "value_of_a_member": ("class E(enum.Enum): A = [1.0]", "return x * E.A.value[0]", "E.A.value[0] = 5.0"),
    "attribute_of_a_member": ("class E(enum.Enum): A = 1\nE.A.k = 2.0", "return x * E.A.k", "E.A.k = 5.0"),
    "variable_of_a_context": ("v = contextvars.ContextVar('v', default=1.0)", "v.set(v.get() + 1)\nreturn x * v.get()", "v.set(9.0)"),
    "computed_global": ("K = 2.0; n = 'K'", "return x * globals()[n]", "K = 3.0", "L = 5.0; n = 'L'", "L = 6.0"),
    "computed_module": ("n = 'computedmod'", "return x * importlib.import_module(n).K", "sys.modules[n].K = 3.0"),
    "computed_member": ("import computedmod as m; i = 0", "return x * getattr(m, 'k' + str(i))", "m.k0 = 5.0", "i = 1", "m.k1 = 7.0", "m.k0 = 1.0"),
    "member_in_a_variable": ("import computedmod as m; n = 'k0'", "q = n\nreturn x * getattr(m, q)", "m.k0 = 5.0"),
    "computed_member_of_a_dictionary": ("import computedmod as m; i = 0", "return x * m.__dict__['k' + str(i)]", "m.k0 = 5.0"),
    "computed_member_of_variables": ("import computedmod as m; i = 0", "return x * vars(m)['k' + str(i)]", "m.k0 = 5.0"),
    "computed_tensor": ("import computedmod as m; i = 0; m.k0 = torch.ones(2)", "return x * getattr(m, f'k{i}')", "m.k0 = torch.zeros(2)", "m.k0 += 3"),
    "computed_member_set": ("import computedmod as m; i = 0", "setattr(m, f'k{i}', 4.0)\nreturn x * 2", "m.k0 = 1.0"),
    "computed_member_of_a_class": ("class A: k0 = 1.0\na = A(); i = 0", "return x * getattr(a, 'k' + str(i))", "A.k0 = 5.0", "a.k0 = 6.0"),
    "truth_of_an_object": ("class A:\n  def __len__(s): return 1\na = A()", "return x * 2 if a else x", "A.__bool__ = lambda s: False", "del A.__bool__"),
    "truth_of_a_class": ("class M(type): pass\nclass A(metaclass=M): pass", "return x * 2 if A else x", "M.__bool__ = lambda c: False"),
    "iteration": (
        "class A:\n  def __getitem__(s, i): return [2.0][i]\na = A()", "for v in a: x = x * v\nreturn x",
        "A.__iter__ = lambda s: iter([5.0, 6.0])",
    ),
    "operator_of_a_base": ("class A: pass\nclass B(A): pass\nb = B()", "return x * 2 if b == 1 else x", "A.__eq__ = lambda s, o: True"),
    "name_absent_from_a_class": ("class A: pass\nclass B(A): pass\nb = B()", "return x * getattr(b, 'k', 2.0)", "A.k = 5.0", "b.k = 3.0", "del A.k", "del b.k"),
    "name_of_a_metaclass_hidden": ("class M(type): k = 2.0\nclass A(metaclass=M): pass", "return x * A.k", "A.k = 5.0", "del A.k", "M.k = 9.0"),
    "parameter_hidden_by_its_class": ("class A(nn.Linear): pass\na = A(2, 2, False)", "return a(x)", "A.weight = torch.ones(3, 2)", "del A.weight"),
    "weak_set": ("class A: pass\na = A(); a.k = [2.0]; w = weakref.WeakSet([a])", "for v in w: x = x * v.k[0]\nreturn x", "a.k[0] = 9.0", "a.k = [4.0]", "w.discard(a)"),
    "weak_dictionary_of_keys": ("class A: pass\na = A(); a.k = 2.0; w = weakref.WeakKeyDictionary({a: 3.0})", "for v in w: x = x * v.k * w[v]\nreturn x", "a.k = 9.0", "w[a] = 5.0"),
    "set_of_methods": ("class A:\n  k = 2.0\n  def f(s, x): return x * s.k\na = A(); w = {a.f}", "for v in w: x = v(x)\nreturn x", "a.k = 9.0", "del a.k", "A.k = 3.0"),
    "set_of_classes": ("class A: k = 2.0\nw = {A}", "for v in w: x = x * v.k\nreturn x", "A.k = 9.0"),
    "set_of_modules": ("m = nn.Linear(2, 2); w = {m}", "for v in w: x = v(x)\nreturn x", "m.weight.data.mul_(3)", "m.bias = None"),
    "set_of_tensors": ("t = torch.ones(2); w = {t}", "for v in w: x = x * v\nreturn x", "t.mul_(3)", "w.add(torch.zeros(2))"),
    "keys_that_hold_state": ("class A: pass\na = A(); a.k = [2.0]; w = {(1, A): 1.0, a: 2.0}", "for v in w: x = x * (v.k[0] if v is a else v[1].z)\nreturn x", "A.z = 4.0", "a.k[0] = 3.0", "A.z = 5.0"),
    "order_of_a_set": ("w = {0, 8}", "for v in w: x = x * 2 + v\nreturn x", "w = {8, 0}", "w = frozenset(w)"),
    "subclass_of_set": ("class A(set): pass\nw = A([1.0]); w.k = 2.0", "for v in w: x = x * v * w.k\nreturn x", "w.k = 3.0", "w.add(4.0)"),
    "getattr_of_a_module": ("import computedmod as m; m.__getattr__ = lambda n: 2.0", "return x * m.k", "m.k = 5.0", "del m.k", "m.__getattr__ = lambda n: 7.0"),
    "name_absent_from_a_module": ("import computedmod as m", "return x * getattr(m, 'k', 2.0)", "m.k = 5.0", "del m.k"),
    "handled_name_of_a_module": ("import computedmod as m", "try: return x * m.k\nexcept AttributeError: return x", "m.__getattr__ = lambda n: 5.0", "m.k = 7.0"),
    "builtin_of_the_program": ("import builtins; builtins.own_k = 2.0; builtins.own_f = lambda x: x + 1", "return own_f(x) * own_k", "builtins.own_k = 3.0", "builtins.own_f = lambda x: x - 1", "del builtins.own_k", "del builtins.own_f"),
    "method_put_on_tensors": ("torch.Tensor.own = lambda s: s * 2", "return x.own()", "torch.Tensor.own = lambda s: s * 5", "del torch.Tensor.own"),
    "property_put_on_tensors": ("torch.Tensor.own = property(lambda s: 2.0)", "return x * x.own", "torch.Tensor.own = property(lambda s: 3.0)", "torch.Tensor.own = 5.0", "del torch.Tensor.own"),
    "class_method_put_on_modules": ("nn.Module.own = classmethod(lambda c: 2.0); m = nn.ReLU()", "return m(x) * m.own()", "nn.Module.own = classmethod(lambda c: 3.0)", "del nn.Module.own"),
    "function_put_in_a_library": ("torch.nn.functional.own = lambda x: x * 2", "return torch.nn.functional.own(x) + F.own(x)", "F.own = lambda x: x * 3", "del F.own"),
    "precision_of_decimals": ("D = decimal.Decimal", "return x * float(D(1) / D(3))", "decimal.getcontext().prec = 3", "decimal.getcontext().prec = 28"),
    "rounding_of_decimals": ("d = decimal.Decimal('1.25')", "return x * float(round(d, 1))", "decimal.getcontext().rounding = decimal.ROUND_UP", "decimal.getcontext().rounding = decimal.ROUND_HALF_EVEN"),
    "context_of_decimals": ("", "return x * decimal.getcontext().prec", "decimal.getcontext().prec = 3", "decimal.getcontext().prec = 28"),
    "errors_of_numpy": ("", "return x * (np.geterr()['over'] == 'warn')", "np.seterr(over='ignore')", "np.seterr(over='warn')"),
    "dtype_of_autocast": ("", "with torch.autocast('cpu'): y = x[:, None] @ x[None]\nreturn y, torch.get_autocast_dtype('cpu')", "torch.set_autocast_dtype('cpu', torch.float16)", "torch.set_autocast_dtype('cpu', torch.bfloat16)"),
    "finalizer": ("class A: pass\na = A(); q = weakref.finalize(a, print)", "return x * 2 if q.alive else x", "q.detach()"),
    "replaced_module": (
        "", "import computedmod\nreturn x * computedmod.K",
        "sys.modules['computedmod'] = types.SimpleNamespace(K=7.0)", "sys.modules['computedmod'].K = 8.0",
    ),
}  # fmt: skip
_IMPORTS = """
import abc, concurrent.futures, contextlib, contextvars, ctypes, decimal, enum, gc, importlib, inspect, math, mmap, os
import queue, sys, threading, types, weakref
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
sys.modules["computedmod"] = types.ModuleType("computedmod")
sys.modules["computedmod"].K, sys.modules["computedmod"].k0, sys.modules["computedmod"].k1 = 2.0, 3.0, 4.0
"""


@pytest.mark.parametrize("name", BETWEEN)
def test_what_changes_between_two_calls(name):
    begin, body, *changes = BETWEEN[name]

    def make():
        space = types.ModuleType("program").__dict__
        exec(f"{_IMPORTS}{begin}\ndef f(x):\n" + "\n".join("  " + line for line in body.splitlines()), space)
        steps = [(torch.tensor([1.0, 3.0]),), (torch.tensor([1.0, 3.0]),)]
        for change in changes:
            steps += [lambda change=change: exec(change, space), (torch.tensor([1.0, 3.0]),)]
        return space["f"], steps

    thread, before = threading.current_thread(), threading.current_thread().name
    try:
        check(make)
    finally:
        thread.name = before
        gc.enable()
        sys.modules.pop("computedmod", None)


@case
def methods_as_arguments():
    class A:
        def __init__(self):
            self.k, self.items = 2.0, [1.0]

        def f(self, x):
            return x * self.k + self.items[0]

    a, b = A(), A()
    steps = [(t, a.f), (t, a.f), lambda: setattr(a, "k", 5.0), (t, a.f), lambda: a.items.append(1.0)]
    steps += [lambda: a.items.insert(0, 3.0), (t, a.f), (t, b.f), lambda: setattr(b, "k", 4.0), (t, b.f)]
    steps += [(t, [b.f]), lambda: setattr(b, "k", 6.0), (t, [b.f]), (t, {b.f}), lambda: setattr(b, "k", 7.0), (t, {b.f})]
    return (lambda x, m: m(x) if callable(m) else [q(x) for q in m]), steps


@case
def sets_as_arguments():
    class A:
        k = 2.0

    class Own(set):
        pass

    def f(x, s):
        for v in s:
            x = x * 2 + (v if type(v) is int else v().k if isinstance(v, weakref.ref) else v.k)
        return x

    a, own = A(), Own([1])
    steps = [(t, {0, 8}), (t, {8, 0}), (t, {a}), lambda: setattr(A, "k", 3.0), (t, {a}), (t, {weakref.ref(a)})]
    steps += [lambda: setattr(a, "k", 4.0), (t, {weakref.ref(a)}), (t, {a}), (t, own), lambda: own.add(5), (t, own)]
    return f, steps


@case
def a_module_in_a_closure_that_answers_for_what_it_lacks():
    m, z = types.ModuleType("lacking"), {"k": 2.0}
    m.__getattr__ = lambda name: z[name]
    return (lambda x: x * m.k), [(t,), lambda: z.update(k=4.0), (t,), lambda: setattr(m, "k", 9.0), (t,), lambda: delattr(m, "k"), (t,)]


@case
def attributes_that_a_tensor_lacks():
    a, b = torch.ones(3), torch.ones(3)

    def f(x):
        return x * getattr(x, "scale", 2.0) + (b if hasattr(b, "shift") else 0)

    steps = [(a,), lambda: setattr(a, "scale", 3.0), (a,), (t,), lambda: setattr(b, "shift", 1), (a,), lambda: delattr(b, "shift"), (t,)]
    return f, steps


@case
def views_of_dictionaries_as_arguments():
    d = {"a": 2.0}
    values = d.values()
    return (lambda x, s: [x * v for v in s]), [(t, values), lambda: d.update(a=3.0), (t, values), lambda: d.update(b=4.0), (t, values)]


@pytest.mark.parametrize("name", CASES[__name__])
def test_state(name):
    check(CASES[__name__][name])
