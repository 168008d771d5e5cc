"""Functions that differentiate inside: whole training steps, accumulation, `grad` read and written, gradient penalties."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

import tensorplay as tp
from tensorplay.compiled import compiled_of

from .sequences import CASES, T, case, check

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(6, 1, generator=torch.Generator().manual_seed(2))
XS = [(T(1, 2, 3),), (T(-1, 2, -3),), (T(1, 2, 3),)]
NATIVE = {}


def native(f):
    NATIVE[f.__name__] = f
    return case(f)


def r(*values):
    return T(*values).requires_grad_()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def look(m):
    """Parameters, gradients and buffers as they are now."""
    return lambda: [(p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in m.parameters()] + [
        b.clone() for b in m.buffers()
    ]


def training(make, result=torch.Tensor.detach, to_none=True, m=None):
    m = m or net()
    optimizer = make(m.parameters())

    def step(x, y):
        optimizer.zero_grad(set_to_none=to_none)
        loss = F.mse_loss(m(x), y)
        loss.backward()
        optimizer.step()
        return result(loss)

    return step, [(X * (1 + 0.1 * k), Y) for k in range(4)], look(m)


@native
def a_step_of_sgd():
    return training(lambda p: optim.SGD(p, 0.1))


@case
def a_step_with_momentum():
    return training(lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True))


@case
def a_step_that_keeps_its_gradients():
    return training(lambda p: optim.SGD(p, 0.1), to_none=False)


@native
def a_step_that_returns_the_loss():
    return training(lambda p: optim.SGD(p, 0.1), result=lambda loss: loss)


@case
def a_step_that_returns_a_number():
    return training(lambda p: optim.SGD(p, 0.1), result=torch.Tensor.item)


@case
def a_step_of_adamw():
    return training(lambda p: optim.AdamW(p, 0.01))


@native
def a_step_with_batch_norm_and_dropout():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
    return training(lambda p: optim.SGD(p, 0.1), m=m)


@case
def a_step_through_a_checkpoint():
    m = net()

    def f(x, y):
        loss = F.mse_loss(checkpoint(m, x, use_reentrant=False), y)
        loss.backward()
        return loss.detach()

    return f, [(X, Y), (X, Y)], look(m)


@native
def gradients_accumulate_until_they_are_taken_away():
    m = net()

    def f(x, y):
        loss = F.mse_loss(m(x), y)
        loss.backward()
        return loss.detach()

    return f, [(X, Y), (X, Y), (X * 2, Y), m.zero_grad, (X, Y), (X, Y)], look(m)


@case
def two_backwards_and_a_clip():
    m = net()

    def f(x, y):
        loss = F.mse_loss(m(x), y)
        loss.backward(retain_graph=True)
        (loss * 2).backward()
        norms = [p.grad.norm() for p in m.parameters()]
        nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        return loss.detach(), norms

    return f, [(X, Y), (X, Y), (X * 2, Y)], look(m)


@case
def the_gradient_of_an_argument():
    def f(x):
        x.grad = None
        (x**2).sum().backward()
        return x.grad * 2

    xs = [r(1, 2, 3), r(1, 2, 4)]
    return f, [(xs[0],), (xs[1],), (xs[0],)], lambda: [x.grad for x in xs]


@native
def gradients_that_autograd_gives_twice_are_two_tensors():
    def f(x, y):
        (x + y).sum().backward()
        x.grad.mul_(3)
        return x.grad, y.grad

    a, b = (r(1, 2, 3), r(1, 2, 3)), (r(1, 2, 3), r(1, 2, 3))
    return f, [a, b, a], lambda: [x.grad for x in (*a, *b)]


@native
def a_gradient_that_is_given_is_copied():
    x, v = r(1, 2, 3), T(1, 1, 2)

    def f(x, v):
        (x * 1.0).backward(v)
        v.mul_(2)
        return x.grad

    return f, [(x, v), (x, v)], lambda: (x.grad, v)


@case
def a_leaf_made_inside():
    def f(x):
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (y * y).sum().backward()
        return y.grad

    return f, XS


@native
def a_derivative_of_a_derivative():
    def f(x):
        y = x.detach().requires_grad_()
        (g,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), y)
        return g.detach(), h

    return f, XS


@native
def a_gradient_penalty():
    m = net()

    def f(x, y):
        x = x.detach().requires_grad_()
        out = m(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + (g.norm(dim=1) - 1).pow(2).mean()

    return f, [(X, Y), (X * 2, Y)], look(m)


@case
def some_inputs_alone():
    a, b = r(1, 2, 3), r(1, 2, 3)

    def f(x):
        (a * b * x).sum().backward(inputs=[a])
        return a.grad

    return f, XS, lambda: (a.grad, b.grad)


@case
def a_branch_on_a_gradient():
    a = r(1, 2, 3)

    def f(x):
        loss = (a * x).sum()
        loss.backward()
        return loss.detach() * 2 if a.grad.sum() > 0 else loss.detach()

    return f, XS, lambda: a.grad


@native
def the_layout_of_a_gradient_is_its_leafs():
    a = torch.randn(4, 3).t().requires_grad_()

    def f(x):
        (a.sum(0) * torch.ones(4)).sum().backward()
        return a.grad

    return f, XS, lambda: (a.grad.clone(), a.grad.stride())


@case
def a_gradient_that_is_deleted():
    a = r(1, 2, 3)

    def f(x):
        (a * x).sum().backward()
        g = a.grad.clone()
        del a.grad
        return g

    return f, XS, lambda: a.grad


@case
def a_gradient_that_is_assigned_and_written():
    a = r(1, 2, 3)

    def f(x):
        a.grad = x
        a.grad.mul_(2)
        return x * 1

    xs = [T(1, 2, 3), T(2, 2, 2)]
    return f, [(x,) for x in xs], lambda: (a.grad, [x.clone() for x in xs])


@case
def a_gradient_that_does_not_fit():
    a = r(1, 2, 3)

    def f(x):
        a.grad = x[:1] * 2
        return a.grad

    return f, XS, lambda: a.grad


@case
def nothing_to_differentiate():
    def f(x):
        x.sum().backward()
        return x

    return f, XS


@case
def an_argument_that_the_function_makes_require_grad():
    def f(x):
        (x.requires_grad_() * 2).sum().backward()
        return x

    xs = [T(1, 2, 3), T(4, 5, 6)]
    return f, [(xs[0],), (xs[1],), (xs[0],)], lambda: [(x.requires_grad, x.grad) for x in xs]


@case
def an_argument_that_gets_a_history():
    w = r(1, 2, 3)

    def f(x):
        (g,) = torch.autograd.grad((w * 2).sum(), w)
        x.mul_(w)
        return g

    xs = [T(1, 2, 3), T(4, 5, 6)]
    return f, [(x,) for x in xs], lambda: [(x.detach(), x.requires_grad) for x in xs]


@case
def no_scalar():
    def f(x):
        (x * 2).backward()
        return x

    return f, [(r(1, 2),)]


@case
def a_graph_from_before_the_call():
    w = r(1, 2, 3)

    def f(h):
        h.sum().backward()
        return h.detach()

    hs = [w * 2, w * 3]
    return f, [(hs[0],), (hs[1],), (hs[0],)], lambda: w.grad


@case
def hooks_on_gradients():
    w, log = r(1, 2, 3), []
    w.register_post_accumulate_grad_hook(lambda p: log.append(1))
    v = r(1, 2, 3)
    v.register_hook(lambda g: g * 2)

    def f(x):
        (w * x + v).sum().backward()
        return w.grad, v.grad

    return f, XS, lambda: (w.grad, v.grad, len(log))


@native
def hooks_that_come_and_go():
    w, handles = r(1, 2, 3), []

    def f(x):
        return torch.autograd.grad((w * x).sum(), [w])[0]

    def attach():
        handles.append(w.register_hook(lambda g: g * 10))

    return f, [*XS, attach, *XS, lambda: handles.pop().remove(), *XS, attach, *XS]


@native
def hooks_that_come_while_training():
    m, handles = net(), []
    f, steps, *looks = training(lambda p: optim.SGD(p, lr=0.1), m=m)

    def attach():
        handles.append(m[0].weight.register_hook(lambda g: g * 10))

    def after():
        handles.append(m[2].weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(2), None)[1]))

    return f, [*steps, attach, *steps, lambda: handles.pop().remove(), *steps, after, *steps], *looks


@pytest.mark.parametrize("name", CASES[__name__])
def test_gradients(name):
    check(CASES[__name__][name])


@pytest.mark.parametrize("name", ["an_argument_that_the_function_makes_require_grad", "an_argument_that_gets_a_history"])
def test_arguments_that_begin_to_require_grad_run_on_torch(name):
    found = check(CASES[__name__][name], backend="stax", tolerance=1e-5)
    assert any("require" in f.reason for f in found.fallbacks), found.fallbacks


@pytest.mark.parametrize("name", NATIVE)
def test_gradients_through_kernels(name):
    found = check(NATIVE[name], backend="stax", tolerance=1e-5)
    assert not [f for f in found.fallbacks if "back end" in f.reason], found.fallbacks


def test_a_training_step_is_one_native_program_with_stable_versions():
    m = net()
    optimizer = optim.SGD(m.parameters(), 0.1)

    @tp.compile(strict_native=True)
    def step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(m(x), y)
        loss.backward()
        optimizer.step()
        return loss

    losses = [step(X, Y).item() for _ in range(10)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert len(compiled_of(step).live_versions()) == 2  # without gradients before it, and with


def test_the_loss_of_a_step_is_spent_as_in_eager():
    a = r(1, 2, 3)

    def f(x):
        loss = (a * x).pow(2).sum()
        loss.backward()
        return loss

    for g in (f, tp.compile(f, backend="eager")):
        loss = g(T(1, 2, 3))
        assert loss.requires_grad and not loss.is_leaf
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_capture_leaves_gradients_alone():
    a = r(1, 2, 3)
    a.grad = T(1, 1, 1)
    kept, version = a.grad, a.grad._version
    from tensorplay.capture.tracer import capture

    capture(lambda x: (a * x).sum().backward(), (T(1, 2, 3),), {})
    assert a.grad is kept and kept._version == version and torch.equal(kept, T(1, 1, 1))
