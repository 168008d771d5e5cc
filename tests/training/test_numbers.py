"""Values, dtypes, layouts and aliases of training programs, compiled and eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensorplay as tp
from tests.training.programs import agree, caught, grads, leaf, mlp, see

LOW = 2e-2  # of what bfloat16 computed


def lowered():
    return torch.autocast("cpu", dtype=torch.bfloat16)


# ---- autocast --------------------------------------------------------------------------------------------------------


def test_autocast_around():
    def f(c):
        m, x = mlp(), leaf(4, 6)
        cm = c(m)
        with lowered():
            y = cm(x)
            loss = F.mse_loss(y.float(), torch.ones(4, 3))
        loss.backward()
        return y, x.grad, grads(m)

    agree(f, tolerance=LOW)


def test_autocast_inside_nested_and_switched_off():
    def off(a, b):
        y = a @ b
        with torch.autocast("cpu", enabled=False):
            return y.float() @ y.float().t(), y

    def nested(a, b):
        with lowered():
            y = a @ b
            with torch.autocast("cpu", dtype=torch.float16):
                return y @ b.t(), y

    def program(c, f, outside):
        a, b = leaf(4, 6), leaf(6, 5)
        g = c(f)
        with outside:
            z, y = g(a, b)
        (z.float().sum() + y.float().sum()).backward()
        return z, y, a.grad, b.grad

    agree(lambda c: program(c, off, lowered()), tolerance=LOW)
    agree(lambda c: program(c, nested, torch.autocast("cpu", enabled=False)), tolerance=LOW)


def test_autocast_of_convolution_and_attention():
    def convolution(c):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
        cm, x = c(m), leaf(2, 3, 8, 8)
        with lowered():
            loss = F.cross_entropy(cm(x), torch.tensor([0, 1]))
        loss.backward()
        return loss, [(g.dtype, g.stride()) for g in grads(m)]

    def attention(c):
        f = c(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        given = [leaf(2, 2, 5, 8, seed=k) for k in range(3)]
        with lowered():
            y = f(*given)
        y.float().sum().backward()
        return y, [t.grad for t in given]

    agree(convolution, tolerance=LOW)
    agree(attention, tolerance=LOW)


def test_second_derivatives_run_under_the_modes_of_the_forward():
    def cast(c):
        a, b = leaf(4, 6), leaf(6, 5)
        f = c(lambda a, b: a @ b)
        with lowered():
            y = f(a, b)
        (g,) = torch.autograd.grad(y.float().pow(2).sum(), a, create_graph=True)
        (h,) = torch.autograd.grad(g.pow(2).sum(), b)
        return y, g, h

    def partly_recorded(x):
        y = x * 2  # a constant of the derivative
        with torch.enable_grad():
            return (y * x).sin()

    def mode(c):
        x, f = leaf(4), c(partly_recorded)
        with torch.no_grad():
            z = f(x)
        (g,) = torch.autograd.grad(z.sum(), x, create_graph=True)
        return z, g.detach(), torch.autograd.grad(g.sum(), x)

    agree(cast, tolerance=LOW)
    agree(mode)


def test_gradient_scaler_and_clipping():
    def f(c):
        m = mlp()
        cm, optimizer = c(m), torch.optim.SGD(m.parameters(), 0.1)
        scaler, out = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2), []
        for k in range(4):
            optimizer.zero_grad()
            with lowered():
                loss = cm(leaf(4, 6, seed=k, grad=False)).pow(2).mean() * (torch.inf if k == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            out += [see(loss), see(norm), scaler.get_scale()]
        return out, list(m.parameters())

    agree(f, tolerance=LOW)


# ---- outputs and inputs ------------------------------------------------------------------------------------------------


def test_outputs_that_alias():
    def f(c):
        x = leaf(4, 6)
        out = c(lambda x: (x, x.view(-1), x.t(), x[1:], (y := x.sin()), y.view(-1), y[0], x.detach()))(x)
        sum(t.sum() for t in out[:-1]).backward()
        aliases = [t._is_view() for t in out], out[0] is x, [t._base is x for t in out[1:4]], out[5]._base is out[4]
        return out, x.grad, aliases

    agree(f)


def test_writes_to_outputs():
    def f(c):
        x = leaf(4, 6)
        y, z = c(lambda x: (x.sin(), x.cos()))(x)
        y.mul_(2)
        z[0].zero_()
        (y + z).sum().backward()
        return y, z, x.grad

    def needed(c):  # by the derivative of exp
        y = c(lambda x: x.exp())(leaf(4))
        y.mul_(2)
        return caught(lambda: y.sum().backward())

    def view_of_input(c):
        x = leaf(4, 6)
        h = x * 1
        y = c(lambda h: h.view(24))(h)
        y.mul_(2)
        (h.sum() + y.sum()).backward()
        return h, y, x.grad, y._is_view()

    agree(f)
    agree(needed)
    agree(view_of_input)


def test_writes_to_inputs():
    def buffer(c):
        def f(x, b):
            b.add_(x.detach())
            return (x * b).sum()

        x, b = leaf(4), torch.ones(4)
        c(f)(x, b).backward()
        return b, x.grad, b._version

    def nonleaf(c):
        def f(h):
            h.mul_(2)
            return h.sin()

        x = leaf(4)
        h = x * 1
        y = c(f)(h)
        (y.sum() + h.sum()).backward()
        return h, x.grad, h._version

    def from_leaf(c):
        def f(x, b):
            b.add_(x)
            return (x * b).sum()

        x, b = leaf(4), torch.ones(4)
        c(f)(x, b).backward()
        return b, x.grad, b._version

    agree(buffer)
    agree(nonleaf, falls_back="require")
    agree(from_leaf, falls_back="require")

    def onto_a_leaf(c):
        x = leaf(4)
        return caught(lambda: c(lambda x: x.mul_(2))(x)), x, x._version

    agree(onto_a_leaf)


def test_dtypes_of_outputs_and_tangents():
    def integers(c):
        x = leaf(4)
        y, *rest = c(lambda x: (x.sin(), x.argmax(), x > 0, x.long()))(x)
        y.sum().backward()
        return y, rest, x.grad

    def complex_(c):
        x = leaf(4, dtype=torch.complex64)
        y = c(lambda x: x * x.conj() * (1 + 2j))(x)
        y.backward(torch.ones(4) * (1 + 1j))
        return y, x.grad

    def mixed(c):
        x, y, s = leaf(4, dtype=torch.float64), leaf(4, dtype=torch.bfloat16), leaf(dtype=torch.float64)
        z = c(lambda x, y, s: (x * y).float() * s)(x, y, s)
        z.sum().backward()
        return z, x.grad, y.grad, s.grad

    agree(integers)
    agree(complex_, falls_back="back end")
    agree(mixed)


def test_layouts_of_tangents_and_leaves():
    def f(c):
        x, g = leaf(4, 6), c(lambda x: x.sin())
        for tangent in (torch.ones(6, 4).t(), torch.ones(()).expand(4, 6), torch.ones(8, 12)[::2, ::2]):
            g(x).backward(tangent)
        t = leaf(6, 4).detach().t().requires_grad_()
        for _ in range(2):
            g(t).sum().backward()
        return x.grad, t.grad

    def channels_last(c):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).to(memory_format=torch.channels_last)
        x = leaf(2, 3, 8, 8).detach().to(memory_format=torch.channels_last).requires_grad_()
        y = c(m)(x)
        y.sum().backward()
        return y, x.grad, grads(m)

    agree(f)
    agree(channels_last)


def test_batched_tangents():
    def f(c):
        x, g = leaf(4), c(lambda x: x.sin() * 2)
        rows = torch.autograd.grad(g(x), x, torch.eye(4), is_grads_batched=True)
        return rows, torch.autograd.functional.jacobian(c(lambda x: x.sin() * x.sum()), x, vectorize=True)

    agree(f)


def test_gradcheck():
    f = tp.compile(lambda x, y: (x.sin() * y).exp(), strict_native=True)
    given = leaf(3, dtype=torch.float64), leaf(3, seed=4, dtype=torch.float64)
    assert torch.autograd.gradcheck(f, given) and torch.autograd.gradgradcheck(f, given)


# ---- models and their state --------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, i):
        return self.head(self.embedding(i))


def test_tied_and_frozen_parameters():
    def tied(c):
        torch.manual_seed(0)
        m = Tied()
        cm = c(m)
        for _ in range(2):
            F.cross_entropy(cm(torch.tensor([1, 2, 9, 1])), torch.tensor([0, 1, 2, 3]), label_smoothing=0.1).backward()
        return grads(m)

    def frozen(c):
        m, out = mlp(), []
        cm = c(m)
        for flag in (True, False, True, False):
            m[0].weight.requires_grad_(flag)
            m.zero_grad()
            x = leaf(4, 6)
            cm(x).sum().backward()
            out.append(see([x.grad, grads(m)]))
        return out

    agree(tied)
    (cm,) = agree(frozen)
    assert tp.testing.N(cm) == 2


def test_parameters_that_change_between_calls():
    def f(c):
        m, out = mlp(), []
        cm = c(m)
        for k in range(4):
            if k == 1:
                m[0].weight = nn.Parameter(m[0].weight.detach() * 2)
            elif k == 2:
                m[0].weight.data = m[0].weight.data * 3
            elif k == 3:
                m.load_state_dict(mlp(1).state_dict())
            m.zero_grad(set_to_none=k % 2 == 0)
            cm(leaf(4, 6)).sum().backward()
            out.append(see(grads(m)))
        return out

    agree(f)


def test_empty_batch_and_empty_results():
    def f(c):
        m, x = mlp(), leaf(0, 6)
        y = c(m)(x)
        y.sum().backward()
        return y, x.grad, grads(m)

    agree(f)


def test_a_condition_is_kept_along_a_row():
    """The backward of `where` reads its condition before and after the sum along the row."""

    def f(w):
        u = w.softmax(-1)
        h = torch.where(u > 0, u, w)
        e = h.sum(1, keepdim=True).expand_as(h)
        return torch.stack([e, h]).sum(0) * 1.0, u, torch.maximum(u, w)

    def program(c):
        w = leaf(2, 3, 3)
        c(f)(w)[0].pow(2).sum().backward()
        return w.grad

    agree(program)


@pytest.mark.parametrize("functional", (True, False))
def test_moving_averages_and_clipping_compiled(functional):
    def average(c):
        m, e = mlp(), mlp(1)

        @torch.no_grad()
        def update(decay):
            for a, b in zip(e.parameters(), m.parameters(), strict=True):
                a.lerp_(b, 1 - decay) if functional else a.mul_(decay).add_(b, alpha=1 - decay)

        f = c(update)
        for _ in range(3):
            f(0.9)
        return list(e.parameters()), [p.grad for p in e.parameters()]

    def clip(c):
        m, out = mlp(), []
        f = c(lambda: nn.utils.clip_grad_norm_(m.parameters(), 0.5, foreach=functional))
        for k in range(3):
            m.zero_grad()
            m(leaf(4, 6, seed=k)).pow(2).sum().backward()
            out.append(see([f(), grads(m)]))
        return out

    agree(average)
    agree(clip)
