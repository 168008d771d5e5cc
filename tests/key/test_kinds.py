"""Calls of every kind are served without Python, and what changes in an argument is seen there."""

import collections
import dataclasses
import random
import threading

import pytest
import torch
from torch import nn

import tensorplay as tp
from tensorplay.compiled import compiled_of
from tensorplay.native import native
from tensorplay.testing import REASONS, C, eq

pytestmark = pytest.mark.skipif(native is None, reason="the extension is not built")
Pair = collections.namedtuple("Pair", "x w")
x, w, y, z = torch.ones(2, 3), torch.full((2, 3), 2.0), torch.full((2, 3), 3.0), torch.full((2, 3), 4.0)


@dataclasses.dataclass
class Box:
    x: torch.Tensor
    w: torch.Tensor
    k: float = 1.0


class Config:
    def __init__(self, **options):
        self.__dict__.update(options)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.k = nn.Parameter(torch.ones(3)), 1.0

    def forward(self, x, scale=1.0):
        return x * self.weight * self.k + scale


def natively(cf):
    return sum(v.check.hits for v in compiled_of(cf).versions if v.check is not None)


CALLS = {
    "keywords": (lambda x, w: x + w, (), {"w": w, "x": x}), "both": (lambda x, *, w, k: x + w * k, (x,), {"w": w, "k": 2.0}),
    "dict": (lambda d: d["x"] + d["w"], ({"x": x, "w": w, "n": None},), {}), "list": (lambda p: p[0] + p[1][0] * p[1][1], ([x, (w, 3)],), {}),
    "named tuple": (lambda p: p.x + p.w, (Pair(x, w),), {}), "deep": (lambda p: p[0][0][0]["a"][0] + 1, ([[[{"a": (x,)}]]],), {}), "empty": (lambda x, a, d: x + len(a) + len(d), (x, [], {}), {}),
    "dataclass": (lambda b: b.x * b.k + b.w, (Box(x, w),), {}), "object": (lambda x, c: x * c.k + c.more["a"], (x, Config(k=2, more={"a": 1.0})), {}),
    "objects in a list": (lambda p: p[0].x + p[1].w, ([Box(x, w), Box(y, z)],), {}), "function": (lambda x, f: f(x), (x, torch.relu), {}), "type": (lambda x, t: x + (t is int), (x, int), {}),
    "dtype": (lambda x, dtype: x.to(dtype), (x,), {"dtype": torch.float64}), "default dict key": (lambda d: d[1] + d[None], ({1: x, None: w},), {}),
    "module": (Net(), (x,), {"scale": 2.0}), "many": (lambda **k: sum(k.values()), (), {c: x.clone() for c in "abcdefghijkl"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("state", [torch.no_grad, torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.device("cpu")], ids=["no_grad", "grad", "autocast", "device"])
def test_a_call_of_every_kind_is_served_without_python(name, state):
    f, args, kwargs = CALLS[name]
    cf = tp.compile(f, backend="eager")
    with state():
        for k in range(4):
            got, want = cf(*args, **kwargs), f(*args, **kwargs)
            assert eq(got, want) and got.requires_grad == want.requires_grad and natively(cf) == k
    assert C(cf) == 1


def test_a_training_region_is_served_without_python():
    net = Net()
    cf = tp.compile(net)
    for k in range(4):
        net.zero_grad()
        out = cf(x, scale=3.0)
        out.sum().backward()
        assert eq(out, net(x, scale=3.0)) and eq(net.weight.grad, torch.full((3,), 2.0)) and natively(cf) == k


@pytest.mark.filterwarnings("ignore::tensorplay.FallbackWarning")
def test_a_version_that_runs_eagerly_is_found_without_python_and_counted():
    log = []

    def effects(t, k=1):
        log.append(k)
        return t * k

    cf = tp.compile(effects)
    for k in range(5):
        assert eq(cf(x, k=2), 2 * x) and log == [2] * (k + 1) and natively(cf) == k
        assert tp.explain(cf).counters["eager calls"] == k + 1
    assert eq(cf(x, k=3), 3 * x) and log[-1] == 3  # another key

    def refuses(graph, inputs, **options):
        raise NotImplementedError("nothing")

    cf = tp.compile(lambda t: (t + 1, [t * 2]), backend=refuses)
    for k in range(4):
        assert eq(cf(x), (x + 1, [x * 2])) and natively(cf) == k and tp.explain(cf).counters["eager calls"] == k + 1

    def raises(t):
        log.append(1)
        raise KeyError("mine")

    cf = tp.compile(raises)
    for _ in range(3):
        with pytest.raises(KeyError, match="mine"):
            cf(x)


@pytest.mark.filterwarnings("ignore::tensorplay.FallbackWarning")
def test_at_the_limit_calls_run_eagerly_until_a_version_dies():
    class Key:
        pass

    cf, keys = tp.compile(lambda t, key: t + (key is not None), backend="eager", recompile_limit=2), [Key(), Key()]
    for key in keys:
        assert eq(cf(x, key), x + 1)
    for n in range(3):
        assert eq(cf(torch.ones(n), None), torch.ones(n)) and C(cf) == 2
    assert tp.explain(cf).counters["eager calls"] == 3
    del keys[0], key
    assert eq(cf(torch.ones(5), None), torch.ones(5)) and C(cf) == 3
    assert eq(cf(torch.ones(5), None), torch.ones(5)) and natively(cf) >= 1


def test_a_call_that_raises_writes_no_recompile_log():
    def f(t, k):
        return t * k.missing if k else t + 1

    cf = tp.compile(f, backend="eager")
    cf(x, 0)
    for _ in range(3):
        with pytest.raises(AttributeError, match="missing"):
            cf(x, 1)
    assert not tp.explain(cf).log and REASONS(cf)
    cf(torch.ones(3), 0)
    assert len(tp.explain(cf).log) == 1


def change(argument, r):
    """Changes something inside of an argument."""
    box, items, table, config = argument
    r.choice([
        lambda: setattr(box, "k", r.choice([1.0, 2.0])), lambda: setattr(box, "x", r.choice([x, w, x.double()])), lambda: box.__dict__.update(extra=1),
        lambda: box.__dict__.pop("extra", None), lambda: setattr(box, "__class__", r.choice([Box, Other])), lambda: items.append(1), lambda: items.pop() if len(items) > 1 else None,
        lambda: items.__setitem__(0, r.choice([y, y.t(), z])), lambda: table.__setitem__("n", r.choice([0.0, -0.0, 1, True])), lambda: table.update(m=1), lambda: table.pop("m", None),
        lambda: table.update(n=table.pop("n")), lambda: setattr(config, "inner", r.choice([[3], {}, None])), lambda: setattr(config, "k", r.choice([1, 2])),
        lambda: config.__dict__.update(k=config.__dict__.pop("k")), lambda: setattr(config, "__dict__", dict(config.__dict__)),
    ])()  # fmt: skip


class Other(Box):
    pass


@pytest.mark.parametrize("seed", range(3))
def test_what_changes_inside_of_an_argument_is_seen(seed):
    def f(box, items, table, config):
        found = box.x * box.k + items[0].sum() * len(items) + table["n"] * config.k
        return found / table["n"] + (2 if type(box) is Other else 0) + hasattr(box, "extra") + (config.inner is None) + [*table].index("n")

    r, argument = random.Random(seed), (Box(x, w), [y], {"n": 1, "o": 2}, Config(k=1, inner=None))
    cf = tp.compile(f, backend="eager", recompile_limit=1000)
    for _ in range(150):
        if r.random() < 0.3:
            change(argument, r)
        assert eq(cf(*argument), f(*argument))
    assert natively(cf) > 30 and C(cf) > 15


def test_the_same_object_twice_is_a_class_of_its_own():
    def f(a, b):
        return (a[0] + b[0]) * (2 if a is b else 1)

    one, other, cf = [x], [w], tp.compile(f, backend="eager")
    for a, b in ((one, other), (one, one), (one, [w]), (other, other)) * 2:
        assert eq(cf(a, b), f(a, b))
    with_same_tensor = tp.compile(lambda a, b: a[0] + b[0] * (3 if a[0] is b[0] else 1), backend="eager")
    for a, b in (([x], [w]), ([x], [x]), ([w], [x])) * 2:
        assert eq(with_same_tensor(a, b), a[0] + b[0] * (3 if a[0] is b[0] else 1))


@pytest.mark.filterwarnings("ignore::tensorplay.FallbackWarning")
def test_threads_call_while_others_change_the_module():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(Net() for _ in range(8))

        def forward(self, x):
            return sum(part(x) for part in self.parts)

    model, errors, stop = Sum(), [], threading.Event()
    cf = tp.compile(model, backend="eager", recompile_limit=1000)
    possible = {float(3 * n) for n in range(100)}
    with torch.no_grad():
        cf(x)

    def call():
        try:
            with torch.no_grad():
                for _ in range(400):
                    assert cf(x).sum().item() / 2 in possible
        except BaseException as error:
            errors.append(error)

    def disturb():
        r = random.Random(0)
        changes = [
            lambda part: part.__dict__.update(k=r.choice([1.0, 2.0])), lambda part: setattr(part, "weight", nn.Parameter(torch.ones(3))),
            lambda part: part._buffers.pop("b", None), lambda part: part.train(True),
        ]  # fmt: skip
        while not stop.is_set():
            r.choice(changes)(model.parts[r.randrange(8)])

    callers, other = [threading.Thread(target=call) for _ in range(6)], threading.Thread(target=disturb)
    [t.start() for t in (*callers, other)]
    [t.join() for t in callers]
    stop.set()
    other.join()
    assert not errors, errors[0]
    assert natively(cf) > 0
