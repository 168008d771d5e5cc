# ruff: noqa: B006, RUF012  (mutable defaults and class attributes are what is tested)
"""Effects of a function on Python objects, files and generators: as often, and in the order, as in eager."""

import contextvars
import os
import sys
import tempfile
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .sequences import CASES, T, case, check

t = torch.ones(3)
n = -torch.ones(3)
FILE = os.path.join(tempfile.gettempdir(), f"tensorplay-effects-{os.getpid()}")


@case
def append():
    log = []

    def f(x):
        log.append(1)
        return x * 2

    return f, [(t,), (t,), (t,)], lambda: list(log)


@case
def counter():
    d = {"n": 0}

    def f(x):
        d["n"] += 1
        return x * d["n"]

    return f, [(t,), (t,), (t,)], lambda: dict(d)


@case
def attr_write():
    m = nn.Linear(3, 3)

    def f(x):
        m.calls = getattr(m, "calls", 0) + 1
        return x * m.calls

    return f, [(t,), (t,)], lambda: m.calls


@case
def attr_write_const():
    c = types.SimpleNamespace(k=0)

    def f(x):
        c.k = x.shape[0]
        return x * 2

    return f, [(t,), (torch.ones(5),), (t,), lambda: setattr(c, "k", 99), (t,)], lambda: c.k


@case
def class_write():
    class C:
        n = 0

    def f(x):
        C.n += 1
        return x * C.n

    return f, [(t,), (t,), (t,)], lambda: C.n


@case
def class_list():
    class C:
        items = []

    def f(x):
        C.items.append(1)
        return x * len(C.items)

    return f, [(t,), (t,), (t,)], lambda: len(C.items)


@case
def func_attr():
    def g():
        pass

    g.n = 0

    def f(x):
        g.n += 1
        return x * g.n

    return f, [(t,), (t,), (t,)], lambda: g.n


@case
def self_func_attr():
    def f(x):
        f.n += 1
        return x * f.n

    f.n = 0
    return f, [(t,), (t,), (t,)], lambda: f.n


@case
def global_write():
    g = {"torch": torch, "N": 0}
    exec("def f(x):\n global N\n N += 1\n return x * N", g)
    return g["f"], [(t,), (t,), (t,)], lambda: g["N"]


@case
def global_new():
    g = {"torch": torch}
    exec("def f(x):\n global NEW\n NEW = 3\n return x * 2", g)
    return g["f"], [(t,), lambda: g.pop("NEW", 0), (t,)], lambda: g.get("NEW")


@case
def nonlocal_write():
    n = 0

    def f(x):
        nonlocal n
        n += 1
        return x * n

    return f, [(t,), (t,), (t,)], lambda: n


@case
def no_grad_decorated_state():
    k = types.SimpleNamespace(v=2.0)
    z = 2.0

    @torch.no_grad()
    def g(x):
        return x * k.v * z

    def setz():
        nonlocal z
        z = 9.0

    return g, [(t,), lambda: setattr(k, "v", 5.0), (t,), setz, (t,)]


@case
def no_grad_decorated_effect():
    log = []

    @torch.no_grad()
    def g(x):
        log.append(1)
        return x * 2

    return g, [(t,), (t,)], lambda: len(log)


@case
def no_grad_inner_effect():
    log = []

    @torch.no_grad()
    def g(x):
        log.append(1)
        return x * 2

    return (lambda x: g(x) + 1), [(t,), (t,)], lambda: len(log)


@case
def default_acc():
    def f(x, acc=[]):
        acc.append(1)
        return x * len(acc)

    return f, [(t,), (t,), (t,)], lambda: len(f.__defaults__[0])


@case
def contextvar_set():
    v = contextvars.ContextVar("v", default=0)

    def f(x):
        v.set(v.get() + 1)
        return x * v.get()

    return f, [lambda: v.set(0), (t,), (t,), (t,)], lambda: v.get()


@case
def contextvar_pair():
    v = contextvars.ContextVar("v", default=0)

    def f(x):
        tok = v.set(5)
        try:
            return x * v.get()
        finally:
            v.reset(tok)

    return f, [(t,), (t,)], lambda: v.get()


@case
def set_reset_attr():
    c = types.SimpleNamespace(k=1)

    def f(x):
        old = c.k
        c.k = 7
        try:
            return x * c.k
        finally:
            c.k = old

    return f, [(t,), (t,)], lambda: c.k


@case
def store_tensor():
    c = types.SimpleNamespace(last=None)

    def f(x):
        c.last = x * 2
        return x + 1

    return f, [(t,), (n,)], lambda: c.last.clone()


@case
def store_arg():
    c = types.SimpleNamespace(last=None)

    def f(x):
        c.last = x
        return x + 1

    return f, [(t,), (n,), (t,)], lambda: c.last.clone()


@case
def tensor_attr_write():
    w = torch.ones(3)

    def f(x):
        w.tag = getattr(w, "tag", 0) + 1
        return x * w.tag

    return f, [(t,), (t,)], lambda: w.tag


@case
def arg_attr_write():
    a = torch.ones(3)

    def f(x):
        x.tag = getattr(x, "tag", 0) + 1
        return x * x.tag

    return f, [(a,), (a,)], lambda: a.tag


@case
def cache_dict():
    cache = {}

    def f(x):
        if "w" not in cache:
            cache["w"] = torch.ones(3) * 4
        return x * cache["w"]

    return (
        f,
        [(t,), (t,), lambda: cache.clear(), (t,), lambda: cache.__setitem__("w", torch.ones(3)), (t,)],
        lambda: len(cache),
    )


@case
def prints():
    def f(x):
        print("hello")
        return x * 2

    return f, [(t,), (t,)]


@case
def stdout_write():
    def f(x):
        sys.stdout.write("hello\n")
        return x * 2

    return f, [(t,), (t,)]


@case
def logs():
    import logging

    rec = []

    class H(logging.Handler):
        def emit(self, r):
            rec.append(r.getMessage())

    lg = logging.getLogger("p2logs")
    lg.handlers[:] = [H()]
    lg.setLevel(10)

    def f(x):
        lg.info("hi")
        return x * 2

    return f, [(t,), (t,)], lambda: len(rec)


@case
def opens():
    open(FILE, "w").close()

    def f(x):
        with open(FILE, "a") as h:
            h.write("z")
        return x * 2

    return f, [(t,), (t,)], lambda: open(FILE).read()


@case
def env_set():
    os.environ["TPY"] = "0"

    def f(x):
        os.environ["TPY"] = str(int(os.environ["TPY"]) + 1)
        return x * 2

    return f, [(t,), (t,)], lambda: os.environ["TPY"]


@case
def gen_send():
    def g():
        s = 0
        while True:
            s += (yield s) or 1

    c = g()
    next(c)
    return (lambda x: x * c.send(2)), [(t,), (t,)]


@case
def exc_after_effect():
    log = []

    def f(x):
        log.append(1)
        if x.sum() > 0:
            raise ValueError("bad")
        return x

    return f, [(t,), (n,), (t,)], lambda: len(log)


@case
def exc_after_inplace():
    a = torch.ones(3)

    def f(x):
        x.add_(1)
        if x.sum() > 7:
            raise ValueError(f"bad {x.shape[0]}")
        return x * 2

    return f, [(a,), (a,), (a,)], lambda: a.clone()


@case
def exc_custom():
    class E(Exception):
        pass

    def f(x):
        if x.sum() > 0:
            raise E("no", 3)
        return x

    return f, [(t,), (n,), (t,)]


@case
def exc_control():
    def f(x):
        try:
            if x.sum() > 0:
                raise KeyError("k")
            return x * 2
        except KeyError:
            return x * 3

    return f, [(t,), (n,), (t,)]


@case
def exc_op():
    def f(x):
        try:
            return x @ torch.ones(5)
        except RuntimeError as e:
            return x * len(str(e)[:4])

    return f, [(t,), (t,)]


@case
def stop_iter():
    def f(x):
        it = iter([1.0, 2.0])
        while True:
            try:
                x = x * next(it)
            except StopIteration:
                return x

    return f, [(t,), (t,)]


@case
def generators_inside():
    def g(x):
        for k in range(3):
            yield x * k

    return (lambda x: sum(g(x))), [(t,), (n,)]


@case
def kwargs_star():
    def f(*a, k=2, **kw):
        return sum(a) * k + kw.get("z", 0)

    return (lambda x: f(x, x, k=3, z=x)), [(t,), (n,)]


@case
def rng_inside_branch():
    return (lambda x: x * 2 if torch.rand(()) < 0.5 else x), [(t,), (t,), (t,)]


@case
def dropout_seq():
    return (lambda x: F.dropout(x, 0.5) + torch.randn(3)), [(t,), (t,)]


@case
def np_convert():
    return (lambda x: torch.from_numpy(x.numpy() * 2)), [(t,), (n,)]


@case
def np_func():
    return (lambda x: x * float(np.sum(x.numpy()))), [(t,), (n,)]


@case
def np_on_tensor():
    return (lambda x: np.sum(x)), [(t,), (n,)]


@case
def np_times():
    return (lambda x: np.float32(2) * x), [(t,), (n,)]


@case
def np_array_of():
    return (lambda x: torch.tensor(np.array(x))), [(t,), (n,)]


@case
def np_asarray_arg():
    return (lambda x, a: x + torch.from_numpy(a)), [(t, np.ones(3, np.float32)), (t, np.zeros(3, np.float32))]


@case
def views_of_one_base_that_come_to_require_grad():
    w, base = torch.tensor([1.0, 2.0], requires_grad=True), [torch.ones(4) for _ in range(3)]

    def f(a, b):
        a.copy_(w)
        return b * (3 if b.requires_grad else 5), b

    return f, [(T(1, 2), T(3, 4)), (base[0][:2], base[0][2:]), (T(1, 2), base[1][2:]), (base[1][:2], T(3, 4)), (base[2][:2], base[2][:2])]


@pytest.mark.parametrize("name", CASES[__name__])
def test_effects(name):
    check(CASES[__name__][name])
