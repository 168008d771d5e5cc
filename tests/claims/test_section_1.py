"""Section 1: the goal, the contract, the levels."""

import pytest
import torch

import tensorplay as tp
from tensorplay.testing import CAP, RUN, K, eq, near, targets


def f(x, w):
    return (tp.relu(x + w) * 2).sum(-1)


def test_listing_1_1_one_kernel_at_the_lower_bound():
    x, w = tp.randn(64, 128), tp.randn(64, 128)
    cf = tp.compile(f, strict_native=True)
    y = cf(x, w)
    terms = (torch.relu(x + w) * 2).double().abs().sum(-1)
    assert ((y.double() - f(x.double(), w.double())).abs() <= 127 * 2**-24 * terms + 1e-12).all()
    about = tp.explain(cf)
    assert len(about.kernels) == 1 and not about.externs
    assert about.model_bytes == about.lower_bound == (2 * 64 * 128 + 64) * 4
    assert about.kernels[0].intensity == pytest.approx(0.5, abs=0.01)


def test_profiler_sees_no_elementwise_operator():
    x, w = tp.randn(64, 128), tp.randn(64, 128)
    cf = tp.compile(f, strict_native=True)
    cf(x, w)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        cf(x, w)
    seen = {e.key for e in profile.key_averages() if e.key.startswith("aten::")}
    assert not seen & {"aten::add", "aten::relu", "aten::clamp_min", "aten::mul", "aten::sum"}, seen


def test_row_1_04_inputs_only_partly_read():
    cf = tp.compile(lambda x: x[0] * 2, strict_native=True)
    x = torch.randn(1000, 1000)
    assert eq(cf(x), x[0] * 2)
    assert K(cf)[0].read_bytes == 4000


def test_row_1_06_back_end_contract():
    calls = []

    def backend(graph, example_inputs, **options):
        calls.append(graph)
        return graph.forward

    cf = tp.compile(f, backend=backend)
    x, w = tp.randn(4, 8), tp.randn(4, 8)
    for _ in range(3):
        assert eq(cf(x, w), f(x, w))
    cf(tp.randn(5, 8), tp.randn(5, 8))
    assert len(calls) == 2 and all(isinstance(g, torch.fx.GraphModule) for g in calls)


def test_row_1_07_back_ends_agree_on_one_capture():
    x, w = tp.randn(8, 16), tp.randn(8, 16)
    compiled = [tp.compile(f, backend=b) for b in ("eager", "aot_eager", "stax")]
    for cf in compiled:
        assert near(cf(x, w), f(x, w), 1e-5)
    assert len({str(CAP(cf).graph) for cf in compiled}) == 1


def test_row_1_08_five_representations():
    cf = tp.compile(f, strict_native=True)
    x, w = tp.randn(8, 16), tp.randn(8, 16)
    cf(x, w)
    about = tp.explain(cf)
    for level in (about.versions, about.graph, about.ops, about.loops, about.plan, about.kernels, about.host):
        assert str(level)
    text = str(about)
    for word in ("captured graph", "operator graph", "loops", "plan", "kernel", "host code"):
        assert word in text
    for level in ("graph", "ops", "loops", "plan", "kernels"):
        assert near(RUN(cf, level, x, w), f(x, w), 1e-6), level


def test_row_1_11_graph_of_another_front_end():
    from tensorplay.registry import lookup

    graph = torch.fx.symbolic_trace(f)
    x, w = tp.randn(8, 16), tp.randn(8, 16)
    assert near(lookup("stax")(graph, [x, w])(x, w), f(x, w), 1e-6)


def test_listing_3_1_names():
    cf = tp.compile(f, strict_native=True)
    cf(tp.randn(64, 128), tp.randn(64, 128))
    assert targets(CAP(cf)) == ["x", "w", "add", "relu", "mul", "sum", "output"]
