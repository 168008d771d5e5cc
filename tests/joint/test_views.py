"""Proposition 4.4 for every row of the table of views: view(scatter(base, value)) == value, and the rest of base stays."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tensorplay.errors import UnsupportedError
from tensorplay.stax.joint import views
from tensorplay.stax.joint.views import LISTS, UNDO, Link
from tensorplay.stax.loops.nodes import Spec

aten = torch.ops.aten


def real() -> Tensor:
    return torch.arange(1.0, 25).view(2, 3, 4)


def turned() -> Tensor:
    return torch.arange(1.0, 25).view(4, 3, 2).permute(2, 1, 0)


def flat() -> Tensor:
    return torch.arange(1.0, 25)


def pairs() -> Tensor:
    return torch.arange(1.0, 25).view(4, 3, 2)


def complex_() -> Tensor:
    return torch.complex(pairs(), -pairs())


def single() -> Tensor:
    return torch.arange(1.0, 13).view(1, 3, 1, 4)


CASES: list[tuple[Any, Any, tuple[Any, ...]]] = [
    (aten.select.int, real, (1, 2)), (aten.select.int, turned, (-1, -2)), (aten.slice.Tensor, real, (1, 0, 9, 2)), (aten.slice.Tensor, turned, (0, 1)),
    (aten.slice.Tensor, real, (2, -3, -1)), (aten.slice.Tensor, real, (0, 5, 9)), (aten.slice.Tensor, real, ()), (aten.diagonal.default, real, ()),
    (aten.diagonal.default, turned, (-1, 2, 1)), (aten.diagonal.default, real, (9,)), (aten.as_strided.default, real, ([2, 2], [12, 5], 3)),
    (aten.as_strided.default, flat, ([2, 3], [1, 8])),
    (aten.as_strided.default, turned, ([3, 2], [2, 9], 4)), (aten.as_strided.default, flat, ([], [], 5)), (aten.as_strided.default, flat, ([1, 2], [0, 3], 1)),
    (aten.unfold.default, turned, (2, 2, 2)), (aten.t.default, lambda: real()[0], ()), (aten.t.default, flat, ()), (aten.transpose.int, real, (0, 2)),
    (aten.transpose.int, turned, (-1, 1)), (aten.permute.default, real, ([2, 0, 1],)), (aten.permute.default, turned, ([-1, 1, 0],)),
    (aten.view.default, real, ([6, -1],)), (aten.view.default, real, ([2, 3, 2, 2],)), (aten._unsafe_view.default, real, ([4, 6],)),
    (aten._reshape_alias.default, real, ([6, 4], [4, 1])), (aten.squeeze.default, single, ()), (aten.squeeze.dim, single, (0,)), (aten.squeeze.dim, single, (1,)),
    (aten.squeeze.dims, single, ([0, 2],)), (aten.unsqueeze.default, real, (-1,)), (aten.unsqueeze.default, turned, (1,)), (aten.expand.default, real, ([2, -1, 4],)),
    (aten.expand.default, real, ([1, 2, 3, 4],)), (aten.alias.default, real, ()), (aten.detach.default, turned, ()), (aten.view.dtype, real, (torch.int32,)),
    (aten.view_as_real.default, complex_, ()), (aten.view_as_complex.default, pairs, ()), (aten._conj.default, complex_, ()), (aten._neg_view.default, real, ()),
    (aten.unfold.default, flat, (0, 4, 5)), (aten.unfold.default, real, (1, 2, 2)),
]  # fmt: skip
ELEMENTS: list[tuple[Any, tuple[Any, ...], int]] = [
    (aten.split.Tensor, (2, 1), 1), (aten.split.Tensor, (3, -1), 1), (aten.split_with_sizes.default, ([1, 3], 2), 1), (aten.unbind.int, (1,), 2),
    (aten.unbind.int, (), 0), (aten.unsafe_split.Tensor, (2, 2), 1), (aten.unsafe_split_with_sizes.default, ([1, 1], 0), 0),
]  # fmt: skip


def test_every_row_has_a_case() -> None:
    assert {target for target, _, _ in CASES} == UNDO.keys()
    assert {target for target, _, _ in ELEMENTS} == LISTS


def scattered(link: Link, base: Tensor, value: Tensor) -> Tensor:
    """The scatter inverse as a graph, run."""
    graph = fx.Graph()

    def emit(target: Any, args: tuple[Any, ...], spec: Spec | None = None, **kwargs: Any) -> fx.Node:
        node = graph.create_node("call_function", target, args, kwargs)
        node.meta["spec"] = views.spec(target, args) if spec is None else spec
        return node

    b, v = graph.placeholder("b"), graph.placeholder("v")
    b.meta["spec"], v.meta["spec"] = Spec.of(base), Spec.of(value)
    result = views.scatter(emit, b, v, link)
    assert result.meta["spec"].size == tuple(base.shape)
    graph.output(result)
    return fx.GraphModule(torch.nn.Module(), graph)(base, value)


def law(link: Link, base: Tensor, viewed: Any) -> None:
    before = base.clone()
    view = viewed(base)
    value = (view.clone().flatten() * 0 + torch.arange(view.numel()).add(100).to(view.dtype)).view(view.shape)
    marked = base.clone()
    viewed(marked).zero_()
    untouched = marked == base
    result = scattered(link, base, value)
    assert torch.equal(viewed(result.clone()), value)
    assert torch.equal(result[untouched], base[untouched]) and torch.equal(base, before)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]} {c[2]}")
def test_the_inverse_of_a_view(case: Any) -> None:
    target, make, args = case
    law(Link(target, args), make(), lambda t: target(t, *args))


@pytest.mark.parametrize("case", ELEMENTS, ids=lambda c: f"{c[0]} {c[1]} {c[2]}")
def test_the_inverse_of_an_element(case: Any) -> None:
    target, args, index = case
    graph = fx.Graph()
    b = graph.placeholder("b")
    item = graph.call_function(operator.getitem, (graph.call_function(target, (b, *args)), index))
    for make in (real, turned):
        law(views.link(item), make(), lambda t: target(t, *args)[index])


@pytest.mark.parametrize(
    "link",
    [Link(aten.expand.default, ([5, 2, 3, 4],)), Link(aten.as_strided.default, ([3, 3], [1, 1])), Link(aten.unfold.default, (2, 3, 1))],
    ids=str,
)
def test_what_has_no_inverse_is_refused(link: Link) -> None:
    value = link.target(real(), *link.args).clone()
    with pytest.raises(UnsupportedError, match=r"expanded|overlapping"):
        scattered(link, real(), value)
