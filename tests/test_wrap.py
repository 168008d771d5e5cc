"""Compiled modules are the original module in everything but the call (row P20)."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import tensorplay as tp
from tensorplay.compiled import compiled_of


class Net(nn.Module):
    """A module with a parameter, a buffer, a submodule and a plain attribute."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.zeros(3))
        self.p = 3.0

    def forward(self, x):
        return self.linear(x) * self.scale + self.shift


@pytest.fixture
def pair():
    net = Net()
    return net, tp.compile(net, backend="eager")


def test_type_repr_and_keys(pair):
    net, cm = pair
    assert isinstance(cm, Net) and isinstance(cm, nn.Module) and repr(cm) == repr(net)
    assert list(cm.state_dict()) == list(net.state_dict())
    assert [id(p) for p in cm.parameters()] == [id(p) for p in net.parameters()]
    assert [n for n, _ in cm.named_modules()] == [n for n, _ in net.named_modules()]


def test_writes_reach_the_original(pair):
    net, cm = pair
    cm.p = 7.0
    cm.extra = nn.Linear(2, 2)
    cm.scale = nn.Parameter(torch.zeros(3))
    assert net.p == 7.0 and net.extra is cm.extra and net.scale is cm.scale
    del cm.extra
    assert not hasattr(net, "extra")
    net.q = 1
    assert cm.q == 1


def test_modes_and_moves(pair):
    net, cm = pair
    assert cm.eval() is cm and not net.training and not net.linear.training
    cm.train()
    assert net.training
    assert cm.double() is cm and net.scale.dtype == torch.float64
    cm.requires_grad_(False)
    assert not net.scale.requires_grad
    cm.load_state_dict(Net().double().state_dict())


def test_copies_compile_anew(pair):
    net, cm = pair
    for other in (copy.deepcopy(cm), pickle.loads(pickle.dumps(cm))):
        assert isinstance(other, Net) and other.scale is not net.scale and torch.equal(other.scale, net.scale)
        assert compiled_of(other) is not compiled_of(cm) and compiled_of(other).fn is not net
        assert compiled_of(other).settings == compiled_of(cm).settings
        assert other.__dict__ is compiled_of(other).fn.__dict__
    assert type(copy.deepcopy(net)) is Net


def test_saved_as_the_original(pair):
    _, cm = pair
    buffer = io.BytesIO()
    torch.save(cm.state_dict(), buffer)
    buffer.seek(0)
    Net().load_state_dict(torch.load(buffer))


def test_as_a_submodule(pair):
    net, cm = pair
    outer = nn.Sequential(cm)
    assert "0.linear.weight" in outer.state_dict()
    outer.eval()
    assert not net.training


def test_compiling_twice_compiles_the_original(pair):
    net, cm = pair
    again = tp.compile(cm, backend="eager", name="again")
    assert compiled_of(again).fn is net and type(again).__mro__[1] is Net


def test_nothing_is_left_behind():
    net = Net()
    cm = tp.compile(net, backend="eager")
    assert "_tp_compiled" not in net.__dict__
    watch = weakref.ref(net)
    del net, cm
    gc.collect()
    assert watch() is None
