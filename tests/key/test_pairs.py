"""Random pairs of calls: a version serves a call exactly where no guard of it fails, in Python and in the extension.

What is drawn: arguments by position and keyword, in containers, shared, aliased, overlapping, of subclasses; modes;
flags, hooks, parametrizations, parameters and attributes of a module; globals, closures, contents of containers.
"""

import collections
import contextlib
import dataclasses
import random

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import tensorplay as tp
from tensorplay.key.version import Call
from tensorplay.testing import eq

Pair = collections.namedtuple("Pair", "a b")
FACTOR = {"k": 1.0}


class Sub(torch.Tensor):
    pass


@dataclasses.dataclass
class Box:
    t: torch.Tensor
    k: float


class Half(nn.Module):
    def forward(self, w):
        return w / 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.ones(2))
        self.p, self.table = 2.0, {"a": 1.0, "b": [2.0]}

    def forward(self, x):
        y = self.inner(x) * self.scale + self.shift * self.p + self.table["b"][0]
        return y if self.training else y - 1


def plus(module, args, out):
    return out + 1


def change(net, r):
    """Changes the module, or puts something back: by every way in which a dictionary can change."""
    inner = net.inner
    r.choice([
        lambda: net.train(r.random() < 0.5), lambda: inner.train(r.random() < 0.5), lambda: setattr(net, "p", r.choice([2.0, 3.0])),
        lambda: net.__dict__.update(p=r.choice([2.0, 3.0])), lambda: net.table.__setitem__("a", r.choice([1.0, 2.0])),
        lambda: net.table["b"].__setitem__(0, r.choice([2.0, 4.0])), lambda: net.table.update(c=1), lambda: net.table.pop("c", None),
        lambda: net.table.setdefault("d", 1), lambda: net.table.popitem() if len(net.table) > 2 else None,
        lambda: inner.register_forward_hook(plus) if len(inner._forward_hooks) < 2 else inner._forward_hooks.clear(),
        lambda: net.register_forward_pre_hook(lambda m, a: None) if not net._forward_pre_hooks else net._forward_pre_hooks.popitem(),
        lambda: setattr(net, "scale", nn.Parameter(torch.full((2,), r.choice([1.0, 2.0])))),
        lambda: net._parameters.__setitem__("scale", nn.Parameter(torch.ones(2))), lambda: net.scale.requires_grad_(r.random() < 0.5),
        lambda: setattr(net.scale, "data", r.choice([torch.ones(1), torch.ones(2), torch.ones(2).double()])),
        lambda: setattr(net, "shift", r.choice([torch.zeros(2), torch.ones(2, 2).t(), torch.ones(1)])), lambda: net.shift.t_(),
        lambda: setattr(net, "extra", 1), lambda: net.__dict__.pop("extra", None), lambda: net.__dict__.__ior__({"p": 2.0}),
        lambda: setattr(net, "__dict__", dict(net.__dict__)), lambda: setattr(net, "inner", nn.Linear(2, 2, bias=False)),
        lambda: net._modules.update(inner=nn.Linear(2, 2, bias=r.random() < 0.5)), lambda: setattr(net, "inner", inner),
        lambda: setattr(inner, "forward", lambda x: x) if "forward" not in inner.__dict__ else inner.__dict__.pop("forward"),
        lambda: net.__dict__.__setitem__("scale", torch.ones(2)) if "scale" not in net.__dict__ else net.__dict__.pop("scale"),
        lambda: parametrize.register_parametrization(inner, "weight", Half()) if not parametrize.is_parametrized(inner) else
        parametrize.remove_parametrizations(inner, "weight"), lambda: torch.utils.swap_tensors(net.scale, nn.Parameter(torch.full((2,), 5.0))),
        lambda: FACTOR.__setitem__("k", r.choice([1.0, 2.0, True])), lambda: FACTOR.update(other=1), lambda: FACTOR.pop("other", None),
    ])()  # fmt: skip


def tensor(r):
    return r.choice([
        lambda: torch.ones(2), lambda: torch.ones(2).double(), lambda: torch.ones(2, 2).t(), lambda: torch.ones(2, requires_grad=True),
        lambda: torch.ones(2, 4)[:, ::2], lambda: torch.ones(2, 1).expand(2, 2), lambda: nn.Parameter(torch.ones(2)), lambda: torch.ones(0, 2),
        lambda: torch.ones(2).as_subclass(Sub), lambda: torch._neg_view(torch.ones(2)),
    ])()  # fmt: skip


def arguments(r):
    """The positional and keyword arguments of a call; few kinds, so that many calls hit."""
    a, b = tensor(r), tensor(r)
    if r.random() < 0.2:
        b = a
    if r.random() < 0.1:
        base = torch.ones(3)
        a, b = base[:2], base[1:]
    shared = [a, 1]
    more = r.choice([
        lambda: 3, lambda: 0.0, lambda: -0.0, lambda: None, lambda: [b, 2], lambda: (b, (2.0, None)), lambda: {"k": b, "n": 1}, lambda: {"n": 1, "k": b},
        lambda: Pair(b, 1), lambda: (shared, shared), lambda: ([a, 1], [a, 1]), lambda: Box(b, 1.0), lambda: "text", lambda: torch.float32, lambda: (),
        lambda: [[], [], ()], lambda: {1: b}, lambda: {True: b}, lambda: (b, b), lambda: plus,
    ])()  # fmt: skip
    kind = r.randrange(4)
    if kind == 0:
        return (a, more), {}
    if kind == 1:
        return (a,), {"more": more}
    return ((a,), {"more": more, "flag": True}) if kind == 2 else ((), {"more": more, "x": a})


def leaves(value):
    found, stack = [], [value]
    while stack:
        v = stack.pop()
        if isinstance(v, (list, tuple)):
            stack.extend(v)
        elif isinstance(v, dict):
            stack.extend(v.values())
        elif isinstance(v, Box):
            stack += [v.t, v.k]
        elif isinstance(v, (torch.Tensor, float, int)) and not isinstance(v, bool):
            found.append(v)
    return found


def modes(r):
    return r.choice([contextlib.nullcontext, contextlib.nullcontext, torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])()


def outcome(f, args, kwargs):
    try:
        return f(*args, **kwargs)
    except (RuntimeError, TypeError) as error:
        return type(error)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.filterwarnings("ignore::tensorplay.FallbackWarning", "ignore::UserWarning")
def test_a_version_serves_a_call_exactly_where_its_guards_hold(seed):
    r = random.Random(seed)
    hits = native = misses = 0
    for _ in range(6):
        net = Net()

        def f(x, more=None, flag=False, net=net):
            y = net(x.float()) * FACTOR["k"]
            for leaf in leaves(more):
                y = y + leaf
            return y * 2 if flag else y

        cf, seeds = tp.compile(f, backend="eager", recompile_limit=1000), [r.random() for _ in range(4)]
        for _ in range(40):
            if r.random() < 0.25:
                with contextlib.suppress(KeyError, AttributeError, RuntimeError):
                    change(net, r)
            args, kwargs = arguments(random.Random(r.choice(seeds)))
            with modes(r):
                known = cf.versions
                call = Call.of(args, kwargs)
                serving = [v.serves(call, args, kwargs) is not None for v in known]
                holding = [not v.failing(call, args, kwargs) for v in known]
                before = [0 if v.check is None else v.check.hits for v in known]
                assert serving == holding and sum(serving) <= 1
                got, want = outcome(cf, args, kwargs), outcome(f, args, kwargs)
                assert got is want if isinstance(want, type) or isinstance(got, type) else eq(got, want) and got.requires_grad == want.requires_grad
                mine = [0 if v.check is None else v.check.hits - n for v, n in zip(known, before)]
                assert all(m == (v.check is not None and s) for m, s, v in zip(mine, serving, known)), (args, kwargs)
            hits, native, misses = hits + any(serving), native + sum(mine), misses + (not any(serving))
    assert hits > 50 and native > 15 and misses > 60
