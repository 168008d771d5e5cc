"""Backward rows of activations and losses on ordinary and special values, against eager's own backward operators."""

from __future__ import annotations

import pytest
import torch

from tests.ops.test_special_values import FLOATS, pairs, values, verdict

aten = torch.ops.aten

# operator -> arguments behind (gradient, value), units in the last place that its formula may take
ACTIVATIONS: dict[str, tuple[tuple, int]] = {
    "tanh_backward": ((), 4), "sigmoid_backward": ((), 4), "threshold_backward": ((0,), 0), "gelu_backward": ((), 64), "silu_backward": ((), 64),
    "mish_backward": ((), 64), "leaky_relu_backward": ((0.01, False), 0), "hardtanh_backward": ((-1, 1), 0), "hardsigmoid_backward": ((), 1),
    "hardswish_backward": ((), 4), "softplus_backward": ((1, 20), 4), "hardshrink_backward": ((0.5,), 0), "softshrink_backward": ((0.5,), 0),
    "elu_backward": ((1.0, 1.0, 1.0, False), 8), "_prelu_kernel_backward": ((), 1), "mse_loss_backward": ((), 4), "smooth_l1_loss_backward": ((), 4),
    "huber_loss_backward": ((), 4), "soft_margin_loss_backward": ((), 8), "logit_backward": ((), 2), "logit_backward of a bound": ((0.125,), 2),
}  # fmt: skip


def grid(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Ordinary gradients beside every value, whole vectors of them: eager's remainder loops treat NaN in their own way."""
    v = values(dtype)
    g = torch.tensor([1.0, -2.0, 0.0, 0.25], dtype=dtype)
    return g.repeat_interleave(len(v)).repeat(32), v.repeat(len(g)).repeat(32)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str) -> None:
    extra, ulps = ACTIVATIONS[name]
    wrong = {}
    for dtype in FLOATS:
        g, x = grid(dtype)
        if name in ("gelu_backward", "silu_backward", "mish_backward"):  # products of huge and vanishing factors
            keep = x.abs() < (5 if name == "gelu_backward" else 30)
            g, x = g[keep], x[keep]
        if name in ("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward"):
            if dtype == torch.float16:  # eager rounds twice the difference, which overflows
                x = x.clamp(-1e4, 1e4)
            loss = (g, x, x.flip(0), 0, *((1.0,) if name != "mse_loss_backward" else ()))
            wrong[dtype] = verdict(getattr(aten, name).default, loss, ulps=ulps)
        elif name == "soft_margin_loss_backward":
            wrong[dtype] = verdict(aten.soft_margin_loss_backward.default, (g, x, g.sign(), 0), ulps=ulps)
        elif name == "_prelu_kernel_backward":
            wrong[dtype] = verdict(aten._prelu_kernel_backward.default, (g, x, g.flip(0)), ulps=ulps)
        else:
            wrong[dtype] = verdict(getattr(aten, name.split()[0]).default, (g, x, *extra), ulps=ulps)
    assert not {d: w for d, w in wrong.items() if w}


@pytest.mark.parametrize("dtype", FLOATS)
def test_log_sigmoid(dtype: torch.dtype) -> None:
    g, x = grid(dtype)
    _, buffer = aten.log_sigmoid_forward.default(x)
    assert not verdict(aten.log_sigmoid_backward.default, (g, x, buffer), ulps=16)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout(dtype: torch.dtype) -> None:
    g, _ = pairs(dtype)
    mask = torch.arange(len(g)) % 3 > 0
    assert not verdict(aten.native_dropout_backward.default, (g, mask, 2.0), ulps=1)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_losses_of_classes(reduction: int) -> None:
    x, target = torch.randn(5, 7), torch.tensor([0, 6, 3, -100, 2])
    weight = torch.rand(7)
    total = aten.nll_loss_forward.default(x, target, weight, reduction, -100)[1]
    g = torch.randn(5) if reduction == 0 else torch.tensor(1.5)
    assert not verdict(aten.nll_loss_backward.default, (g, x, target, weight, reduction, -100, total), ulps=2)
    image, classes = torch.randn(2, 7, 3, 4), torch.randint(0, 7, (2, 3, 4))
    total = aten.nll_loss2d_forward.default(image, classes, weight, reduction, -100)[1]
    g = torch.randn(2, 3, 4) if reduction == 0 else torch.tensor(1.5)
    assert not verdict(aten.nll_loss2d_backward.default, (g, image, classes, weight, reduction, -100, total), ulps=2)
    p, q = torch.rand(4, 5), torch.rand(4, 5)
    g = torch.randn(4, 5) if reduction == 0 else torch.tensor(1.5)
    assert not verdict(aten.binary_cross_entropy_backward.default, (g, p, q, None, reduction), ulps=8)


TESTED = {*ACTIVATIONS, "log_sigmoid_backward", "native_dropout_backward", "nll_loss_backward", "nll_loss2d_backward", "binary_cross_entropy_backward"}
