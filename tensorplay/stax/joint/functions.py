"""Functions of torch whose own code asks for values of tensors, and what is recorded in their place.

In: a function that a captured graph calls.  Out: `FUNCTIONS`: a rule that computes the same without asking; it returns
NotImplemented for arguments that it does not cover.
Always: values, gradients and layouts are the function's; where the function raises, a check of the operators fails, and
eager runs and raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes <= 0 or tensor.dtype is not torch.int64:
        return NotImplemented  # as many classes as the largest index says
    zeros = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device)
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)


def prod(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    x = input if dtype is None else input.to(dtype)
    if not (torch.is_grad_enabled() and x.requires_grad and x.is_floating_point()) or not isinstance(dim, int | None):
        return NotImplemented
    return _Prod.apply(x, dim, keepdim)


class _Prod(torch.autograd.Function):
    """A product whose gradient is, as torch's, the quotient by each factor where none is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
        result = torch.prod(x) if dim is None else torch.prod(x, dim, keepdim)
        ctx.save_for_backward(x, result)
        ctx.dim, ctx.keepdim = dim, keepdim
        return result

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, result = ctx.saved_tensors
        if ctx.dim is not None and not x.dim():
            return g.clone(), None, None
        zeros = (x == 0).sum()
        if ctx.dim is None:
            others = torch.where(zeros > 1, 0, _of_others(g, x.contiguous().view(-1), 0).view_as(x))
        else:
            if not ctx.keepdim:
                g, result = g.unsqueeze(ctx.dim), result.unsqueeze(ctx.dim)
            others = _of_others(g, x, ctx.dim)
        return torch.where(zeros == 0, g * (result / x), others), None, None


def _of_others(g: Tensor, x: Tensor, dim: int) -> Tensor:
    """The gradient times the product of all factors but each one itself."""
    n = x.shape[dim]
    if n <= 1:
        return g.expand_as(x) if n else g * x
    ones = torch.ones_like(x.narrow(dim, 0, 1))
    before = torch.cat([ones, x.narrow(dim, 0, n - 1)], dim).cumprod(dim)
    behind = torch.cat([ones, x.narrow(dim, 1, n - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return g * (before * behind)


FUNCTIONS: dict[Any, Callable[..., Any]] = {F.one_hot: one_hot, torch.prod: prod, torch.Tensor.prod: prod}
