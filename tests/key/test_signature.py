"""Definition 2.2: which values are one class of the signature, and that nothing is kept alive."""

import collections
import gc
import math
import random
import weakref

import numpy as np
import pytest
import torch

from tensorplay.key.aliasing import extents, overlaps, same_objects
from tensorplay.key.guards import differences, guards
from tensorplay.key.signature import entry, signature

Point = collections.namedtuple("Point", "x y")


class Config:
    def __init__(self, p):
        self.p = p

    def __repr__(self) -> str:
        return "Config()"


class Slotted:
    __slots__ = ("p",)

    def __init__(self, p):
        self.p = p


SAME = [3, 3.5, True, None, "a", b"a", 2 + 1j, math.nan, -0.0, torch.float32, torch.device("cpu"), slice(1, 2), range(3),
        (1, [2.0, {"k": None}]), Point(1, 2), {1, 2}, len, math, Config, np.float32(2), np.arange(3)]  # fmt: skip
DIFFERENT = [
    (1, 1.0), (1, True), (0.0, -0.0), (2, 3), ((1, 2), [1, 2]), ((1, 2), (1, 2, 3)), ({"a": 1}, {"a": 2}),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}), (Point(1, 2), (1, 2)), (Config(1), Config(1)), ({1}, {True}), (math.nan, 1.0),
    (complex(0.0, 0.0), complex(0.0, -0.0)), (np.float32(2), np.float64(2)), (np.arange(3), np.arange(1, 4)),
    ([0.0], [-0.0]), (range(3), range(4)), (slice(1), slice(True)),
]  # fmt: skip


@pytest.mark.parametrize("value", SAME, ids=repr)
def test_a_value_hits_itself(value):
    assert entry(value) == entry(value)


@pytest.mark.parametrize("a, b", DIFFERENT, ids=repr)
def test_classes_differ_and_the_guards_say_so(a, b):
    assert entry(a) != entry(b)
    assert differences("x", entry(a), entry(b))


def test_tensor_entry_is_the_tuple_of_definition_2_2():
    kind, cls, shape, dtype, device, grad, stride, _ = entry(torch.randn(2, 3))
    assert (kind, cls, shape, dtype, device, grad, stride) == (
        "tensor", torch.Tensor, (2, 3), torch.float32, torch.device("cpu"), False, (3, 1),
    )  # fmt: skip


def test_every_tensor_metadata_makes_a_class_of_its_own():
    x = torch.randn(4, 4)
    with torch.inference_mode():
        inference = torch.randn(4, 4)
    c = torch.randn(4, 4, dtype=torch.complex64)
    variants = [
        x, x.t(), torch.randn(4, 1).expand(4, 4), torch.randn(4, 8)[:, ::2], x.double(), x[:3], x.clone().requires_grad_(),
        torch.nn.Parameter(x), torch.nn.Parameter(x, requires_grad=False), inference, c, c.conj(), c.conj().imag,
        x.to_sparse(), x.to("meta"), x.half(), x.bool(), x[0], x[:, :, None],
    ]  # fmt: skip
    entries = [entry(v) for v in variants]
    for k, a in enumerate(entries):
        assert [j for j, b in enumerate(entries) if a == b] == [k]
    assert entry(torch.randn(4, 4)) == entry(x)


def test_attributes_of_argument_objects_count():
    c = Config(1)
    before = entry(c)
    assert entry(c) == before
    c.p = 2
    assert entry(c) != before
    assert differences("c", before, entry(c))[0].path.startswith("c.p")
    s = Slotted(1)
    before = entry(s)
    s.p = 2.0
    assert entry(s) != before


def test_cycles_and_sharing():
    a = [1]
    a.append(a)
    assert entry(a) == entry(a)
    one = [1]
    assert entry([one, one]) != entry([[1], [1]])
    deep = []
    for _ in range(60):
        deep = [deep, deep]
    assert entry(deep) == entry(deep)


def test_identity_is_weak_and_a_dead_object_never_equals():
    c = Config(1)
    before, watch = entry(c), weakref.ref(c)
    del c
    gc.collect()
    assert watch() is None
    assert before != entry(Config(1)) and not before[2].alive


def test_an_entry_keeps_no_tensor_alive():
    x = torch.randn(3)
    watch = weakref.ref(x)
    kept = signature((x, [x]), {"k": {"x": x}})
    del x
    assert watch() is None and kept


LEAVES = [
    None, True, False, 0, 1, 2, -1, 0.0, -0.0, 1.0, math.nan, math.inf, "a", "b", torch.zeros(2), torch.zeros(3),
    torch.zeros(2, 2).t(), torch.zeros(2).double(), Config(1),
]  # fmt: skip


def draw(r, depth=2):
    kind = r.randrange(6) if depth else 0
    if kind <= 2:
        return r.choice(LEAVES)
    items = [draw(r, depth - 1) for _ in range(r.randrange(3))]
    if kind == 3:
        return items
    return tuple(items) if kind == 4 else dict(zip(r.sample("xyz", len(items)), items))


def test_guards_are_the_projection_of_the_key():
    r = random.Random(0)
    equal = 0
    for _ in range(3000):
        a, b = draw(r), draw(r)
        x, y = signature((a,), {"k": b}), signature((b,), {"k": a})
        equal += x == y
        assert (x == y) == (not differences("inputs", x, y))
        assert not differences("inputs", x, signature((a,), {"k": b}))
        assert all(str(g) for g in guards("inputs", x))
    assert equal > 50


def test_guard_path_expected_actual_of_example_3_2():
    (guard, *_) = differences("inputs", signature((torch.ones(4, 8),), {}), signature((torch.ones(6, 8),), {}))
    assert (guard.path, guard.condition, guard.expected, guard.actual) == ("inputs[0][0][2][0]", "inputs[0][0][2][0] == 4", 4, 6)


def test_exactly_the_differing_components():
    x = torch.randn(2, 3)
    found = differences("inputs", signature((x,), {"s": 2}), signature((x.double(),), {"s": 3}))
    assert [g.condition for g in found] == ["inputs[0][0][3] == torch.float32", "inputs[1]['s'][2] == 2"]


def test_which_arguments_are_one_tensor():
    x, y = torch.ones(2), torch.ones(2)

    def pattern(*args, **kwargs):
        return same_objects(args, kwargs, signature(args, kwargs))

    assert pattern(x, y) == () == pattern(x, 1)
    assert pattern(x, x) == (0, 0) and pattern(x, y, x) == (0, 1, 0)
    assert pattern(x, [y, {"k": x}]) == (0, 1, 0) and pattern(x, other=x) == (0, 0)


def test_overlaps_of_written_memory():
    b = torch.zeros(10)
    tensors = (b[:4], b[3:6], b[6:], torch.zeros(3), torch.zeros(0))
    sizes = extents(tensors)
    assert overlaps(tensors, sizes, frozenset({0})) == ((0, 1),)
    assert overlaps(tensors, sizes, frozenset({2, 3, 4})) == ()
    array = np.zeros(8, dtype=np.float32)
    tensors = (torch.from_numpy(array), torch.from_numpy(array[2:]))
    assert overlaps(tensors, extents(tensors), frozenset({1})) == ((0, 1),)
