"""The layout that a pass expects of a new node is the one that torch gives, for every operator that a pass may write."""

import itertools

import pytest
import torch
from torch import fx
from torch.nn import functional as F

from tensorplay.graph.layout import Unknown, computed
from tensorplay.graph.rules import INPLACE
from tensorplay.stax.loops.nodes import Spec

ARGUMENTS = {
    "clamp": (-1, 1), "clamp_max": (0.5,), "clamp_min": (0.5,), "pow": (2,), "xlogy": (2.0,),
    "logit": (0.1,), "gt": (0.5,), "fmod": (2.0,), "remainder": (2.0,), "where": (1.0, 2.0),
}  # fmt: skip
BINARY = ("add", "sub", "mul", "div", "atan2", "copysign", "hypot", "fmod", "remainder", "pow", "xlogy", "lerp", "addcmul", "addcdiv", "masked_fill", "clamp", "where", "float_power", "rsub")
LAYOUTS = [
    ((2, 3), (3, 1)), ((2, 3), (1, 2)), ((2, 3), (4, 1)), ((2, 3), (0, 1)), ((2, 3, 4), (4, 8, 1)), ((2, 3, 4), (1, 2, 6)), ((2, 1, 3), (3, 3, 1)),
    ((2, 1, 3), (3, 1, 1)), ((3, 1), (1, 1)), ((3, 1), (1, 8)), ((1, 1), (2, 2)), ((1,), (1,)), ((), ()), ((3,), (1,)), ((3,), (2,)), ((1, 3), (3, 1)),
]  # fmt: skip


def calls(name):
    if name in ARGUMENTS or name not in BINARY:
        yield 1, lambda f, x: f(x, *ARGUMENTS.get(name, ()))
    if name in ("lerp",):
        yield 2, lambda f, x, y: f(x, y, 0.3)
    elif name in ("addcmul", "addcdiv", "clamp", "where"):
        yield 3, lambda f, x, y, z: f(x, y, z)
    elif name == "masked_fill":
        yield 2, lambda f, x, y: f(x, y, 1.0)
    elif name in BINARY:
        yield 2, lambda f, x, y: f(x, y)
        if name in ("pow", "float_power"):
            yield 1, lambda f, x: f(2.0, x)
        if name not in ("atan2", "hypot"):
            yield 1, lambda f, x: f(x, 2.0)


def real(name):
    return getattr(torch, name, None) or getattr(F, name)


@pytest.mark.parametrize("name", sorted({*INPLACE.values(), "where", "relu6", "softplus", "neg", "gt", "float_power", "rsub", "logsigmoid"}))
def test_a_layout_that_is_known_is_torch_s(name):
    known = 0
    for count, call in calls(name):
        for layouts in itertools.product(LAYOUTS, repeat=count if count < 3 else 2):
            tensors = [torch.empty_strided(*layout).fill_(0.5) for layout in layouts]
            tensors += tensors[:1] * (count - len(tensors))
            mask = {"where": 0, "masked_fill": 1}.get(name)
            if mask is not None and count > mask:
                tensors[mask] = torch.empty_strided(*layouts[mask], dtype=torch.bool).fill_(True)
            graph, nodes = fx.Graph(), []
            for t in tensors:
                nodes.append(graph.placeholder("x"))
                nodes[-1].meta["spec"] = Spec.of(t)
            try:
                want = call(real(name), *tensors)
            except RuntimeError:  # sizes that do not broadcast, overlapping memory
                continue
            try:
                got = call(lambda *args: computed(name, real(name), args, {}), *nodes)
            except (Unknown, TypeError):
                continue
            known += 1
            assert (got.size, got.stride, got.dtype) == (tuple(want.shape), want.stride(), want.dtype), layouts
    assert known
