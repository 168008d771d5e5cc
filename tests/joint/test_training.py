"""Compiled training regions against eager: values, gradients, their absence, and autograd's contract."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import random
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensorplay as tp
from tensorplay.compiled import compiled_of
from tensorplay.stax.joint.flow import INFINITE, Network
from tensorplay.testing import BW, FW, eq, near, saved, targets


def comp(f, **options):
    options.setdefault("strict_native", True)
    return tp.compile(f, **options)


def fresh(*args):
    return [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]


def gradients(f, args, seed=0):
    """Outputs and gradients of one call, with the same random numbers and tangents each time."""
    xs = fresh(*args)
    torch.manual_seed(seed)
    out = f(*xs)
    outs = out if isinstance(out, tuple) else (out,)
    torch.manual_seed(seed + 1)
    live = [o for o in outs if o.requires_grad]
    torch.autograd.backward(live, [torch.randn_like(o) for o in live])
    return [o.detach() for o in outs], [x.grad for x in xs if isinstance(x, torch.Tensor)], [o.requires_grad for o in outs]


def same(f, *args, tolerance=1e-5, **options):
    cf = comp(f, **options)
    for seed in (0, 5):
        got, want = gradients(cf, args, seed), gradients(f, args, seed)
        assert near(got[0], want[0], tolerance) and got[2] == want[2]
        for a, b in zip(got[1], want[1], strict=True):
            assert (a is None) == (b is None)
            assert a is None or (near(a, b, tolerance) and a.stride() == b.stride() and a.dtype == b.dtype)
    return cf


def leaf(*size):
    return torch.randn(*size, requires_grad=True)


ACTIVATIONS = (
    "tanh sigmoid relu gelu silu mish elu selu celu leaky_relu hardtanh relu6 hardsigmoid hardswish softplus hardshrink "
    "softshrink logsigmoid softsign tanhshrink glu"
).split()
SPECIAL = (0.0, -0.0, 3.0, -3.0, 6.0, 0.5, -0.5, 20.0, 1e-40, -1e-40, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 88.0)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_activations_on_special_values(name, dtype):
    special = [v for v in SPECIAL if name != "gelu" or abs(v) != torch.inf]  # eager's vectors make NaN of gelu(inf)
    if dtype == torch.bfloat16:  # eager's two code paths for NaN differ where a condition chooses
        special = [v for v in special if v == v]
    x = torch.cat([torch.tensor(special), torch.linspace(-6, 6, 34)]).to(dtype)[:46].requires_grad_()
    same(lambda x: getattr(F, name)(x * 1), x, tolerance=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_losses(reduction):
    x, y, t = leaf(6, 20), leaf(6, 20), torch.tensor([0, 3, -100, 7, 19, 1])
    for loss in (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits):
        same(lambda x, y, loss=loss: loss(x * 1.5, y, reduction=reduction), x, y)
    same(lambda x, y: F.binary_cross_entropy(x.sigmoid(), y, reduction=reduction), x, torch.rand(6, 20))
    same(lambda x, w: F.cross_entropy(x, t, w, reduction=reduction, label_smoothing=0.1), x, torch.rand(20))
    same(lambda x: F.cross_entropy(x, t, reduction=reduction), x)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_normalizations(dtype):
    x, w, b = (t.to(dtype).detach().requires_grad_() for t in (leaf(4, 24, 5), leaf(24), leaf(24)))
    tolerance = 1e-4 if dtype == torch.float32 else 6e-2
    same(lambda x, w, b: F.group_norm(x, 8, w, b), x, w, b, tolerance=tolerance)
    same(lambda x, w, b: F.layer_norm(x.mT, (24,), w, b), x, w, b, tolerance=tolerance)
    same(lambda x, w: F.rms_norm(x.mT, (24,), w), x, w, tolerance=tolerance)
    if dtype == torch.float32:
        same(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), x, w, b, tolerance=tolerance)
        same(lambda x, w: F.batch_norm(x, torch.zeros(24), torch.ones(24), w, None, False), x, w, tolerance=tolerance)


def test_views_aliases_and_plain_outputs():
    x, y = leaf(6, 4), leaf(6, 4)
    same(lambda x: (x * 2).chunk(2), x)
    same(lambda x: ((z := x.exp()), z.view(-1), z.detach(), z[1:3] * 2), x)
    same(lambda x, y: (x.view(-1), (x + y).t(), (x > 0), x.argmax()), x, y)
    same(lambda x, y: (x.sin(), x.detach() * y.detach()), x, y)
    out = comp(lambda x: (x, x.t(), (x * 2)[0]))(x)
    assert out[0] is x and out[1]._base is x
    out[2].mul_(2).sum().backward()  # in place on what came out, as eager allows
    assert eq(x.grad, F.pad(torch.full((1, 4), 4.0), (0, 0, 0, 5)))


def test_no_grad_regions_and_frozen_inputs():
    def f(x, w, c):
        with torch.no_grad():
            scale = x.abs().mean()
        return (x / scale) @ w + c

    cf = same(f, leaf(5, 4), torch.randn(4, 3), leaf(3))
    body = targets(BW(cf))
    assert body.count("mm") == 1 and len(BW(cf).graph.output_node().args[0]) == 2


def test_absent_tangents_stay_absent():
    def f(x, a, b):
        h = x * 2
        return (h * a).sum(), (h.log() + b).sum()

    for wanted in ((0,), (1,), (0, 1)):
        found = []
        for g in (comp(f), f):
            x, a, b = torch.zeros(3, requires_grad=True), leaf(3), leaf(3)
            with torch.no_grad():
                a.fill_(2.0)
            outs = g(x, a, b)
            torch.autograd.backward([outs[k] for k in wanted])
            found.append([None if t.grad is None else t.grad.clone() for t in (x, a, b)])
        for got, want in zip(*found, strict=True):
            assert (got is None) == (want is None) and (got is None or eq(got, want))


def test_subset_of_inputs_hooks_and_accumulation():
    w, x, seen = leaf(4), leaf(4), []
    w.register_hook(lambda g: seen.append(g.clone()) or g * 2)
    cf = comp(lambda w, x: (w * x).sum())
    (only,) = torch.autograd.grad(cf(w, x), [x])
    assert eq(only, w.detach()) and not seen
    for _ in range(2):
        cf(w, x).backward()
    assert eq(w.grad, 4 * x.detach()) and len(seen) == 2


def test_create_graph_runs_the_captured_graph():
    x, y = leaf(5), leaf(5)

    def twice(f):
        (g,) = torch.autograd.grad(f(x, y).sum(), x, create_graph=True)
        return torch.autograd.grad((g * g).sum(), (x, y))

    def f(x, y):
        return x.sin() * y.exp() + x**3

    assert near(twice(comp(f)), twice(f), 1e-5)
    assert near(twice(lambda x, y: comp(f)(x * 2.0, y)), twice(lambda x, y: f(x * 2.0, y)), 1e-5)


def test_create_graph_draws_the_same_mask():
    x = leaf(64)

    def penalty(f):
        torch.manual_seed(3)
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        state = torch.get_rng_state()
        return torch.autograd.grad((g * g).sum(), x)[0], state

    def f(x):
        return F.dropout(x * x, 0.5)

    got, want = penalty(comp(f)), penalty(f)
    assert near(got[0], want[0], 1e-6) and eq(got[1], want[1])


def test_create_graph_through_a_write_is_refused():
    bn = nn.BatchNorm1d(3)
    x = leaf(8, 3)
    out = comp(bn)(x).pow(2).sum()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(out, x, create_graph=True)


def test_changed_inputs_raise_only_where_eager_does():
    def change(g, which):
        args = fresh(p, b, x)
        out = g(*args)
        with torch.no_grad():
            args[which].add_(1)
        try:
            out.sum().backward()
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)
        return [t.grad for t in args]

    p, b, x = leaf(4), leaf(4), leaf(4)

    def f(p, b, x):
        return (p.exp() * x + b).tanh()

    cf = comp(f)
    for which in range(3):
        got, want = change(cf, which), change(f, which)
        assert got == want if isinstance(want, bool) else near(got, want, 1e-6)


@pytest.mark.parametrize("make", [lambda p: p[:2].clone(), lambda p: p.double(), lambda p: p.t().clone().t(), lambda p: p * 2])
def test_data_replaced_between_forward_and_backward(make):
    p, x = leaf(3, 3), leaf(3, 3)
    cf = comp(lambda p, x: (x @ p).sin())
    for _ in range(3):
        cf(p, x).sum().backward()
    out, before = cf(p, x), p.detach().clone()
    p.data = make(p.data)  # no version counts this
    if p.shape == x.shape and p.dtype == x.dtype and p.is_contiguous():
        x.grad = None
        out.sum().backward()
        assert near([x.grad], [(x @ before).cos() @ p.t()], 1e-6)  # eager reads the data of then, too
        return
    with pytest.raises((TypeError, RuntimeError)):
        out.sum().backward()
    p.data = torch.randn(3, 3)
    cf(p, x).sum().backward()


@pytest.mark.parametrize("changed", "pqx")
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 0), (1, 1), (0,), (1,)])
@pytest.mark.parametrize("late", [False, True])
def test_a_change_spoils_only_the_losses_that_read_the_value(changed, order, late):
    def losses(p, q, x):
        return (x @ p).sin().sum(), (x @ q).exp().sum()

    def steps(g):
        args = dict(zip("pqx", fresh(leaf(3, 3), leaf(3, 3), leaf(3, 3)), strict=True))
        made, found = g(*args.values()), []
        for k, which in enumerate(order):
            if k == late:
                with torch.no_grad():
                    args[changed].add_(1)
            try:
                made[which].backward()
                found.append([None if t.grad is None else t.grad.clone() for t in args.values()])
            except RuntimeError:
                found.append(None)
        return found

    torch.manual_seed(0)
    want = steps(losses)
    torch.manual_seed(0)
    for a, b in zip(steps(comp(losses)), want, strict=True):
        assert (a is None) == (b is None) and (a is None or near(a, b, 1e-6))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return w * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def in_no_grad(x, h):
    with torch.no_grad():
        k = h.sum()
    return x * k


@pytest.mark.parametrize("f", [lambda x, h: x * h.detach(), in_no_grad, lambda x, h: x * h.shape[0], lambda x, h: (x.sin(), h.exp() * h)])
@pytest.mark.parametrize("upstream", ["freed", "modified", "function", "hook", "graph"])
def test_what_gets_no_gradient_has_no_edge(f, upstream):
    """Autograd runs upstream of an input only where it would run for eager: not with absent gradients."""

    def steps(g):
        torch.manual_seed(0)
        w, x, calls = leaf(3), leaf(3), []
        h = Twice.apply(w) if upstream == "function" else w.exp() if upstream != "hook" else w
        if upstream == "freed":
            h.sum().backward()
        if upstream == "modified":
            k, h = h, h.sin()
            with torch.no_grad():
                k.add_(1)
        if upstream == "hook":
            w.register_hook(calls.append)
            w.register_post_accumulate_grad_hook(calls.append)
        out = g(x, h)
        first = out[0] if isinstance(out, tuple) else out
        mark = nn.Identity()  # lives as long as the upstream node
        alive = None if upstream != "graph" else weakref.ref(mark)
        if alive is not None:
            h.grad_fn.metadata["mark"] = mark
        del h, mark
        alive = alive is not None and alive() is not None
        first.sum().backward()
        return [x.grad, w.grad], len(calls), alive

    (got, *others), (want, *expected) = steps(comp(f)), steps(f)
    assert near(got, want, 1e-6) and others == expected


def test_results_that_reach_no_input_in_common_are_apart():
    def f(x, h, k):
        return x.sin(), h.exp() * 2, torch.dropout(k, 0.5, True) * x.detach(), (h * 3).cos()

    def steps(g, order):
        torch.manual_seed(0)
        args = fresh(leaf(5), leaf(5), leaf(5))
        made = g(*args)
        seen = []
        made[2].register_hook(seen.append)
        for which in order:
            sum(made[k].sum() for k in which).backward()
        return [t.grad for t in args], len(seen)

    cf = comp(f)
    for order in ([[0], [1, 3], [2]], [[3, 1, 0], [2]], [[0, 2], [1], []][:2], [[1], [0]]):
        (got, a), (want, b) = steps(cf, order), steps(f, order)
        assert near(got, want, 1e-6) and a == b
    program = compiled_of(cf).versions[-1].program
    assert [piece.tangents for piece in program.pieces] == [(0,), (1, 3), (2,)]
    xs = [leaf(3) for _ in range(20)]  # more than `tangents.MOST`
    made = comp(lambda xs: [x.sin() for x in xs])(xs)
    (made[0].sum() + made[7].sum()).backward()
    assert [x.grad is not None for x in xs] == [k in (0, 7) for k in range(20)]


def test_truncated_backpropagation_through_time():
    cell = nn.GRUCell(4, 4)

    def step(x, h):
        h = cell(x, h.detach())
        return h * 2, h

    def train(g):
        torch.manual_seed(0)
        cell.zero_grad()
        h = torch.zeros(2, 4)
        for _ in range(4):
            y, h = g(torch.randn(2, 4), h)
            y.sum().backward()
        return [p.grad for p in cell.parameters()]

    assert near(train(comp(step)), train(step), 1e-5)


def test_second_backward_is_refused_and_memory_returns():
    x = leaf(1000)
    cf = comp(lambda x: x.exp().sin())
    out = cf(x)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    gc.disable()
    try:
        y = leaf(1000)
        out = cf(y)
        alive = weakref.ref(y)
        del out, y
        assert alive() is None
    finally:
        gc.enable()


def test_batch_statistics_move_once_a_call():
    bn, x = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU()), torch.randn(16, 3)
    ref = copy.deepcopy(bn)
    cf = comp(bn)
    for _ in range(3):
        cf(x).sum().backward()
        ref(x).sum().backward()
    assert int(bn[1].num_batches_tracked) == 3
    for a, b in zip(bn.state_dict().values(), ref.state_dict().values(), strict=True):
        assert near(a, b, 1e-6)
    for a, b in zip(bn.parameters(), ref.parameters(), strict=True):
        assert near(a.grad, b.grad, 1e-5)


def test_writes_to_what_requires_grad_run_on_torch():
    def f(x):
        x.mul_(2)
        return x.sin()

    w = leaf(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tp.FallbackWarning)
        comp(f, strict_native=False)(w * 1.0).sum().backward()
    assert near(w.grad, 2 * (2 * w.detach()).cos(), 1e-6)


class Straight(torch.autograd.Function):
    """Rounds; the gradient passes straight through, halved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 0.5 + 0 * x


class Peeking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 2 if x.sum() > 0 else g * 0


def test_custom_functions():
    same(lambda x: Straight.apply(x * 3).sin(), leaf(6))
    cf = comp(lambda x: Peeking.apply(x).sum(), strict_native=False)
    for sign in (1.0, -1.0):
        x = torch.full((3,), sign, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tp.FallbackWarning)
            cf(x).backward()
        assert eq(x.grad, torch.full((3,), 2.0 if sign > 0 else 0.0))


def test_autocast_inside_and_around():
    x, w = leaf(6, 8), leaf(8, 8)

    def f(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x @ w).gelu().float().sum() if hasattr(x, "gelu") else F.gelu(x @ w).float().sum()

    same(f, x, w, tolerance=3e-2)

    def around(g):
        a, b = fresh(x, w)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = g(a, b)
        out.float().sum().backward()
        return out.detach(), a.grad, b.grad

    def h(x, w):
        return F.gelu(x @ w)

    got, want = around(comp(h)), around(h)
    assert near(got, want, 3e-2)


def test_dropout_saves_a_mask_of_bytes():
    cf = same(lambda x, w: F.dropout((x @ w).relu(), 0.3) * 2, leaf(16, 8), leaf(8, 32))
    program = compiled_of(cf).versions[-1].program
    assert program.partition.saved_bytes <= 16 * 32 * 5
    assert "bernoulli" not in targets(BW(cf)) and "bernoulli" in targets(FW(cf))


def test_partitions():
    def f(a, b):
        return (a @ b).relu().tanh().sum()

    a, b = leaf(4, 8), leaf(8, 16)
    assert saved(same(f, a, b)) == ["relu"]
    assert saved(same(f, a, b, options={"partition": "default"})) == ["relu", "tanh"]
    with pytest.raises(ValueError, match="partition"):
        comp(f, options={"partition": "largest"})
    with pytest.raises(ValueError, match="memory_budget"):
        comp(f, memory_budget=2)


def test_minimum_cut_against_every_subset():
    rng = random.Random(0)
    for _ in range(200):
        n = rng.randint(2, 7)
        edges = [(i, j) for i in range(n) for j in range(i + 1, n) if rng.random() < 0.5]
        cost = [rng.randint(1, 9) for _ in range(n)]
        fixed = {i for i in range(n) if rng.random() < 0.3} | {0}
        needed = {i for i in range(n) if rng.random() < 0.4} | {n - 1}
        net = Network(2 * n + 2)
        for i in range(n):
            net.edge(2 * i, 2 * i + 1, cost[i])
            if i in fixed or not any(b == i for _, b in edges):
                net.edge(2 * n, 2 * i, INFINITE)
            else:
                for a, b in edges:
                    if b == i:
                        net.edge(2 * a + 1, 2 * i, INFINITE)
            if i in needed:
                net.edge(2 * i + 1, 2 * n + 1, INFINITE)
        value = net.flow(2 * n, 2 * n + 1)
        near_sink = net.near(2 * n + 1)
        cut = {i for i in range(n) if 2 * i not in near_sink and 2 * i + 1 in near_sink}
        roots = fixed | {i for i in range(n) if not any(b == i for _, b in edges)}

        def enough(kept, edges=edges, roots=roots, needed=needed):
            stack, seen = [i for i in needed if i not in kept], set()
            while stack:
                i = stack.pop()
                if i in roots:
                    return False
                if i not in seen:
                    seen.add(i)
                    stack += [a for a, b in edges if b == i and a not in kept]
            return True

        subsets = itertools.chain.from_iterable(itertools.combinations(range(n), k) for k in range(n + 1))
        best = min(sum(cost[i] for i in kept) for kept in subsets if enough(set(kept)))
        assert value == best == sum(cost[i] for i in cut) and enough(cut)


def test_failed_check_raises_as_eager():
    def f(w, i):
        return F.embedding(i, w).sum()

    w = leaf(4, 3)
    cf = comp(f)
    cf(w, torch.tensor([0, 1])).backward()
    with pytest.raises(IndexError):
        cf(w, torch.tensor([0, 9]))


def test_memory_budget():
    layers = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers)
    x, found = torch.randn(16, 32), {}
    for budget in (None, 1.0, 0.5, 0.25):
        model.zero_grad()
        cf = comp(model, memory_budget=budget)
        torch.manual_seed(0)
        cf(x).sum().backward()
        about = tp.explain(cf).training
        assert about.saved_bytes <= (budget or 1.0) * about.default_bytes
        found[budget] = [p.grad.clone() for p in model.parameters()]
    assert near(found[0.25], found[None], 1e-5)
    assert any(name.startswith("addmm") for name in about.recomputed)
    assert not any(name.startswith("bernoulli") for name in about.recomputed)
    with pytest.raises(tp.StrictNativeError, match="memory_budget"):
        comp(model, memory_budget=0.0)(x)


def test_explain_says_whether_backward_is_compiled():
    cf = comp(lambda x, w: (x @ w).relu().sum())
    out = cf(leaf(3, 4), leaf(4, 5))
    assert "not compiled yet" in str(tp.explain(cf))
    out.backward()
    about = tp.explain(cf)
    assert about.training.backward == "compiled" and "relu: 60 bytes" in str(about)
    assert [e.target for e in about.externs].count("aten.mm.default") == 3


def test_optimizer_step_writes_parameters():
    def adamw(params, grads, means, squares, step, rate=1e-2, decay=1e-2):
        with torch.no_grad():
            step.add_(1)
            for p, g, m, v in zip(params, grads, means, squares, strict=True):
                p.mul_(1 - rate * decay)
                m.lerp_(g, 0.1)
                v.mul_(0.999).addcmul_(g, g, value=0.001)
                p.sub_(rate * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))

    def state():
        torch.manual_seed(0)
        params = [leaf(n) for n in (100, 64, 7)]
        return params, [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params], torch.zeros(())

    cf, ours, theirs = comp(adamw), state(), state()
    for seed in range(5):
        torch.manual_seed(seed)
        grads = [torch.randn_like(p) for p in ours[0]]
        cf(ours[0], grads, *ours[1:])
        adamw(theirs[0], grads, *theirs[1:])
    assert near(tuple(ours[0]), tuple(theirs[0]), 1e-6) and int(ours[3]) == 5 and tp.testing.N(cf) == 1
    assert all(p.is_leaf and p.requires_grad for p in ours[0])


@pytest.mark.parametrize("retain", (False, True))
def test_backward_frees_each_saved_value_behind_its_last_use(retain, monkeypatch):
    def f(x, w, v):
        return ((x @ w).exp() @ v).exp().sum()

    args, alive = (leaf(8, 16), leaf(16, 32), leaf(32, 4)), []
    cf = same(f, *args)
    out = cf(*args)
    values = [weakref.ref(t) for t in out.grad_fn.saved_tensors if not any(t is a for a in args)]
    ((part, _, _),) = compiled_of(cf).versions[-1].program.backwards.values()
    launch = part.trusted.__globals__["launch"]
    count = lambda *a: alive.append(sum(v() is not None for v in values)) or launch(*a)  # noqa: E731
    monkeypatch.setitem(part.trusted.__globals__, "launch", count)
    out.backward(retain_graph=retain)
    assert len(values) == 2 and alive[0] == 2 and alive[-1] == (2 if retain else 1)


def test_gradients_of_parameters_keep_nothing_waiting():
    """Each result of an operator stands right behind it: its loops run while their operands are in the caches."""
    net = nn.Sequential(*[nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(3)])
    c = tp.compile(net)
    c(torch.randn(64, 8)).sum().backward()
    items = [n for n in compiled_of(c).versions[0].program.backward.module.graph.nodes if "getitem" in n.name]
    norms = [n for n in items if n.args[0].target is torch.ops.aten.native_layer_norm_backward.default]
    assert len(norms) >= 6
    for node in norms:
        before = node.prev
        while before in norms:
            before = before.prev
        assert before is node.args[0]


def test_detached_views_of_inputs_require_no_grad() -> None:
    w = torch.arange(4.0, requires_grad=True)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        v = w.view(2, 2)
        y = x * w
        return v, v.detach(), v.detach()[0], w.expand(2, 4)[0].detach(), y, y.view(2, 2).detach(), y.detach()[1:]

    want, got = f(torch.ones(4)), comp(f)(torch.ones(4))
    assert [t.requires_grad for t in want] == [t.requires_grad for t in got]
    assert all(t.data_ptr() == w.data_ptr() for t in got[:4]) and got[5].data_ptr() == got[4].data_ptr()
    assert all(map(torch.equal, want, got))
    got[1].add_(1)
    assert w[0] == 1


class Reversed(torch.autograd.Function):
    """`how` makes the result, whose gradient is three times the tangent, or none."""

    @staticmethod
    def forward(ctx, x, how, none=False):
        ctx.none, ctx.shape = none, x.shape
        return how(x)

    @staticmethod
    def backward(ctx, g):
        return None if ctx.none else 3 * g.reshape(ctx.shape), None, None


def without_grad(x):
    with torch.no_grad():
        return x.view(6)


def itself(x):
    return x


VIEWING = {
    "function": lambda x: Reversed.apply(x, lambda x: x.view_as(x)), "input": lambda x: (x, Reversed.apply(x, itself)),
    "other": lambda x: Reversed.apply(x.sin(), itself), "pair": lambda x: (h := x.sin(), Reversed.apply(h, lambda x: x.view(6))),
    "viewed": lambda x: Reversed.apply(x, itself).view(6), "inside": lambda x: Reversed.apply(x, itself).cos() * 2,
    "none": lambda x: Reversed.apply(x, lambda x: x * 2, True), "nones": lambda x: (Reversed.apply(x, lambda x: x * 2, True), x * 3),
    "no_grad": without_grad, "again": lambda x: (without_grad(x)[:], x * 1), "cut": lambda x: without_grad(x) * 2,
    "transposed": lambda x: x.detach().t(), "whole": lambda x: x.detach()[...], "datas": lambda x: x.data[..., :], "row": lambda x: x.detach()[0], "data": lambda x: x.data.t(), "rows": lambda x: x.detach().unbind(0),
    "part": lambda x: x.detach().view(-1)[1:3], "both": lambda x: (x.t(), x.detach().t(), x.view(6)[1:]), "more": lambda x: (x.detach().t(), x.t(), x * 2),
    "written": lambda x: (h := x.sin(), h[0].mul_(2), h.t()), "chunks": lambda x: x.sin().chunk(3, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", list(VIEWING))
def test_results_that_view_take_gradients_eagers_way(name):
    def steps(g, x):
        made = g(x)
        made = made if isinstance(made, (tuple, list)) else (made,)
        facts = [(t.requires_grad, t.shape, t.stride(), t.data_ptr() == x.data_ptr()) for t in made]
        wanted = [(k + 2) * t.sum() for k, t in enumerate(made) if t.requires_grad]
        if wanted:
            with contextlib.suppress(RuntimeError):  # "does not require grad"
                sum(wanted).backward()
        return facts, [x.grad, *[t.detach().clone() for t in made]]

    f, x = VIEWING[name], leaf(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tp.FallbackWarning)
        cf = tp.compile(f)
        (facts, got), (expected, want) = steps(cf, *fresh(x)), steps(f, *fresh(x))
    assert facts == expected and near(got, want, 1e-6)
    native = compiled_of(cf).versions[-1].fallback is None
    assert native == (name not in ("function", "input", "pair", "viewed", "no_grad", "again", "cut"))


def test_views_of_an_expanded_leaf():
    for f in (lambda x: x.movedim(0, 1).movedim(1, 0), lambda x: x[1:].t(), lambda x: (x.t() * 2, x.t())):
        found = []
        for g in (f, tp.compile(f)):
            x = torch.arange(3.0).expand(4, 3).requires_grad_()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", tp.FallbackWarning)
                made = g(x)
            made = made if isinstance(made, tuple) else (made,)
            sum((t * torch.arange(t.numel()).view(t.shape)).sum() for t in made).backward()
            found.append([*made, x.grad])
        assert near(*found, 1e-6)


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_products_are_quotients_where_eagers_are(dim, dtype):
    inf, nan = torch.inf, torch.nan

    def f(x):
        return x.prod() if dim is None else x.prod(dim)

    cf = comp(f)
    rows = ([1.5, -2, 3], [-inf, 1, 2], [1e-30, 1e-30, 2], [nan, 1, 2], [0, 1, 2], [inf, 0, 2], [0, 0, 3], [inf, 0, 0])
    for a, b in itertools.combinations_with_replacement(rows, 2):
        for x in (torch.tensor([a, b], dtype=dtype), torch.tensor([a, b], dtype=dtype).t()):
            want, got = (gradients(g, [x.requires_grad_()]) for g in (f, cf))
            assert near(got[:2], want[:2], 1e-6)


def test_one_hot():
    def quantize(x, e):
        k = F.one_hot((x[:, None] - e).pow(2).sum(-1).argmin(-1), e.shape[0])
        q = k.to(x.dtype) @ e
        return x + (q - x).detach(), (q - x.detach()).pow(2).mean(), k

    same(quantize, leaf(5, 4), leaf(7, 4))
    cf = comp(lambda i: F.one_hot(i, 3))
    for i in (torch.tensor([0, 2, 1]), torch.tensor(2), torch.zeros(0, dtype=torch.int64), torch.randint(0, 3, (2, 5)).t()):
        assert eq([cf(i)], [F.one_hot(i, 3)])
    for wrong, text in (([0, 3], "smaller than num_classes"), ([-1, 0], "non-negative")):
        with pytest.raises(RuntimeError, match=text):
            cf(torch.tensor(wrong))


@pytest.mark.parametrize("dim", [0, 1])
def test_weight_norm(dim):
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 5), dim=dim), nn.Tanh())
    ref, x = copy.deepcopy(model), leaf(4, 6)
    cf = comp(model)
    cf(x).square().sum().backward()
    ref(x).square().sum().backward()
    assert near([p.grad for p in model.parameters()], [p.grad for p in ref.parameters()], 1e-5)
    assert not tp.explain(cf).fallbacks
