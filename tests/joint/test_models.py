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
