"""What needs data runs on torch with all that reads it; what stands in front of it is compiled."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F

import tensorplay as tp
from tensorplay.testing import eq, near


def front(x):
    return F.gelu(x * 2) + 1


PROGRAMS = {
    "mask": lambda x: front(x)[x > 0] * 3,
    "nonzero": lambda x: (front(x), (front(x) > 1).nonzero()),
    "masked_select": lambda x: torch.masked_select(front(x), x > 0).sum() + front(x).sum(),
    "unique": lambda x: torch.unique((front(x) * 4).round()),
    "unique rows": lambda x: torch.unique((front(x) * 4).round(), dim=0, return_counts=True),
    "where": lambda x: torch.where(front(x) > 1),
    "repeat_interleave": lambda x: torch.repeat_interleave(front(x), (x[:, 0] > 0).long() + 1, dim=0),
    "one_hot": lambda x: F.one_hot((front(x) > 1).long()) * 2,
    "bincount": lambda x: torch.bincount((front(x)[:, 0] > 1).long()),
    "a size that is read": lambda x: front(x)[x > 0] * x.shape[0] + front(x).chunk(2, 1)[0].numel(),
    "a result in several": lambda x: [t[t > 1] for t in front(x).split(3)],
    "an input beside it": lambda x: (x, front(x)[x > 0], x[x > 1]),
}


def explained(function, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = tp.compile(function)
        return compiled(*args), tp.explain(compiled)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_front_is_compiled(name):
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    got, about = explained(PROGRAMS[name], x)
    assert near(got, PROGRAMS[name](x), 1e-6)
    assert about.kernels and any("only the data tell" in f.reason for f in about.fallbacks)


def test_gradients_cross_the_cut():
    lin, x, y = torch.nn.Linear(8, 3), torch.randn(6, 8), torch.tensor([0, 1, 2, 0, 1, 2])

    def loss(x, keep):
        h = front(lin(x))
        return F.cross_entropy(h[keep], y[keep]) + h.sum()

    compiled = tp.compile(loss)
    for keep in (torch.tensor([1, 0, 1, 1, 0, 1]) > 0, torch.tensor([0, 0, 1, 0, 0, 0]) > 0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = torch.autograd.grad(compiled(x, keep), lin.parameters())
        want = torch.autograd.grad(loss(x, keep), lin.parameters())
        assert near(got, want, 1e-6)


def writes_behind(x):
    y = front(x)
    z = y[x > 0]
    y.add_(1)
    return z, y


def draws_behind(x):
    return torch.rand_like(front(x)[x > 0]), torch.rand(3)


@pytest.mark.parametrize("function", [writes_behind, draws_behind])
def test_where_the_order_matters_all_of_it_runs_on_torch(function):
    x = torch.randn(6, 8)
    torch.manual_seed(3)
    got, about = explained(function, x)
    torch.manual_seed(3)
    assert eq(got, function(x)) and not about.kernels


def test_strict_refuses_before_anything_runs():
    with pytest.raises(tp.StrictNativeError, match="only the data tell"):
        tp.compile(PROGRAMS["mask"], strict_native=True)(torch.randn(6, 8))
