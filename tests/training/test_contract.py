"""Autograd's contract around a compiled region: hooks, graphs that are kept, run twice, run elsewhere, or never."""

from __future__ import annotations

import gc
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensorplay as tp
from tensorplay.compiled import compiled_of
from tests.training.programs import agree, caught, grads, leaf, mlp, see

HISTORY = "Tensor.grad_fn reads the history"


# ---- hooks -----------------------------------------------------------------------------------------------------------


def test_hooks_on_parameters():
    def f(c):
        m, seen = mlp(), []
        m[0].weight.register_hook(lambda g: seen.append(see(g)) or g * 2)
        m[2].bias.register_post_accumulate_grad_hook(lambda p: seen.append(see(p.grad)))
        cm = c(m)
        for k in range(2):
            cm(leaf(4, 6, seed=k)).sum().backward()
        return seen, grads(m)

    agree(f)


def test_hooks_on_inputs_and_outputs():
    def f(c):
        x = leaf(4)
        x.register_hook(lambda g: g + 1)
        y = c(lambda x: x.sin())(x)
        y.register_hook(lambda g: g * 5)
        y.retain_grad()
        y.sum().backward()
        return x.grad, y.grad

    agree(f)


def test_hooks_inside_run_eagerly():
    def inside(c, attach):
        def f(x):
            y = x * 2
            attach(y)
            return y.sin()

        x = leaf(4)
        c(f)(x).sum().backward()
        return x.grad

    agree(lambda c: inside(c, lambda y: y.register_hook(lambda g: g * 3)), falls_back="register_hook")
    agree(lambda c: inside(c, lambda y: y.retain_grad()), falls_back="retain_grad")


def test_hooks_on_modules():
    def f(c, backward):
        m, seen = mlp(), []
        m[1].register_forward_hook(lambda mod, i, o: o * 2)
        m[0].register_forward_pre_hook(lambda mod, i: (i[0] + 1,))
        if backward:
            m[2].register_full_backward_hook(lambda mod, gi, go: (gi[0] * 2,))
            m.register_full_backward_pre_hook(lambda mod, go: (go[0] * 3,))
            m.register_full_backward_hook(lambda mod, gi, go: seen.append(see((gi, go))))
        cm, x = c(m), leaf(4, 6)
        for _ in range(2):
            cm(x).sum().backward()
        return seen, x.grad, grads(m)

    agree(lambda c: f(c, False))
    agree(lambda c: f(c, True), falls_back=HISTORY)


def test_hooks_on_saved_tensors_see_what_the_call_saves():
    def f(c, around):
        m, out = mlp(), []
        cm, x = c(m), leaf(4, 6)
        for _ in range(12):  # each time other hooks: they are no part of the key
            with around():
                y = cm(x)
            y.sum().backward()
            out.append(see([y, x.grad]))
        return out, grads(m)

    packed = []

    def counted():
        return torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t)

    for around in (torch.autograd.graph.save_on_cpu, lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here")):
        (cm,) = agree(lambda c, around=around: f(c, around))
        assert tp.testing.N(cm) == 1
    (cm,) = agree(lambda c: f(c, counted))
    assert tp.testing.N(cm) == 1
    first = len(packed)
    with counted():
        y = cm(leaf(4, 6))
    held = len(y.grad_fn.saved_tensors)
    assert len(packed) - first == held and held > 0  # so neither capture nor compilation called them


# ---- graphs that are kept, and derivatives of derivatives --------------------------------------------------------------


def test_retained_graphs():
    def f(c):
        x = leaf(4)
        y = c(lambda x: x.exp().sin())(x).sum()
        for keep in (True, True, False):
            y.backward(retain_graph=keep)
        return x.grad, caught(y.backward)

    agree(f)


def test_gradient_penalty_and_third_derivatives():
    def penalty(c):
        m, x = mlp(), leaf(4, 6)
        y = c(m)(x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        ((g.norm(dim=1) - 1) ** 2).mean().backward()
        return y, g, x.grad, grads(m)

    def third(c):
        x = leaf(4)
        found = [c(lambda x: (x.sin() * x**3).sum())(x)]
        for _ in range(3):
            found += torch.autograd.grad(found[-1].sum(), x, create_graph=True)
        return [t.detach() for t in found]

    def subset(c):
        x, w = leaf(4), leaf(4, seed=1)
        y = c(lambda x, w: (x * w).sin().sum())(x, w)
        (g,) = torch.autograd.grad(y, [x], create_graph=True)
        return torch.autograd.grad(g.sum(), [w, x])

    agree(penalty)
    agree(third)
    agree(subset)


def test_subsets_of_inputs():
    def f(c):
        a, b, d = leaf(3), leaf(3, seed=1), leaf(3, seed=2)
        g = c(lambda a, b, d: a * b)
        return (
            torch.autograd.grad(g(a, b, d).sum(), [b, d], allow_unused=True),
            caught(lambda: torch.autograd.grad(g(a, b, d).sum(), [b, d])),
            torch.autograd.grad(g(a, b, d).sum(), [b, d], allow_unused=True, materialize_grads=True),
        )

    agree(f)


def test_partial_use_of_outputs():
    def f(c):
        g, out = c(lambda x, w: (x.sin(), w * 2, x * w)), []
        for used in ((0,), (1,), (2,), (0, 2)):
            x, w = leaf(4), leaf(4, seed=1)
            outs = g(x, w)
            sum(outs[k].sum() for k in used).backward()
            out.append(see([x.grad, w.grad]))
        return out

    agree(f)


def test_backward_of_one_result_after_another():
    def apart(c):
        x, w = leaf(4), leaf(4, seed=1)
        a, b, d = c(lambda x, w: (x.exp(), w * 2, x.detach() * w))(x, w)
        for t in (b, d, a):
            t.sum().backward()
        return x.grad, w.grad, caught(lambda: a.sum().backward())

    def networks(c):
        m, d, x = mlp(), mlp(1), leaf(4, 6, grad=False)
        f = c(lambda x: (m(x).mean(), d(x).pow(2).mean()))
        for _ in range(2):
            for t in f(x):
                t.backward()
        return grads(m, d)

    def together(c):  # they share a part of the graph
        x = leaf(4)
        a, b, d = c(lambda x: ((h := x.exp()).sin().sum(), h.cos().sum(), x.tanh().sum()))(x)
        a.backward()
        d.backward()
        return x.grad, caught(b.backward)[0]

    def nothing_saved(c):  # they share a part of the graph that keeps no tensor
        x = leaf(4, 6)
        a, b = c(lambda x: ((h := x.t() + 1) * 2, h.sum(0)))(x)
        a.sum().backward()
        b.sum().backward()
        return x.grad

    def other_layouts(c):  # of the one gradient that is there, and of the sum that it stands for
        f, out = c(lambda x: ((h := x.permute(1, 2, 0) * 1).sum((0, 1)), h.permute(2, 0, 1).sin(), (h.mT @ h).sum(0))), []
        for k in range(3):
            x = leaf(2, 3, 4)
            f(x)[k].sum().backward()
            out.append(see(x.grad))
        return out

    def changed(c):
        x, b = leaf(4), torch.ones(4)
        u, v = c(lambda x, b: ((x * b).sum(), (x.sin() * b * b).sum()))(x, b)
        u.backward()
        b.add_(1)
        return caught(v.backward)

    def again(c):
        x = leaf(4)
        a, b = c(lambda x: ((x**3).sum(), x.sin().sum()))(x)
        b.backward()
        (g,) = torch.autograd.grad(a, x, create_graph=True)
        return g.detach(), torch.autograd.grad(g.sum(), x)

    for program in (apart, networks, together, nothing_saved, other_layouts, changed, again):
        agree(program)


# ---- where and when backward runs --------------------------------------------------------------------------------------


def test_threads_interleaving_and_grad_mode():
    def threads(c):
        f, found = c(lambda x: (x.sin() * x).sum()), [None] * 6

        def work(k):
            x = leaf(50, seed=k)
            for _ in range(5):
                f(x).backward()
            found[k] = see(x.grad)

        workers = [threading.Thread(target=work, args=(k,)) for k in range(6)]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
        return found

    def interleaved(c):
        f, x, z = c(lambda x: x.exp().sin()), leaf(4), leaf(4, seed=5)
        a, b = f(x), f(z)
        b.sum().backward()
        d = f(x)
        a.sum().backward()
        with torch.no_grad():
            d.sum()
            torch.autograd.backward(d, torch.ones(4))
        return x.grad, z.grad

    def deleted(c):
        x = leaf(4)
        y, z = c(lambda x: (x.sin(), x.exp()))(x)
        s = y.sum()
        del y, z
        gc.collect()
        worker = threading.Thread(target=s.backward)
        worker.start()
        worker.join()
        return x.grad

    agree(threads)
    agree(interleaved)
    agree(deleted)


def test_grad_mode_that_the_function_turns_on():
    def f(x):
        with torch.enable_grad():
            return x.sin(), x.detach() * 2

    def program(c):
        x, g = leaf(4), c(f)
        with torch.no_grad():
            y, z = g(x)
        y.sum().backward()
        return y, z, x.grad

    agree(program)


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        raise ValueError("no gradient today")


def test_exceptions_in_backward():
    def f(c):
        x = leaf(3)
        return caught(lambda: c(lambda x: Refuses.apply(x).sum())(x).backward()), x.grad

    agree(f, falls_back="no gradient today")

    def tangents(c):
        y = c(lambda x: x.sin())(leaf(4))
        return [caught(lambda t=t: y.backward(t, retain_graph=True)) for t in (torch.ones(3), None, torch.ones(4).double())]

    agree(tangents)


@pytest.mark.filterwarnings("ignore:Anomaly")
def test_anomaly_mode_names_the_operator():
    def f(c):
        x = leaf(3)
        with torch.autograd.detect_anomaly(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return caught(lambda: c(lambda x: (x * 0).sqrt().sum() * x.sum())(x).backward())

    (cf,) = agree(f, falls_back="anomaly mode")
    x = leaf(3)
    cf(x).backward()  # outside of the mode it is compiled
    assert compiled_of(cf).versions[-1].fallback is None


# ---- checkpoints and torch.func ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpoint_around(reentrant):
    from torch.utils.checkpoint import checkpoint

    def f(c):
        m, dropped = mlp(), c(lambda x: F.dropout(x * x, 0.4).sin())
        cm, out = c(m), []
        for k in range(4):
            x = leaf(4, 6, seed=k)
            torch.manual_seed(k)
            y = checkpoint(cm, checkpoint(dropped, x, use_reentrant=reentrant), use_reentrant=reentrant)
            y.sum().backward()
            out.append(see([y, x.grad, torch.rand(2)]))
        return out, grads(m)

    for made in agree(f):
        assert tp.testing.N(made) <= 2  # one with grad mode, one without


def test_checkpoint_inside():
    from torch.utils.checkpoint import checkpoint

    def f(c, reentrant):
        m, x = mlp(), leaf(4, 6)
        torch.manual_seed(4)
        y = c(lambda x: checkpoint(lambda x: F.dropout(m(x), 0.5), x, use_reentrant=reentrant) * 2)(x)
        y.sum().backward()
        return y, x.grad, grads(m), torch.rand(2)

    agree(lambda c: f(c, False))
    agree(lambda c: f(c, True), falls_back="use_reentrant=True")


def test_func_inside():
    def program(c, f, *sizes):
        given = [leaf(*size, seed=k) for k, size in enumerate(sizes)]
        y = c(f)(*given)
        sum(t.sum() for t in (y if isinstance(y, tuple) else (y,))).backward()
        return y, [t.grad for t in given]

    agree(lambda c: program(c, lambda x, w: torch.func.grad(lambda x: (x.sin() @ w).sum())(x) * 2, (4,), (4,)))
    agree(lambda c: program(c, lambda x, w: torch.func.vmap(lambda r: (r * w).sum().sin())(x), (4, 5), (5,)))
    agree(lambda c: program(c, lambda x: torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),)), (4,)))


def test_func_around_runs_eagerly():
    def f(x):
        return (x.sin() * x.sum()).sum()

    x = leaf(3, 4, grad=False)
    agree(lambda c: torch.func.grad(c(f))(x), falls_back="torch.func transform")
    agree(lambda c: torch.func.vmap(c(f))(x), falls_back="torch.func transform")
    agree(lambda c: torch.func.jvp(c(f), (x,), (x * 2,)), falls_back="torch.func transform")


def test_functional_call_and_gradients_of_each_sample():
    m = mlp()

    def call(c):
        given = {k: p.detach().clone().requires_grad_() for k, p in m.named_parameters()}
        x = leaf(4, 6)
        c(lambda given, x: torch.func.functional_call(m, given, (x,)))(given, x).sum().backward()
        return x.grad, {k: p.grad for k, p in given.items()}, grads(m)

    def each(c):
        def loss(given, x):
            return torch.func.functional_call(m, given, (x,)).pow(2).sum()

        given = {k: p.detach() for k, p in m.named_parameters()}
        f = c(lambda given, x: torch.func.vmap(torch.func.grad(loss), (None, 0))(given, x))
        return f(given, leaf(4, 6, grad=False))

    agree(call)
    agree(each)


# ---- custom functions --------------------------------------------------------------------------------------------------


class Sorted(torch.autograd.Function):
    """Two results, one of which has no gradient."""

    @staticmethod
    def forward(ctx, x):
        order = x.argsort()
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(order)
        return x.sin(), order

    @staticmethod
    def backward(ctx, g, _):
        return g * 2 + ctx.saved_tensors[0]


class Peeks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3 if ctx.saved_tensors[0].sum() > 0 else g


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g * 2 * ctx.saved_tensors[0]


class Partly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, k):
        ctx.k = k
        return x * k + y

    @staticmethod
    def backward(ctx, g):
        return g * ctx.k, None, None


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


def test_custom_functions():
    def order(c):
        x = leaf(4)
        y, i = c(lambda x: Sorted.apply(x * 2))(x)
        y.sum().backward()
        return y, i, x.grad

    def once(c):
        x = leaf(3)
        (g,) = torch.autograd.grad(c(lambda x: Once.apply(x).sum())(x), x, create_graph=True)
        return g.detach(), caught(lambda: torch.autograd.grad(g.sum(), x))[0]

    def partly(c):
        x, y = leaf(3), leaf(3, seed=1)
        c(lambda x, y: Partly.apply(x, y, 3).sum())(x, y).backward()
        return x.grad, y.grad

    def setup(c):
        x = leaf(3)
        c(lambda x: WithSetup.apply(x).sum())(x).backward()
        return x.grad

    def peeks(c):
        f, out = c(lambda x: Peeks.apply(x).sum()), []
        for sign in (1.0, -1.0):
            x = torch.full((3,), sign, requires_grad=True)
            f(x).backward()
            out.append(see(x.grad))
        return out

    for program in (order, once, partly, setup):
        agree(program)
    agree(peeks, falls_back="reads a value of a tensor")


def test_parametrized_modules():
    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).mT

    def f(c, register):
        torch.manual_seed(0)
        m = nn.Linear(4, 4)
        register(m)
        cm, x = c(m), leaf(3, 4)
        for _ in range(2):
            cm(x).sum().backward()
        return x.grad, grads(m), dict(m.named_buffers())

    from torch.nn.utils import parametrizations, parametrize

    agree(lambda c: f(c, lambda m: parametrize.register_parametrization(m, "weight", Symmetric())))
    agree(lambda c: f(c, parametrizations.spectral_norm))
