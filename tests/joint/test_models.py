"""The operator graph of captured models computes eager's outputs to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bench.zoo import MODELS, make, tensors
from tensorplay.capture.tracer import capture
from tensorplay.stax.joint.retrace import retrace

from .graphs import run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", list(MODELS))
def test_model(name: str, dtype: torch.dtype) -> None:
    model, inputs = make(name, dtype, small=True)
    with torch.no_grad():
        want = tensors(model(**inputs))
        captured = capture(model, (), inputs)
        graph = retrace(captured.graph, captured.samples)
        got = tensors(captured.rebuild(run(graph, *captured.samples), (), inputs))
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


def test_lines_of_the_model_are_kept() -> None:
    model, inputs = make("gpt2", torch.float32, small=True)
    with torch.no_grad():
        captured = capture(model, (), inputs)
        graph: Any = retrace(captured.graph, captured.samples).module.graph
    assert all(":" in n.meta["line"] for n in graph.nodes if n.op == "call_function")


def test_ten_steps_of_resnet_follow_eager() -> None:
    """Three weights, of which one may miss: a rectifier whose operand is zero but for rounding can open in one and not in the
    other, which moves all that follows by 1e-5 and more, as it does for eager with weights nudged by one rounding."""
    from bench.training import losses

    found = []
    for seed in range(3):
        ours, want = (losses("resnet", which, seed=seed) for which in ("ours", "eager"))
        found.append([abs(a - b) / abs(b) for a, b in zip(ours, want, strict=True)])
    assert max(each[0] for each in found) <= 5e-7 and sorted(map(max, found))[1] <= 5e-6


def test_gradients_of_resnet_are_as_accurate_as_eager_s() -> None:
    from bench.training import loss_of, model_of, system

    def gradients(which: str, dtype: torch.dtype) -> list[torch.Tensor]:
        model, inputs = model_of("resnet", torch.float32, small=True)
        model, inputs = model.to(dtype), {k: v.to(dtype) for k, v in inputs.items()}
        loss_of(system(which, model)(**inputs)).backward()
        return [p.grad.double() for p in model.parameters()]

    exact = gradients("eager", torch.float64)
    ours, eager = gradients("ours", torch.float32), gradients("eager", torch.float32)
    for o, e, x in zip(ours, eager, exact, strict=True):
        assert (o - x).norm() <= 2 * (e - x).norm() + 1e-6 * x.norm()
