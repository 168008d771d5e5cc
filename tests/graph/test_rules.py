"""Table 4.1: both sides of every identity on special values, in all types, in both numerics modes."""

import math

import pytest
import torch

import tensorplay as tp
from tensorplay.graph.choices import Choices
from tensorplay.graph.passes import run_passes
from tensorplay.graph.rules import EXACT, IDENTITIES, SIGN_OF_ZERO, same_literal
from tensorplay.testing import SPECIALS, eq, targets

from .programs import captured, observed, same

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def values(dtype):
    if dtype == torch.bool:
        return torch.tensor([True, False])
    if dtype.is_floating_point:
        return torch.tensor(SPECIALS["floating"], dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    numbers = {info.min, info.max, 0, 1, 2, 7} | ({-1} if info.min else set())
    return torch.tensor(sorted(numbers), dtype=dtype)


@pytest.mark.parametrize("dtype", (*FLOATS, *INTS), ids=str)
@pytest.mark.parametrize("rule", IDENTITIES, ids=lambda r: r.left)
def test_both_sides_are_equal(rule, dtype):
    x = values(dtype)
    left = eval(rule.left, {"x": x})
    if left.dtype != dtype:  # the type condition
        return
    if rule.exactness == EXACT:
        assert eq(left, x)
    else:
        assert torch.equal(left[~left.isnan()], x[~x.isnan()])


def test_inexact_rules_are_marked():
    x = torch.tensor([-0.0])
    for rule in IDENTITIES:
        assert eq(eval(rule.left, {"x": x}), x) == (rule.exactness == EXACT), rule
    assert [r.left for r in IDENTITIES if r.exactness == SIGN_OF_ZERO] == ["x + 0"]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dtype", (*FLOATS, *INTS, torch.bool), ids=str)
@pytest.mark.parametrize("text", [r.left for r in IDENTITIES if "-(" not in r.left] + [
    "x + 0.0", "x - 0.0", "x - -0.0", "x * 1.0", "x * True", "x / 1.0", "x ** 1.0", "x * 0", "x + False", "x - 1", "x * -1", "0 + x", "1 * x"
])  # fmt: skip
def test_rewritten_programs_are_equal(text, dtype, strict):
    f = eval(f"lambda x: torch.stack([({text}).double(), 1 / ({text}).double()])", {"torch": torch})
    x = values(dtype)
    try:
        want = observed(f, (x,))
        graph = captured(f, x)
    except RuntimeError:
        return
    got = observed(run_passes(graph, choices=Choices(strict=strict)).graph, (x,))
    if strict or text not in ("x + 0", "x + 0.0", "0 + x"):
        assert same(got, want)
    elif not isinstance(want[0], type):
        a, b = got[0][0].abs().nan_to_num(7), want[0][0].abs().nan_to_num(7)  # but for the sign of zero
        assert torch.equal(a, b) and got[1:] == want[1:]


def test_strict_numerics_keep_the_sign_of_zero():
    f = lambda x: 1 / (x + 0)  # noqa: E731
    x = torch.tensor([-0.0, 1.0])
    strict = tp.compile(f, strict_native=True, options={"numerics": "strict"})
    assert eq(strict(x), f(x)) and strict(x)[0] == math.inf
    assert tp.compile(f, strict_native=True)(x)[0] == -math.inf


def test_literals_are_compared_by_type_and_bits():
    assert same_literal(1.0, 1) and same_literal(0.0, 0) and same_literal(-0.0, -0.0)
    assert not same_literal(-0.0, 0) and not same_literal(0.0, -0.0) and not same_literal(True, 1)
    assert not same_literal(math.nan, math.nan)


def test_multiplication_by_zero_and_sums_stay_as_written():
    def f(x):
        return (x * 0).exp(), ((x + 1) + 2).exp()

    x = values(torch.float32)
    front = run_passes(captured(f, x)).graph
    assert targets(front).count("mul") == 1 and targets(front).count("add") == 2


def test_constants_move_right_only_where_the_operator_commutes():
    from .programs import traced

    x = torch.tensor([1.0, 2.0])
    front = run_passes(traced(lambda x: (2 * x) + (3 - x) + (1 + x) + 2**x, x)).graph
    args = {n.name: n.args for n in front.graph.nodes if n.op == "call_function"}
    assert args["mul"][1] == 2 and args["sub"][0] == 3 and args["pow_1"][0] == 2
    assert same(observed(front, (x,)), observed(lambda x: (2 * x) + (3 - x) + (1 + x) + 2**x, (x,)))


def test_values_that_leave_stay_tensors_of_their_own():
    cf = tp.compile(lambda x: x + 0, strict_native=True)
    x = torch.ones(3)
    y = cf(x)
    assert y.data_ptr() != x.data_ptr()
    y.add_(1)
    assert eq(x, torch.ones(3))
