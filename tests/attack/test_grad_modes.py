"""Which results take part in autograd, where the function switches grad mode under any mode of the caller."""

import itertools

import pytest
import torch

import tensorplay as tp

MODES = {"on": torch.enable_grad, "off": torch.no_grad}


@pytest.mark.parametrize("outside", MODES)
@pytest.mark.parametrize("backend", ["aot_eager", "stax"])
def test_results_require_grad_as_in_eager(outside, backend):
    def f(x):
        found = []
        for outer, inner in itertools.product(MODES.values(), repeat=2):
            a = x * 3
            with outer():
                b = x.exp()
                with inner():
                    c = b * 2
            found += [a, b, c, a + b]
        return found

    x = torch.arange(4.0, requires_grad=True)
    compiled = tp.compile(f, backend=backend, strict_native=True)
    with MODES[outside]():
        got, want = compiled(x), f(x)
    assert [(t.requires_grad, t.is_leaf) for t in got] == [(t.requires_grad, t.is_leaf) for t in want]
    grads = [torch.autograd.grad(sum(t.sum() for t in found if t.requires_grad), x)[0] for found in (got, want)]
    assert torch.allclose(*grads)


def test_a_write_to_what_requires_grad_is_named_as_such():
    compiled = tp.compile(lambda x: x.mul_(2).sin())
    x = torch.arange(4.0, requires_grad=True)
    with pytest.warns(tp.FallbackWarning, match="a write to an input that requires grad"):
        compiled(x * 1).sum().backward()
    assert torch.allclose(x.grad, 2 * (2 * x.detach()).cos())
