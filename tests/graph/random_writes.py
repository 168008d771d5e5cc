"""Random programs of nested views, writes through them and reads through other aliases; each number is one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class Pick:
    """A generator of its own: a captured function may not draw from Python's."""

    def __init__(self, seed: int) -> None:
        self.state = seed * 7919 + 17

    def randrange(self, *bounds: int) -> int:
        low, high = bounds if len(bounds) == 2 else (0, bounds[0])
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return low + (self.state >> 33) % (high - low)

    def random(self) -> float:
        return self.randrange(1000) / 1000

    def choice(self, items: Any) -> Any:
        return items[self.randrange(len(items))]


POINT_VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t.view(1), lambda t: t.expand(2), lambda t: t[None], lambda t: t.detach(),
)  # fmt: skip
VIEWS: tuple[Callable[[Tensor, int, int, Pick], Tensor], ...] = (  # of a tensor, a dimension and its size
    lambda t, d, n, pick: t.select(d, pick.randrange(n)), lambda t, d, n, pick: t.narrow(d, pick.randrange(2), max(n - 1, 1)),
    lambda t, d, n, pick: t.transpose(0, d), lambda t, d, n, pick: t.flatten(), lambda t, d, n, pick: t.view(-1),
    lambda t, d, n, pick: t.unsqueeze(d), lambda t, d, n, pick: t.squeeze(), lambda t, d, n, pick: t.diagonal(pick.randrange(2)),
    lambda t, d, n, pick: t.chunk(2, d)[pick.randrange(2)], lambda t, d, n, pick: t.split(1, d)[0], lambda t, d, n, pick: t.unbind(d)[-1],
    lambda t, d, n, pick: t.expand(2, *t.shape), lambda t, d, n, pick: t.unfold(d, min(2, n), pick.randrange(1, 3)),
    lambda t, d, n, pick: t.as_strided(t.shape, t.stride(), t.storage_offset()), lambda t, d, n, pick: t.mT, lambda t, d, n, pick: t.detach(),
    lambda t, d, n, pick: t.movedim(0, d), lambda t, d, n, pick: t[..., :1], lambda t, d, n, pick: t.reshape(t.shape[::-1]), lambda t, d, n, pick: t[::2],
)  # fmt: skip
WRITES: tuple[Callable[[Tensor, Tensor, Pick], object], ...] = (  # into t, of a tensor of its shape or of a number
    lambda t, s, pick: t.add_(s), lambda t, s, pick: t.mul_(s), lambda t, s, pick: t.copy_(s), lambda t, s, pick: t.sub_(1.5), lambda t, s, pick: t.zero_(),
    lambda t, s, pick: t.fill_(s.mean()), lambda t, s, pick: t.clamp_(-1, 1), lambda t, s, pick: t.masked_fill_(t > 0, 0.5),
    lambda t, s, pick: torch.add(t, s, out=t), lambda t, s, pick: t.__setitem__(0, s.sum()) if t.dim() else t.neg_(),
    lambda t, s, pick: t.__setitem__(t > 0.5, -1.0), lambda t, s, pick: F.relu(t, inplace=True), lambda t, s, pick: t.addcmul_(t, s, value=0.5),
    lambda t, s, pick: t.lerp_(s.expand_as(t), 0.25), lambda t, s, pick: t.sigmoid_(), lambda t, s, pick: t.data.add_(1),
    lambda t, s, pick: t.index_fill_(0, torch.tensor([0]), 2.0) if t.dim() else t, lambda t, s, pick: F.selu(t, inplace=True),
    lambda t, s, pick: t.t_() if t.dim() == 2 and pick.random() < 0.3 else t.abs_(), lambda t, s, pick: t.unsqueeze_(0) if pick.random() < 0.3 else t.neg_(),
    lambda t, s, pick: t.pow_(2).clamp_(-9, 9), lambda t, s, pick: t.index_add_(0, torch.tensor([0]), t[:1].clone()) if t.dim() else t,
    lambda t, s, pick: t.cumsum_(0) if t.dim() else t,
)  # fmt: skip
READS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda t, o: t * 1, lambda t, o: t + 0, lambda t, o: t.neg().neg(), lambda t, o: t.exp().clamp(max=9), lambda t, o: t.sum(), lambda t, o: t.clone(),
    lambda t, o: torch.empty_like(t).copy_(t), lambda t, o: t / 1, lambda t, o: t - 0, lambda t, o: t.contiguous(), lambda t, o: F.relu6(t),
    lambda t, o: F.selu(t), lambda t, o: t.sin() + t.sin(), lambda t, o: torch.where(t > 0, t, t * 0.5), lambda t, o: torch.zeros_like(t),
    lambda t, o: t.mean(-1, keepdim=True) if t.dim() else t, lambda t, o: t.flip(0) if t.dim() else t, lambda t, o: t.double().float(),
    lambda t, o: t.float(), lambda t, o: t - o.sum(), lambda t, o: 2 * t.sin(), lambda t, o: t.exp() - t.exp(),
)  # fmt: skip


def view_of(t: Tensor, pick: Pick) -> Tensor:
    if not t.dim():
        return pick.choice(POINT_VIEWS)(t)
    d = pick.randrange(t.dim())
    view = pick.choice(VIEWS)
    try:
        return view(t, d, t.shape[d], pick)
    except (RuntimeError, IndexError, ValueError):  # this tensor has no such view
        return t


def write(t: Tensor, other: Tensor, pick: Pick) -> None:
    pick.choice(WRITES)(t, other if other.shape == t.shape else other.sum(), pick)


def program(seed: int) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        pick = Pick(seed)
        pool = [x, y]
        for _ in range(pick.randrange(4, 16)):
            t, kind = pick.choice(pool), pick.random()
            if kind < 0.4:
                pool.append(view_of(t, pick))
            elif kind < 0.68:
                write(t, pick.choice(pool), pick)
            else:
                pool.append(pick.choice(READS)(t, pick.choice(pool)))
        return pick.choice(pool), pick.choice(pool) * 1, pool[-1], pick.choice(pool)

    return f
