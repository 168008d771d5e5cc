"""Strides after writes: every kind of write into every layout gives eager's strides in every dimension, those of size 1 too."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tensorplay as tp
from bench.levels import Interpreted
from tensorplay.testing import near

from ..graph.programs import observed
from ..graph.programs import same as equal
from .graphs import agrees

LAYOUTS = [
    ((1, 1), (2, 2)), ((1, 1), (4, 1)), ((3, 1), (1, 8)), ((3, 1), (5, 7)), ((3, 1), (1, 1)), ((1, 3), (7, 1)), ((1, 3), (9, 2)),
    ((2, 3), (1, 2)), ((2, 3), (4, 1)), ((2, 3), (10, 3)), ((2, 1, 3), (3, 1, 1)), ((2, 1, 3), (3, 9, 1)), ((2, 1, 3), (1, 5, 2)),
    ((1, 1, 1), (1, 2, 3)), ((2, 3, 1), (1, 2, 6)), ((0, 2), (5, 7)), ((2, 0, 1), (1, 2, 3)), ((1,), (4,)), ((), ()),
]  # fmt: skip


def laid(size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    t = torch.empty_strided(size, stride)
    return t.copy_(torch.linspace(-1, 1, max(t.numel(), 1))[: t.numel()].reshape(size))


def as_output(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x)
    torch.mul(x, 2, out=y)
    return y, y + 1


def through_view(x: Tensor) -> tuple[Tensor, ...]:
    y = x.clone()
    v = y.unsqueeze(0).transpose(0, -1)
    v.add_(1)
    return y, v, v * 2, y.exp(), y.view_as(y)


def row(x: Tensor) -> tuple[Tensor, ...]:
    y = x.clone()
    if x.dim() and x.shape[0]:
        y[0] = 3.0
        y[-1:].mul_(2)
    return y, y * 1, y.clone()


def into_strided(x: Tensor) -> tuple[Tensor, ...]:
    y = torch.empty_strided(x.shape, [s + 1 for s in x.stride()] if x.dim() < 2 else x.stride())
    y.copy_(x)
    z = x.new_empty_strided(x.shape, x.stride())
    z.copy_(x * 2)
    y.relu_()
    return y, z, y.neg(), z + y


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda x: (x.add_(1), x * 2, x.clone()),
    "in place on a product": lambda x: (y := x * 1.5, y.add_(1), y * 2, y.clone()),
    "in place on a copy": lambda x: (y := x.clone(), y.mul_(2), y + 1, torch.empty_like(y).copy_(y)),
    "copy over": lambda x: (y := x.clone(), y.copy_(x * 2), -y, y.relu()),
    "copy of another layout": lambda x: (y := torch.empty_like(x), y.copy_(x.contiguous()), y.sigmoid(), y),
    "out": as_output,
    "a view": through_view,
    "a row": row,
    "empty_strided": into_strided,
    "fill": lambda x: (y := torch.empty_like(x), y.fill_(3), y * x),
    "zero": lambda x: (y := x.clone(), y.zero_(), y + x),
    "swap": lambda x: (y := x.transpose(0, -1).clone() if x.dim() else x.clone(), y.add_(1), y * 2, y.transpose(0, -1) if x.dim() else y),
    "masked": lambda x: (y := x.clone(), y.masked_fill_(x > 0, 2.0), y.abs()),
    "turned": lambda x: (y := x.clone(), y.unsqueeze_(0), y.add_(1), y.squeeze(0), y * 2),
    "reduced": lambda x: (y := x.sum(-1, keepdim=True) if x.dim() else x.clone(), y.add_(1), y * 2),
    "a constant": lambda x: (y := torch.tensor([[1.0]]).t(), y.add_(1), y * 1),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_strides_after_a_write(name: str, layout: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    agrees(WRITES[name], laid(*layout))


@pytest.mark.parametrize("name", WRITES)
def test_strides_after_a_write_through_every_pass(name: str) -> None:
    f = WRITES[name]
    for layout in LAYOUTS:
        x = laid(*layout)
        with warnings.catch_warnings():
            warnings.simplefilter("error", tp.errors.FallbackWarning)
            got = observed(tp.compile(f, backend=Interpreted), [x])
        want = observed(f, [x])
        assert equal(got, want), (layout, got, want)


def test_results_are_one_tensor_only_where_eager_s_are() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 1
        same = y.contiguous(), y.to(torch.float32), y.float()
        return y, *same, y[...], y[()], y[:], y.detach(), y.data, y.squeeze(), y.view(3, 4), y.expand(3, 4), y.unsqueeze(0).squeeze(0), x, x[...], x.detach()

    x = torch.randn(3, 4)
    assert equal(observed(tp.compile(f, strict_native=True), [x]), observed(f, [x]))


BIG = torch.arange(40.0).view(5, 8)
BEYOND: dict[str, tuple[Callable[[Tensor], object], Tensor]] = {
    "reads gaps": (lambda x: (x.add_(1), x.as_strided((17,), (1,)) * 2), BIG[:3, 2:3]),
    "reads rows behind": (lambda x: (x.add_(1), x.as_strided((5, 8), (8, 1)) * 2), BIG[:3]),
    "reads before": (lambda x: (x.add_(1), x.as_strided((2, 2), (8, 1), 0) * 2), BIG[1:3, 2:3]),
    "writes gaps": (lambda x: (x.as_strided((3, 3), (8, 1), x.storage_offset()).add_(1), x * 2), BIG[:3, 2:3]),
    "writes rows behind": (lambda x: (x.as_strided((5, 8), (8, 1)).add_(1), x * 2), BIG[:3]),
    "writes before": (lambda x: (x.as_strided((8,), (1,), 0).add_(1), x * 2), BIG[1:3]),
}


@pytest.mark.parametrize("name", BEYOND)
def test_memory_around_a_tensor_is_written_as_in_eager(name: str) -> None:
    f, x = BEYOND[name]
    ours, theirs = (BIG.clone().as_strided(x.shape, x.stride(), x.storage_offset()) for _ in range(2))
    cf = tp.compile(f, backend="aot_eager")
    with pytest.warns(tp.errors.FallbackWarning, match="as_strided"):
        got = cf(ours)
    want = f(theirs)
    assert near(got[1], want[1], 0)  # type: ignore[index]
    assert torch.equal(*(t.as_strided((5, 8), (8, 1), 0) for t in (ours, theirs)))
    inside = lambda x: (x.add_(1), x.as_strided((2, 2), (8, 1), x.storage_offset() + 1).mul_(2), x * 1)  # noqa: E731
    agrees(inside, BIG[1:3])
