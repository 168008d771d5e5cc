"""Decomposition: every rule gives eager's value on special values, loads nothing and ends (section 4.8)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from tensorplay.stax.joint import decompose

from .graphs import aten, ops, run, trace

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 3.7, -88.0, 88.0, 1e-42, 1e30, -1e30, float("inf"), -float("inf"), float("nan")]


def special(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.tensor(SPECIAL)
    return torch.stack([values, values.flip(0)]).to(dtype)


CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "aten.mse_loss.default": lambda x: aten.mse_loss.default(x, x.flip(1), 0),
    "aten.zero.default": lambda x: aten.zero.default(x),
    "aten.block_diag.default": lambda x: aten.block_diag.default([x, x[0], x[0, 0]]),
    "aten.glu.default": lambda x: aten.glu.default(x, 0),
    "aten.binary_cross_entropy_with_logits.default": lambda x: aten.binary_cross_entropy_with_logits.default(
        x, x.flip(1).sigmoid(), x.abs(), x[0].abs(), 0
    ),
    "aten.glu_backward.default": lambda x: aten.glu_backward.default(x[:1], x.flip(1), 0),
    "aten.select_backward.default": lambda x: aten.select_backward.default(x, [3, *x.shape], 0, 1),
    "aten.slice_backward.default": lambda x: aten.slice_backward.default(x, [2, 2 * x.shape[1]], 1, 0, 2 * x.shape[1], 2),
    "aten.as_strided_scatter.default": lambda x: aten.as_strided_scatter.default(x, x[:, :3], [2, 3], [1, 4], 2),
    "aten.as_strided_copy.default": lambda x: aten.as_strided_copy.default(x, [3, 2], [1, 5], 1),
    "aten.diagonal_backward.default": lambda x: aten.diagonal_backward.default(x[0], [x.shape[1], x.shape[1]], 0, 0, 1),
}


def test_every_rule_has_a_case() -> None:
    assert set(CASES) == {str(op) for op in decompose.OWN}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_rules_on_special_values(name: str, dtype: torch.dtype) -> None:
    x = special(dtype)
    graph = trace(CASES[name], x)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float64: 1e-12}[dtype]
    denormal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    torch.testing.assert_close(run(graph, x)[0], CASES[name](x), equal_nan=True, rtol=tolerance, atol=denormal)


@pytest.mark.parametrize("name", CASES)
def test_rules_end_in_the_base(name: str) -> None:
    """Proposition 4.3: what a rule leaves has a row or no rule."""
    calls = [n.target for n in trace(CASES[name], special()).module.graph.nodes if n.op == "call_function"]
    for op in calls:
        if isinstance(op, torch._ops.OpOverload):
            assert decompose.rule(op) is None and str(op) != name


def test_rows_are_not_decomposed() -> None:
    assert ops(trace(lambda x: torch.var_mean(x, 1), torch.randn(3, 4))) == ["var_mean"]
    assert ops(trace(lambda x: torch.nn.functional.gelu(x).softmax(-1), torch.randn(3, 4))) == ["gelu", "_softmax"]


def test_operators_without_rule_stay() -> None:
    assert ops(trace(lambda x: torch.linalg.svd(x), torch.randn(3, 3))) == ["_linalg_svd"]


def test_rules_load_no_heavy_module() -> None:
    code = """
import sys, torch
from tests.joint.test_decompose import CASES, special
from tests.joint.graphs import trace
before = {m for m in ("sympy", "torch._dynamo", "torch._inductor") if m in sys.modules}
for name, case in CASES.items():
    trace(case, special())
    print(*[name for m in ("sympy", "torch._dynamo", "torch._inductor") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.strip(), done.stdout
