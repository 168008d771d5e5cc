"""Functionalization: scatter inverses, aliases, writes to inputs, random programs (section 4.9, proposition 4.4)."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from tensorplay.errors import UnsupportedError

from .graphs import agrees, aten, ops, trace

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "select": lambda x: x.select(1, -2),
    "slice": lambda x: x[1:, ::2],
    "slice to the end": lambda x: x[:, 2:],
    "empty slice": lambda x: x[3:3],
    "narrow": lambda x: x.narrow(0, 1, 2),
    "diagonal": lambda x: x.diagonal(1),
    "transpose": lambda x: x.transpose(0, 2),
    "t": lambda x: x[0].t(),
    "permute": lambda x: x.permute(2, 0, 1),
    "permute by negative dimensions": lambda x: x.permute(-1, 0, -2),
    "movedim": lambda x: x.movedim(0, 2),
    "view": lambda x: x[0].view(x.shape[1], 1, x.shape[2]),
    "unflatten": lambda x: x.unflatten(0, (2, 2)),
    "flatten": lambda x: x[..., :1].reshape(x.shape[0], -1) if x.is_contiguous() else x.transpose(0, 1).transpose(0, 1),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "squeeze all": lambda x: x[:1, :1].squeeze(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "split": lambda x: x.split(3, 1)[1],
    "split with sizes": lambda x: x.split([1, 2, 1], 0)[1],
    "chunk": lambda x: x.chunk(2, -1)[1],
    "tensor_split": lambda x: x.tensor_split(3, 1)[2],
    "unbind": lambda x: x.unbind(1)[2],
    "unfold": lambda x: x.unfold(1, 2, 2),
    "as_strided": lambda x: x.as_strided((2, 3), (3, 1), x.storage_offset() + 2),
    "expand of nothing": lambda x: x.expand(-1, -1, -1),
    "detach": lambda x: x.detach(),
    "view as": lambda x: x.view_as(x),
    "bits": lambda x: x[..., :2].view(torch.int32).view(torch.float32),
    "chain": lambda x: x.transpose(0, 1)[1:].select(2, 0).unsqueeze(0)[..., ::2],
}


def contiguous() -> torch.Tensor:
    return torch.arange(1.0, 4 * 5 * 6 + 1).view(4, 5, 6)


def strided() -> torch.Tensor:
    return torch.arange(1.0, 8 * 7 * 9 + 1).view(7, 8, 9)[1:6, ::2, 3:].permute(1, 0, 2)


def permuted() -> torch.Tensor:
    return torch.arange(1.0, 4 * 5 * 6 + 1).view(6, 4, 5).permute(1, 2, 0)


LAYOUTS = {"contiguous": contiguous, "strided": strided, "permuted": permuted}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", VIEWS)
def test_scatter_is_the_inverse_of_its_view(name: str, layout: str) -> None:
    view, x = VIEWS[name], LAYOUTS[layout]()

    def write(x):
        v = view(x)
        v.mul_(-2)
        return x + 1, v * 1

    def write_twice(x):
        y = x * 1
        v = view(y)
        w = view(y)
        v.copy_(torch.full_like(v, 3.0))
        w.add_(v)
        return y, w, v

    try:
        view(x)
    except RuntimeError as error:
        pytest.skip(str(error))
    for program in (write, write_twice):
        try:
            agrees(program, x)
        except UnsupportedError as error:
            assert name in ("as_strided", "unfold", "bits") and layout != "contiguous", error


def test_a_write_shows_through_every_alias() -> None:
    def f(x):
        a = x[0]
        b = x.t()[:, 0]
        a.add_(1)
        return b + 0, b

    agrees(f, torch.randn(4, 8))


def test_outputs_alias_as_in_eager() -> None:
    agrees(lambda x: (x, x[0], x.t()), torch.randn(3, 4))
    agrees(lambda x: x.add_(1), torch.randn(3, 4))
    agrees(lambda x: (x.add_(1)[1:], x), torch.randn(3, 4))

    def f(x):
        y = x * 2
        z = y[0]
        z.zero_()
        return y, z, y.view(-1)

    graph = agrees(f, torch.randn(3, 4))
    outs = graph.module(torch.randn(3, 4))
    assert len({o.untyped_storage()._cdata for o in outs}) == 1


def test_copies_between_inputs() -> None:
    def swap(x, y):
        t = x.clone()
        x.copy_(y)
        y.copy_(t)

    agrees(lambda x, y: (swap(x, y), x + y)[1], torch.randn(3), torch.randn(3))
    agrees(lambda x, y: (x.copy_(y), y.mul_(2), x + y)[2], torch.randn(3, 3), torch.randn(3, 3).t())
    agrees(lambda x, y: (x.copy_(y), x + 1)[1], torch.randn(2, 3), torch.randn(3, dtype=torch.float64))
    agrees(lambda x, y: (x.copy_(y.t()), x.view(-1))[1], torch.randn(3, 3), torch.randn(3, 3))

    def intermediate(x):
        a = torch.empty_like(x)
        a.copy_(x)
        x.mul_(2)
        return a, x

    agrees(intermediate, torch.randn(4))

    def through_a_view(x):
        a, y = torch.empty(3, 3), x * 2
        a.t().copy_(y)
        return a, y

    outs = agrees(through_a_view, torch.randn(3, 3)).module(torch.randn(3, 3))
    assert outs[0].data_ptr() != outs[1].data_ptr()


def test_results_written_to_out() -> None:
    def f(x, y):
        torch.add(x, 1, out=y)
        a, b = torch.empty(4), torch.empty(4, dtype=torch.int64)
        torch.max(x, 1, out=(a, b))
        return a, b, y * 2

    agrees(f, torch.randn(4, 3), torch.randn(4, 3))


def test_dtype_of_the_written_tensor_stays() -> None:
    def f(x, y, i):
        x.add_(y)
        x.lt_(0.5)
        i.add_(2)
        i.div_(2, rounding_mode="floor")
        return x, i

    agrees(f, torch.randn(4), torch.randn(4, dtype=torch.float64), torch.arange(4))
    agrees(lambda x, y: x.mul_(y), torch.randn(4, dtype=torch.bfloat16), torch.randn(4))


def test_writes_by_index_and_mask() -> None:
    def f(x, i):
        x[i, 1:] = -1
        x[x > 1] *= 2
        x.index_add_(0, i, torch.ones(2, 5))
        x.masked_fill_(x < -2, 0.5)
        x[0, ::2] += 3
        x.scatter_(1, i.view(2, 1), 9.0)
        return x.sum(0)

    agrees(f, torch.randn(4, 5), torch.tensor([2, 0]))


def test_foreach_writes() -> None:
    def f(a, b):
        torch._foreach_add_([a, b], 1)
        torch._foreach_mul_([a, b], [a, b])
        return a + b

    agrees(f, torch.randn(3), torch.randn(3))
    with pytest.raises(UnsupportedError, match="already written"):  # eager goes through the list one by one
        trace(lambda a, b: torch._foreach_mul_([a, b], [b, a]), torch.randn(3), torch.randn(3))


def test_expanded_tensors_are_not_written() -> None:
    with pytest.raises(UnsupportedError, match="overlapping memory"):
        trace(lambda x: x.expand(3, 4).add_(1), torch.randn(4))
    with pytest.raises(UnsupportedError, match="expanded"):
        trace(lambda x: (x.expand(3, 4)[0].add_(1), x + 1)[1], torch.randn(4))


def test_special_values_survive() -> None:
    x = torch.tensor([[0.0, -0.0, float("inf")], [-float("inf"), float("nan"), 1e-42]])
    agrees(lambda x: (x[0].neg_(), x.t()[1].zero_(), x * 1)[2], x)
    agrees(lambda x: (x[0].add_(1), x * 1)[1], torch.empty(2, 0))
    agrees(lambda x: (x.add_(1), x * 1)[1], torch.tensor(3.0))


def test_a_graph_without_writes_is_left_alone() -> None:
    graph = agrees(lambda x: x[0].t() + 1, torch.randn(2, 3, 4))
    assert ops(graph) == ["select", "t", "add"]
    assert aten.copy_.default not in [n.target for n in graph.module.graph.nodes]


@pytest.mark.parametrize("seed", range(150))
def test_random_programs(seed: int) -> None:
    pick = random.Random(seed)
    x = pick.choice(list(LAYOUTS.values()))()
    agrees_or_refuses(program(seed), x, torch.arange(120.0).view(4, 5, 6) / 7)


def test_aliases_of_a_strided_input_moved_by_a_write() -> None:
    def f(x):
        x.add_(1)
        return x.as_strided((2, 2), (9, 1), x.storage_offset()) * 2

    with pytest.raises(UnsupportedError, match="layout changed"):
        trace(f, strided())
    agrees(f, torch.arange(40.0)[4:].view(4, 9))


def agrees_or_refuses(fn: Callable[..., object], *samples: torch.Tensor) -> None:
    try:
        agrees(fn, *samples)
    except UnsupportedError as error:
        assert "layout changed" in str(error) or "overlapping" in str(error), error


def program(seed: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Views, writes and reads in random order, the same ones at each call."""

    def run(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pick = random.Random(seed)
        live = [x, y, x * 2]
        for _ in range(14):
            t = pick.choice(live)
            match pick.randrange(9):
                case 0 | 1 | 2 | 3 if t.dim() > 0:
                    live.append(some_view(t, pick))
                case 4:
                    t.mul_(pick.choice([2, -1, 0.5]))
                case 5:
                    t.add_(t.detach().clone().flip(0) if t.dim() else 1)
                case 6:
                    t.copy_(pick.choice([torch.full((), 3.5), t * 3]))
                case 7:
                    live.append(t + 1)
                case 8 if t.dim() >= 2 and t.shape[-1] == t.shape[-2]:
                    t.copy_(t.transpose(-1, -2).clone())
        kept = pick.sample(range(len(live)), 3)
        return tuple(live[i] for i in kept)

    return run


def some_view(t: torch.Tensor, pick: random.Random) -> torch.Tensor:
    d = pick.randrange(t.dim())
    n = t.shape[d]
    match pick.randrange(10):
        case 0 if n:
            return t.select(d, pick.randrange(n))
        case 1:
            return t.narrow(d, min(1, n), max(n - 1, 0))
        case 2 if n:
            return t[(slice(None),) * d + (slice(pick.randrange(n), None, pick.choice([1, 2, 3])),)]
        case 3:
            return t.transpose(d, pick.randrange(t.dim()))
        case 4:
            return t.unsqueeze(d)
        case 5:
            return t.squeeze()
        case 6 if t.dim() >= 2:
            return t.diagonal(pick.choice([0, 1, -1]), 0, t.dim() - 1)
        case 7 if t.is_contiguous():
            return t.view(-1)
        case 8 if n:
            return pick.choice(t.unbind(d))
        case 9 if n > 1:
            return t.split(pick.choice([1, 2]), d)[-1]
    return t.detach()
