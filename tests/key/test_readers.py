"""The extension's two ways of reading a tensor, and what it remembers of dictionaries."""

import contextlib
import itertools
import random

import pytest
import torch
from torch import nn

import tensorplay as tp
from tensorplay import native as loader
from tensorplay.compiled import compiled_of
from tensorplay.native import agrees, native, samples
from tensorplay.testing import C, eq

from .test_native import tensors

pytestmark = pytest.mark.skipif(native is None, reason="the extension is not built")


@contextlib.contextmanager
def through_dlpack():
    """Only the reader that needs nothing of torch but DLPack."""
    native.direct((), ())
    try:
        yield
    finally:
        loader._read_directly(native)


def test_this_torch_is_read_directly():
    assert native.facts(torch.ones(2)) is not None and agrees(native.facts, samples())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_both_readers_tell_the_same_tensors_apart():
    kinds = tensors()
    direct = [native.fingerprint(t) for t in kinds]
    with through_dlpack():
        assert native.facts(kinds[0]) is None
        exchanged = [native.fingerprint(t) for t in kinds]
    assert [p is None for p in direct] == [p is None for p in exchanged]
    for (p, a), (q, b) in itertools.combinations(zip(direct, exchanged, strict=True), 2):
        assert (p == q) == (a == b)


def test_a_reader_that_says_something_else_is_not_used():
    def wrong(change):
        return lambda t: None if (found := native.facts(t)) is None else change(list(found))

    assert agrees(native.facts, samples())
    for k in (0, 1, 2, 5, 6, 7):
        def change(found, k=k):
            found[k] = 6 if k == 2 else None
            return tuple(found)

        assert not agrees(wrong(change), samples())
    assert not agrees(lambda t: None, samples())


def test_a_torch_in_which_nothing_is_found_is_read_through_dlpack(monkeypatch):
    t = torch.ones(2)
    functions = (1,) * 8
    try:
        assert not native.direct(((t, 12345, torch._C._dispatch_keys(t).raw_repr()),), functions)
        assert not native.direct(((t, t._cdata, 0x123456789),), functions)
        assert not native.direct(((t, t._cdata, 1),), functions[:3]) and not native.direct(((3, 4, 5),), functions)
        monkeypatch.setattr(loader, "STABLE", ("no_such_function",))
        assert not loader._read_directly(native) and native.facts(t) is None
        assert native.fingerprint(t) is not None
        cf = tp.compile(lambda x: x + 1, backend="eager")
        assert all(eq(cf(t), t + 1) for _ in range(3)) and compiled_of(cf).counters["level1"] == 1
        assert eq(cf(torch.ones(2, 2).t()), 2 * torch.ones(2, 2)) and C(cf) == 2
    finally:
        monkeypatch.undo()
        assert loader._read_directly(native)


CHANGES = {
    "data": lambda p: setattr(p, "data", torch.full((3,), 2.0)), "data of another dtype": lambda p: setattr(p, "data", torch.ones(2).double()),
    "requires_grad_": lambda p: p.requires_grad_(not p.requires_grad), "t_": lambda p: p.data.t_() if p.dim() == 2 else p.data.unsqueeze_(0),
    "resize_": lambda p: p.data.resize_(5).fill_(1), "set_": lambda p: p.data.set_(torch.full((4,), 3.0)), "values": lambda p: p.data.mul_(2),
    "swap": lambda p: torch.utils.swap_tensors(p, nn.Parameter(torch.full((2,), 7.0), requires_grad=False)),
    "set_ of p": lambda p: p.set_(torch.full((2, 2), 3.0).t()), "storage": lambda p: p.untyped_storage().fill_(0),
    "conj": lambda p: setattr(p, "data", torch.zeros(2, dtype=torch.complex64).conj()), "neg": lambda p: setattr(p, "data", torch._neg_view(torch.ones(2))),
    "as_strided_": lambda p: p.data.as_strided_((2,), (0,)), "squeeze_": lambda p: p.data.squeeze_(), "to": lambda p: setattr(p, "data", p.data.to(torch.bfloat16)),
}  # fmt: skip


@pytest.mark.parametrize("reader", ["direct", "dlpack"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_happens_to_a_parameter_between_calls_is_seen(name, reader):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.tensor([1.0, 2.0]), requires_grad=False)

        def forward(self, x):
            return x * self.p.sum(), self.p * 2

    with through_dlpack() if reader == "dlpack" else contextlib.nullcontext():
        net, x = Net(), torch.ones(1)
        cm = tp.compile(net, backend="eager")
        for _ in range(2):
            cm(x), cm(x)
            with torch.no_grad():
                CHANGES[name](net.p)
            for _ in range(2):
                for got, want in zip(cm(x), net(x), strict=True):
                    assert eq(got, want) and (got.requires_grad, got.dtype, got.stride()) == (want.requires_grad, want.dtype, want.stride())


def test_a_tensor_without_memory_is_not_read():
    t = torch.ones(4)
    cf = tp.compile(lambda x: x.shape[0] * torch.ones(1), backend="eager")
    cf(t), cf(t)
    assert native.fingerprint(t) is not None
    t.untyped_storage().resize_(0)
    before = compiled_of(cf).versions[0].check.hits
    assert native.fingerprint(t) is None and eq(cf(t), 4 * torch.ones(1)) and compiled_of(cf).versions[0].check.hits == before


class Leaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.ones(2)), 1.0

    def forward(self, x):
        return x * self.weight * self.gain


MUTATIONS = [
    lambda d, v: d.__setitem__("gain", v), lambda d, v: d.update(gain=v), lambda d, v: d.update({"gain": v}.items()), lambda d, v: d.__ior__({"gain": v}),
    lambda d, v: (d.pop("gain"), d.__setitem__("gain", v)), lambda d, v: (d.__delitem__("gain"), d.setdefault("gain", v)),
    lambda d, v: [d.update(old, gain=v) for old in [dict(d)] if d.clear() is None], lambda d, v: (d.__setitem__("z", 1), d.popitem(), d.__setitem__("gain", v)),
    lambda d, v: (d.__setitem__("z", 1), d.__delitem__("z"), d.__setitem__("gain", v)),
]  # fmt: skip


@pytest.mark.parametrize("k", range(len(MUTATIONS)))
def test_however_a_dictionary_changes_the_change_is_seen(k):
    net, x, r = nn.Sequential(Leaf(), Leaf()), torch.ones(2), random.Random(k)
    cm = tp.compile(net, backend="eager")
    with torch.no_grad():
        for _ in range(12):
            MUTATIONS[k](net[r.randrange(2)].__dict__, r.choice([1.0, 2.0]))
            assert eq(cm(x), net(x)) and eq(cm(x), net(x))
    assert compiled_of(cm).counters["hits"] > 12


def test_a_parameter_that_is_replaced_is_read_anew():
    net, x = nn.Sequential(Leaf(), Leaf()), torch.ones(2)
    cm = tp.compile(net, backend="eager")
    new = [lambda p: net[0]._parameters.__setitem__("weight", p), lambda p: setattr(net[1], "weight", p), lambda p: net[1]._parameters.update(weight=p),
           lambda p: net._modules["0"]._parameters.__ior__({"weight": p}), lambda p: net[0].__dict__.__setitem__("_parameters", {"weight": p})]  # fmt: skip
    with torch.no_grad():
        for k, put in enumerate(new * 2):
            cm(x), cm(x)
            put(nn.Parameter(torch.full((2,), float(k))))
            assert eq(cm(x), net(x))
    assert C(cm) == 1


def test_rows_and_steps_of_an_unknown_kind_are_refused():
    answers = native.probed()
    for bad in (3, b"short", (9, 1), (2, int, ()), (2, dict, ()), (3, ("a",), ()), (2, list), (2, list, (4,))):
        with pytest.raises((ValueError, TypeError)):
            native.Check(answers, (bad,), (), (), 1, (), False, print, 0)
    deep = (0, 1)
    for _ in range(100):
        deep = (2, tuple, (deep,))
    with pytest.raises(ValueError):
        native.Check(answers, (deep,), (), (), 1, (), False, print, 0)
    for place in (1, -1, "x"):
        with pytest.raises((ValueError, TypeError)):
            native.Check(answers, ((0, 1),), (), (("argument", 0, -1, place),), 1, (), False, print, 0)
    with pytest.raises(ValueError):
        native.Check(answers, (), ("k",), (), 1, (), False, print, 0)
    native.Check(answers, ((0, 1),), (), (("argument", 0, -1, 0),), 1, (), False, print, 0)
