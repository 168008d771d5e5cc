"""The retrace: decomposition, constants, random numbers, what it leaves alone (sections 4.8, 4.9)."""

from __future__ import annotations

import operator
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import tensorplay as tp
from tensorplay.errors import UnsupportedError
from tensorplay.stax.joint.retrace import retrace

from .graphs import agrees, module, ops, run, same, trace

aten = torch.ops.aten
weight = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


def test_example_4_3() -> None:
    x, w, b = torch.randn(4, 8), torch.randn(8), torch.randn(8)
    assert ops(agrees(lambda x, w, b: F.layer_norm(x, (8,), w, b), x, w, b)) == ["native_layer_norm"]
    assert ops(agrees(F.mse_loss, x, torch.randn(4, 8))) == ["sub", "mul", "mean"]


def test_example_4_4() -> None:
    def f(x, y):
        x.mul_(2)
        y[0].add_(1)
        return x + y

    graph = agrees(f, torch.randn(4, 8), torch.randn(4, 8))
    assert ops(graph) == ["mul", "select", "add", "select_scatter", "add", "copy_", "copy_"]
    nodes = {n.name: n for n in graph.module.graph.nodes}
    assert nodes["copy_"].args == (nodes["primals_1"], nodes["mul"])
    assert nodes["copy__1"].args == (nodes["primals_2"], nodes["select_scatter"])
    assert nodes["select_scatter"].args == (nodes["primals_2"], nodes["add"], 0, 0)


def test_modules_parameters_and_attributes() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.LayerNorm(8)).eval()
    graph = fx.symbolic_trace(net)
    x = torch.randn(3, 8)
    found = retrace(graph, [x])
    with torch.no_grad():
        same(run(found, x), (net(x),))
    assert not any(t.requires_grad for t in run(found, x))
    with torch.no_grad():
        net[0].bias.add_(1)  # parameters are read at each call
        same(run(found, x), (net(x),))


def test_constants_are_new_at_each_call() -> None:
    def f(x):
        c = torch.tensor([1.0, 2.0])
        d = torch.tensor([5.0, 6.0])
        d[0] += x[0]
        return c, d, c * 2

    graph = agrees(f, torch.randn(2))
    x = torch.randn(2)
    run(graph, x)[0].add_(100)
    same(run(graph, x), f(x))


def test_writes_fill_with_constants() -> None:
    def f(x):
        y = torch.zeros(3, 4)
        y[1] = 7
        y[:, 2] = x[:3]
        y[x[:3] > 0] = -1.0
        return y

    assert "fill" in ops(agrees(f, torch.randn(4))) or "full" in ops(agrees(f, torch.randn(4)))


def test_generators_stay_and_order_is_marked() -> None:
    def f(x):
        a = F.dropout(x, 0.5)
        return a + torch.rand_like(x), x.clone().uniform_(-1, 1), torch.empty(3).normal_()

    x = torch.randn(64)
    state = torch.get_rng_state()
    graph = trace(f, x)
    assert torch.equal(state, torch.get_rng_state())
    marked = [n for n in graph.module.graph.nodes if n.meta.get("ordered")]
    assert len(marked) == 4
    torch.manual_seed(3)
    want = f(x)
    torch.manual_seed(3)
    same(run(graph, x), want)


def test_a_generator_of_its_own_is_refused_before_it_draws() -> None:
    own = torch.Generator().manual_seed(3)
    state = own.get_state()
    for f in (
        lambda x: x + torch.randn(3, generator=own),
        lambda x: x.clone().normal_(generator=own),
        lambda x: torch.multinomial(x.abs() + 1, 1, generator=own),
    ):
        with pytest.raises(UnsupportedError, match="generator of its own"):
            trace(f, torch.randn(3))
        assert torch.equal(own.get_state(), state)


def test_a_copy_onto_its_own_source_is_refused() -> None:
    def crossing(x):
        y = x + 0
        y[1:, 1:] = y[:-1, :-1]
        return y

    def apart(x):
        y = x + 0
        y[:, 0] = y[:, 1]
        y[2:] = y[:2]
        y[:] = y
        return y

    with pytest.raises(UnsupportedError, match="already written"):
        trace(crossing, torch.randn(4, 4))
    agrees(apart, torch.randn(4, 4))


def test_unread_random_operators_stay() -> None:
    assert "rand_like" in ops(trace(lambda x: (torch.rand_like(x), x + 1)[1], torch.randn(3)))


def test_batch_norm_in_training() -> None:
    def f(x, m, v, w, b):
        return F.batch_norm(x, m, v, w, b, training=True, momentum=0.2), m + 0

    args = torch.randn(4, 3, 5), torch.zeros(3), torch.ones(3), torch.randn(3), torch.randn(3)
    graph = agrees(f, *args)
    assert ops(graph)[-2:] == ["copy_", "copy_"]
    agrees(lambda x, m, v: F.batch_norm(x, m, v), *args[:3])
    agrees(lambda x: F.batch_norm(x, None, None, training=True), args[0])


def test_autocast_shows_its_casts() -> None:
    def f(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ w

    assert "_to_copy" in ops(agrees(f, torch.randn(4, 4), torch.randn(4, 4)))


def test_grad_mode_inside() -> None:
    def f(x):
        with torch.enable_grad():
            y = x * 2
        return y.sum()

    assert ops(agrees(f, torch.randn(4))) == ["mul", "sum"]
    agrees(lambda x: x.exp(), torch.randn(4, requires_grad=True).detach())
    weight = torch.randn(4, requires_grad=True)
    assert not run(trace(f, weight), torch.randn(4))[0].requires_grad


def test_inference_tensors() -> None:
    with torch.inference_mode():
        x = torch.randn(4, 4)
        graph = trace(lambda x: F.linear(x, x).relu(), x)
    assert "linear" not in ops(graph)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("f", [lambda x: x + 1, lambda x: x.mul_(2), lambda x: (x * weight).sum(), lambda x: (x[0], x)])
def test_tensors_that_show_the_negative_of_their_memory(f) -> None:
    made = [torch.complex(torch.ones(3), torch.tensor([1.0, -2.0, 3.0])).conj() for _ in range(2)]
    want, got = f(made[0].imag), tp.compile(f)(made[1].imag)
    same(want, got)
    same(torch.view_as_real(made[0].resolve_conj()), torch.view_as_real(made[1].resolve_conj()))


def test_modes_are_restored_after_a_refusal() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.set_default_dtype, (torch.float64,))
    graph.call_function(torch.set_autocast_enabled, ("cpu", True))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    graph.output(graph.call_method("item", (x,)))
    with torch.no_grad():
        with pytest.raises(UnsupportedError):
            retrace(fx.GraphModule(torch.nn.Module(), graph), [torch.ones(1)])
        assert not torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32 and not torch.is_autocast_enabled("cpu")


def test_detach_is_dropped() -> None:
    assert ops(agrees(lambda x: x.detach().data * 2, torch.randn(3))) == ["mul"]


def test_shape_changed_in_place() -> None:
    def f(x):
        y = x.clone()
        y.t_().unsqueeze_(0)
        y.mul_(2)
        return y

    agrees(f, torch.randn(3, 4))
    with pytest.raises(UnsupportedError, match="t_"):
        trace(lambda x: x.t_(), torch.randn(3, 4))


def test_samples_die() -> None:
    seen = []

    def f(x):
        y = x * 2
        seen.append(weakref.ref(y))
        return y + 1

    graph = trace(f, torch.randn(3))
    assert seen[0]() is None and graph is not None


@pytest.mark.parametrize(
    ("fn", "word"),
    [
        (lambda x: x.item(), "value of a tensor"),
        (lambda x: x * (1 if x.sum() > 0 else 2), "value of a tensor"),
        (lambda x: (t := torch.tensor(0.0)).add_(x.sum()) * t.item(), "value of a tensor"),
        (lambda x: x.uniform_(generator=torch.Generator()), "generator"),
        (lambda x: x.resize_(9), "resize_"),
        (lambda x: x.to_sparse(), "layout"),
        (lambda x: torch.add(x, 1, out=torch.empty(7)), "resizes"),
    ],
)
def test_refusals(fn, word) -> None:
    with pytest.raises(UnsupportedError, match=word):
        trace(fn, torch.ones(1))


@pytest.mark.parametrize(("name", "nested"), [("tolist", False), ("numpy", False), ("new_tensor", True)])
def test_hidden_reads_of_values_are_refused(name: str, nested: bool) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_method("sum", (x,))
    graph.output(graph.call_method(name, (x, [y, 1.0]) if nested else (x,)))
    with pytest.raises(UnsupportedError, match="value of a tensor"):
        retrace(fx.GraphModule(torch.nn.Module(), graph), [torch.ones(2)])


def test_unknown_tensors_are_refused() -> None:
    hidden = torch.randn(3)
    with pytest.raises(UnsupportedError, match="neither an argument"):
        trace(lambda x: x + hidden, torch.randn(3))


def test_inputs_that_share_memory() -> None:
    base = torch.randn(6)
    with pytest.raises(UnsupportedError, match="shares memory"):
        trace(lambda a, b: a.add_(1) + b, base, base[:3].expand(2, 3))
    trace(lambda a, b: a.add_(1) + b, base[:3], base[3:])
    trace(lambda a, b: a + b, base, base)


def test_lines_and_names() -> None:
    graph = module(lambda x: x * 2 + 1, 1)
    next(n for n in graph.graph.nodes if n.op == "call_function").meta["line"] = "model.py:7"
    found = retrace(graph, [torch.randn(2)]).module.graph
    assert [(n.name, n.meta.get("line")) for n in found.nodes if n.op == "call_function"] == [
        ("mul", "model.py:7"),
        ("add", "model.py:7"),
    ]


def test_long_chains_are_linear() -> None:
    def f(x):
        for _ in range(2000):
            x = x + 1
        y = x.clone()
        for _ in range(300):
            y = y.view(-1)
            y.add_(1)
        return y

    assert len(ops(trace(f, torch.zeros(4)))) > 2300


def test_written_parameters_are_found_in_few_runs() -> None:
    runs = []

    def f(*xs):
        runs.append(1)
        for x in xs:
            x.add_(1)
        return xs[0] * 2

    agrees(f, *[torch.zeros(4) for _ in range(20)], torch.zeros(1 << 16), torch.ones(1 << 17))
    assert len(runs) <= 5


def test_loads_no_heavy_module() -> None:
    code = """
import sys, torch, torch.nn.functional as F
from torch import fx
from tensorplay.stax.joint import decompose
from tensorplay.stax.joint.retrace import retrace
def f(x, y):
    x.mul_(2); y[0].add_(1); z = x.as_strided((2, 2), (1, 2), 1); z.add_(1)
    return F.softmax(x + y, -1), F.dropout(x), F.layer_norm(x, (8,)), F.glu(x), x.unfold(0, 2, 2), F.mse_loss(x, y)
g = fx.Graph(); a, b = g.placeholder('a'), g.placeholder('b'); g.output(g.call_function(f, (a, b)))
retrace(fx.GraphModule(torch.nn.Module(), g), [torch.randn(4, 8), torch.randn(4, 8)])
print([m for m in ('sympy', 'torch._dynamo', 'torch._inductor', 'networkx', 'torch._functorch.aot_autograd') if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_results_are_taken_out_behind_their_operator() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, places = x.sort()
        y = values.sin() @ values.mT
        return y, places * 2

    nodes = list(agrees(f, torch.randn(4, 4)).module.graph.nodes)
    at = next(k for k, n in enumerate(nodes) if n.target is torch.ops.aten.sort.default)
    assert [n.target is operator.getitem for n in nodes[at + 1 :]] == [True, True, *[False] * (len(nodes) - at - 3)]
