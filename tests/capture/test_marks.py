"""Marks on functions and modules, each under the name that torch.compiler gives it, and compilation in place."""

import copy
import inspect
import math
import operator
import pickle
import warnings

import pytest
import torch
from torch import nn

import tensorplay as tp
from tensorplay.capture.marks import SUBSTITUTES
from tensorplay.capture.show import show
from tensorplay.capture.tracer import capture
from tensorplay.compiled import Compiled, compiled_of

from .sequences import T

NAMES = (
    "allow_in_graph", "assume_constant_result", "cudagraph_mark_step_begin", "disable", "is_compiling",
    "is_dynamo_compiling", "is_exporting", "nested_compile_region", "substitute_in_graph",
)  # fmt: skip


def calls(graph):
    return [n for n in graph.graph.nodes if n.op in ("call_function", "call_method")]


@pytest.mark.parametrize("name", NAMES)
def test_names_and_parameters_are_those_of_torch(name):
    ours, theirs = inspect.signature(getattr(tp, name)), inspect.signature(getattr(torch.compiler, name))
    takes = [(p.name, p.kind, p.default) for p in ours.parameters.values()]
    torchs = [(p.name, p.kind, p.default) for p in theirs.parameters.values()]
    assert takes == torchs or (name == "nested_compile_region" and len(torchs) < len(takes))  # older torch takes fewer
    assert getattr(tp.compiler, name) is getattr(tp, name)


def test_questions_about_compilation():
    seen = []

    def f(x):
        seen.append((tp.is_compiling(), tp.is_exporting(), tp.is_dynamo_compiling()))
        return x

    with pytest.raises(tp.GraphCaptureError):
        capture(f, (T(1),), {})
    assert not seen and f(T(1)) is not None and seen == [(False, False, False)]
    with tp.disable_capture():
        c = tp.compile(lambda x: x * (2 if tp.is_compiling() else 3), backend="eager")
        assert c(T(1)).item() == 3
    assert c(T(1)).item() == 2


def test_disable_in_every_form():
    def body(x):
        return x * 2

    for mark in (tp.disable(body), tp.disable()(body), tp.disable(reason="why")(body), tp.disable(body, True)):
        graph = capture(lambda x, mark=mark: mark(x) + 1, (T(1, 2),), {}).graph
        assert len(calls(graph)) == 2 and torch.equal(graph(T(1, 2))[0], T(3, 5))
        assert mark.__name__ == "body"
    graph = capture(lambda x: tp.disable(body, reason="it hurts")(x) + 1, (T(1, 2),), {}).graph
    assert "# it hurts" in show(graph)
    module = tp.disable(nn.Linear(2, 2))
    assert [n.op for n in capture(nn.Sequential(module), (T(1, 2),), {}).graph.graph.nodes].count("call_module") == 1
    with pytest.raises(tp.UnsupportedError, match="recursive"):
        tp.disable(body, recursive=False)
    with pytest.raises(TypeError):
        tp.disable(nn.Linear)
    assert [f(T(1)).item() for f in tp.allow_in_graph([body, torch.neg])] == [2, -1]


WEIGHT = torch.tensor(2.0)
SHIFT = torch.ones(2)


@tp.allow_in_graph
def reads_globals(x):
    return x * WEIGHT + SHIFT


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * SHIFT

    @staticmethod
    def backward(ctx, g):
        return g * WEIGHT


@pytest.mark.parametrize("backend", ["eager", "stax"])
@pytest.mark.parametrize("function", [reads_globals, Custom.apply])
def test_a_function_that_stays_whole_reads_its_globals_at_each_call(backend, function, monkeypatch):
    def f(x):
        return function(x) + 1

    c = tp.compile(f, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for weight, shift in ((2.0, 1.0), (3.0, 1.0), (3.0, 5.0)):
            monkeypatch.setitem(globals(), "WEIGHT", torch.tensor(weight))
            monkeypatch.setitem(globals(), "SHIFT", torch.full((2,), shift))
            grads = []
            for g in (c, f):
                x = T(1, 2).requires_grad_()
                y = g(x)
                y.sum().backward()
                grads.append((y.detach(), x.grad))
            assert all(map(torch.equal, *grads))


def test_a_leaf_module_whose_weight_is_replaced():
    m = nn.Sequential(tp.graph.leaf(nn.Linear(3, 3)), nn.ReLU())
    c = tp.compile(m)
    x = torch.randn(2, 3)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(c(x), m(x))
            m[0].weight = nn.Parameter(torch.ones(3, 3))


def test_nonstrict_trace_gives_one_node_with_a_nested_result():
    @tp.nonstrict_trace
    def inner(x, k, *, more):
        return {"a": x * k, "b": [x + more, k]}

    def f(x):
        found = inner(x, 2, more=3)
        return found["a"] + found["b"][0] * found["b"][1]

    c = tp.compile(f, strict_native=True)
    assert torch.equal(c(T(1, 2)), f(T(1, 2)))


def test_nested_compile_region_returns_the_function():
    @tp.nested_compile_region
    def block(x):
        return x.relu() + 1

    @tp.nested_compile_region(max_reuse_entries=2)
    def other(x):
        return block(x) * 2

    c = tp.compile(lambda x: other(block(block(x))), strict_native=True)
    assert torch.equal(c(T(-1, 2)), other(block(block(T(-1, 2))))) and tp.cudagraph_mark_step_begin() is None


def test_substitute_in_graph_replaces_a_function_of_c_while_capturing():
    ran = []

    def hypot(a, b):
        ran.append(1)
        return (a * a + b * b) ** 0.5

    try:
        assert tp.substitute_in_graph(math.hypot, skip_signature_check=True)(hypot) is hypot
        with pytest.raises(tp.GraphCaptureError, match="changes Python objects"):  # it ran, and is not allowed that
            capture(lambda x: x * math.hypot(3, 4), (T(1),), {})
        assert not ran and math.hypot(3, 4) == 5
    finally:
        SUBSTITUTES.clear()
    with pytest.raises(TypeError, match="signature"):
        tp.substitute_in_graph(operator.indexOf)(lambda a: a)
    with pytest.raises(TypeError, match="function"):
        tp.substitute_in_graph(3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.k = 2.0

    def forward(self, x, *, scale=1.0):
        return (self.inner(x) * self.k * scale).relu()


def test_a_module_compiled_in_place_stays_itself():
    m, x = Net(), torch.randn(2, 3)
    want = m(x)
    assert tp.compile(m, in_place=True, strict_native=True) is m
    torch.testing.assert_close(m(x), want)
    torch.testing.assert_close(m(x, scale=2.0), want * 2)
    m.k = 4.0
    torch.testing.assert_close(m(x), want * 2)
    assert type(m) is Net and sorted(m.state_dict()) == ["inner.bias", "inner.weight"]
    assert len(tp.explain(m).versions) == 3 and compiled_of(m).name == "Net"
    m(x).sum().backward()
    assert m.inner.weight.grad is not None
    m.eval()
    assert not m.training and not m.inner.training
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert other._compiled_call_impl is None
        torch.testing.assert_close(other(x), m(x))
    hook = m.register_forward_hook(lambda m, a, o: o + 1)
    torch.testing.assert_close(m(x), want * 2 + 1)
    hook.remove()


def test_a_child_compiled_in_place_runs_compiled_under_an_eager_parent_and_is_inlined_in_a_compiled_one():
    m, x = nn.Sequential(Net(), nn.Tanh()), torch.randn(2, 3)
    want = m(x)
    tp.compile(m[0], in_place=True)
    torch.testing.assert_close(m(x), want)
    assert compiled_of(m[0]).counters["compilations"] == 1
    c = tp.compile(m, strict_native=True)
    torch.testing.assert_close(c(x), want)
    assert compiled_of(m[0]).counters["compilations"] == 1


def test_in_place_takes_modules_alone():
    with pytest.raises(TypeError, match="in_place"):
        tp.compile(len, in_place=True)

    made = tp.compile(in_place=True, backend="eager")(Net())
    assert type(made) is Net and isinstance(made._compiled_call_impl, Compiled)


def test_a_refusal_in_place_names_the_line_of_forward():
    class Bad(nn.Module):
        def forward(self, x):
            return x * x.data_ptr()

    m = tp.compile(Bad(), in_place=True)
    with pytest.warns(tp.FallbackWarning, match=r"'Bad'.*data_ptr.*test_marks\.py:\d+"):
        m(T(1))
