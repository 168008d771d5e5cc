"""Translation validation finds a bug planted at any level and names the level, the pass, the node and the line (12.05)."""

import dataclasses
import inspect

import pytest
import torch
import torch.nn.functional as F

import tensorplay as tp
from tensorplay.graph import passes
from tensorplay.stax import pipeline
from tensorplay.stax.joint import decompose
from tensorplay.stax.ops.atoms import ATOMS
from tensorplay.stax.ops.row import ROWS

aten = torch.ops.aten


def chain(x, w):
    a = x + w
    b = a.tanh()
    c = (b * 2).sum(-1, keepdim=True)
    return c.exp() + b


def gated(x, w):
    y = (x * w)[:, :32]
    return F.glu(y, -1) + x.amax()


def writes(x, w):
    x.mul_(w).tanh_()
    return x.sum(-1)


def names(text, function, offset):
    """Whether the text names this line of the function."""
    return f"test_verify.py:{inspect.getsourcelines(function)[1] + offset})" in text


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("TP_CACHE_DIR", str(tmp_path))


def found(function, x=None):
    x = torch.linspace(-2, 2, 7 * 33).view(7, 33) if x is None else x
    with pytest.raises(tp.VerificationError) as error:
        tp.compile(function, verify=True, strict_native=True)(x, torch.linspace(0.5, 1.5, 33))
    return str(error.value)


def spelled(monkeypatch, atom, cpp):
    monkeypatch.setitem(ATOMS, atom, dataclasses.replace(ATOMS[atom], cpp=cpp))


@pytest.mark.parametrize("function", [chain, gated, writes])
def test_without_a_bug_nothing_is_found(function):
    x, w = torch.randn(7, 33), torch.randn(33)
    cf = tp.compile(function, verify=True, strict_native=True)
    for _ in range(2):
        mine, theirs = x.clone(), x.clone()
        # chain's exp turns an absolute error of a sum near 30 into a relative one
        torch.testing.assert_close(cf(mine, w), function(theirs, w), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine, theirs)


def test_random_numbers_are_drawn_once_and_compared(monkeypatch):
    def f(x, w):
        return F.dropout(x.tanh() * w, 0.5)

    x, w = torch.randn(7, 33), torch.randn(33)
    cf = tp.compile(f, verify=True, strict_native=True)
    torch.manual_seed(0)
    got = [cf(x, w) for _ in range(3)]
    state = torch.get_rng_state()
    torch.manual_seed(0)
    torch.testing.assert_close(got, [f(x, w) for _ in range(3)])
    assert torch.equal(state, torch.get_rng_state())
    spelled(monkeypatch, "tanh", "sin({0})")
    assert "level 'kernels' differs first, after code generation" in found(f)


def test_a_wrong_spelling(monkeypatch):
    spelled(monkeypatch, "tanh", "sin({0})")
    text = found(chain)
    assert "level 'kernels' differs first, after code generation" in text
    assert "level 'kernels'" in found(writes)


def test_a_wrong_row(monkeypatch):
    monkeypatch.setitem(ROWS, aten.tanh.default, ROWS.get(aten.sin.default) or ROWS[aten.sin])
    text = found(chain)
    assert "level 'loops' differs first, after lowering" in text and names(text, chain, 2)
    assert "level 'loops' differs first, after lowering" in found(writes)


def test_a_wrong_decomposition(monkeypatch):
    monkeypatch.setitem(decompose.OWN, aten.glu.default, lambda x, dim=-1: aten.slice.Tensor(x, dim, 0, x.shape[dim] // 2))
    decompose.rule.cache_clear()
    try:
        text = found(gated)
    finally:
        decompose.rule.cache_clear()
    assert "level 'ops' differs first, after retrace, decomposition" in text and names(text, gated, 2)


def test_a_wrong_pass(monkeypatch):
    def wrong(graph, choices):
        """Forgets a tanh, and says so."""
        for node in list(graph.nodes):
            if "tanh" in (node.target, getattr(node.target, "__name__", "")):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
                return [f"{node} is its argument"]
        return []

    front = (*passes.FRONT_END[:2], wrong, *passes.FRONT_END[2:])
    monkeypatch.setattr(passes, "FRONT_END", front)
    monkeypatch.setattr(passes.run_passes, "__defaults__", (front, *passes.run_passes.__defaults__[1:]))
    assert "level 'graph' differs first, after wrong" in found(chain)


def test_a_wrong_place_in_the_arena(monkeypatch):
    def two(x, w):
        a, b = x @ x.t(), (x * w) @ x.t()
        return (a + 1) @ (b - 1), (b + 2) @ (a - 2)

    right = pipeline.schedule

    def overlapping(loops, *rest):
        plan = right(loops, *rest)
        assert len(plan.memory.arena) > 1
        return dataclasses.replace(plan, memory=dataclasses.replace(plan.memory, arena=dict.fromkeys(plan.memory.arena, 0)))

    monkeypatch.setattr(pipeline, "schedule", overlapping)
    assert "level 'plan' differs first, after scheduling" in found(two)
