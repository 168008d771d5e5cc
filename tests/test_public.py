"""The public names: ours, and torch's for everything else."""

import subprocess
import sys

import pytest
import torch

import tensorplay as tp


def test_names_that_are_not_ours_are_torchs():
    assert tp.relu is torch.relu and tp.nn is torch.nn and tp.Tensor is torch.Tensor and tp.float32 is torch.float32
    assert tp.functional is torch.nn.functional
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = tp.no_such_name


def test_our_names():
    assert callable(tp.compile) and tp.compile is not torch.compile and callable(tp.explain)
    assert {"eager", "aot_eager", "stax"} <= set(tp.list_backends())
    assert tp.testing.assert_close is torch.testing.assert_close and tp.testing.N
    assert {"compile", "explain", "testing", "graph", "functional", "ones"} <= set(dir(tp))
    assert tp.graph.gate(3) == 3


def test_the_testing_module_does_not_hide_the_explain_function():
    text = "import tensorplay.testing, tensorplay.explain, tensorplay as tp; assert callable(tp.explain) and callable(tp.graph.gate)"
    subprocess.run([sys.executable, "-c", text], check=True)


def test_importing_loads_no_back_half():
    text = (
        "import sys, torch; before = set(sys.modules); import tensorplay; new = {m for m in set(sys.modules) - before};"
        "bad = [m for m in new if m.startswith(('tensorplay.stax', 'torch._inductor', 'torch._dynamo', 'sympy', 'networkx'))];"
        "assert not bad, bad; assert len(new) < 40, new"
    )
    subprocess.run([sys.executable, "-c", text], check=True)


def test_arguments_are_checked_at_once():
    with pytest.raises(ValueError, match="no back end 'nope'"):
        tp.compile(lambda x: x, backend="nope")
    with pytest.raises(ValueError, match="no mode"):
        tp.compile(lambda x: x, mode="nope")
    with pytest.raises(ValueError, match="recompile_limit"):
        tp.compile(lambda x: x, recompile_limit=0)
    with pytest.raises(TypeError, match="function, method, module"):
        tp.compile(3)
    with pytest.raises(TypeError, match="function, method, module"):
        tp.compile(torch.nn.Linear)
    with pytest.raises(TypeError, match=r"not a result of tp\.compile"):
        tp.explain(len)


def test_disable_returns_the_original():
    def f(x):
        return x

    assert tp.compile(f, disable=True) is f
    assert tp.compile(disable=True)(f) is f


def test_errors_are_runtime_errors_and_warnings_user_warnings():
    assert issubclass(tp.StrictNativeError, RuntimeError) and issubclass(tp.FallbackWarning, UserWarning)


def test_registry():
    with pytest.raises(ValueError, match="already"):
        tp.register_backend("stax", lambda graph, inputs: graph)
    with pytest.raises(TypeError):
        tp.register_backend("other", 3)
