"""What the operator database once found wrong in native code; each case stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils._pytree import tree_leaves

import tensorplay as tp
from tensorplay.testing import eq

BOOLS = torch.rand(6, 7, 19, generator=torch.Generator().manual_seed(0)) > 0.5
FLOATS = torch.randn(3, 2, 1, 2, generator=torch.Generator().manual_seed(1))

CASES: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], object]]] = {
    # true and false are masks of -1 and 0 in registers: their order was reversed
    "max of bool, rows": (BOOLS, lambda x: x.max(-1)),
    "min of bool, columns": (BOOLS, lambda x: x.min(0)),
    # a bool kept from an earlier pass and read as a single element
    "any of a reduction as condition": (FLOATS, lambda x: torch.quantile(x, 0.5, dim=0, keepdim=True)),
    # an arena of no bytes whose only buffer is empty
    "library call on nothing": (torch.ones(0, 3, 0), lambda x: torch.linalg.pinv(x @ x.mT)),
    # lcm divides without a signal; integer powers wrap
    "gcd, lcm, powers": (torch.tensor([0, 1, -6, 2**62, -(2**63)]), lambda x: (x.gcd(x.flip(0)), x.lcm(torch.tensor(4)), x ** torch.tensor([3, -1, 70, 2, 1]))),
    "ranges": (torch.tensor(7), lambda x: (torch.linspace(0, x, 5, dtype=torch.int64), torch.linspace(-1, 1, 33, dtype=torch.bfloat16))),
    "gather of one element": (torch.tensor(7.5), lambda x: x.gather(0, torch.tensor([0, 0]))),
    "block_diag": (torch.ones(2, 3), lambda x: torch.block_diag(x, x[0], torch.tensor(3))),
    # x - tanh(x) of -0 is 0 because tanh keeps the sign
    "tanh of -0": (torch.full((33,), -0.0), lambda x: (torch.tanh(x), torch.nn.functional.tanhshrink(x))),
    # between tensors a reflected operator is no division
    "__rdiv__ of tensors": (torch.arange(1.0, 41).as_strided((5, 3, 2), (1, 1, 7)), lambda x: x.__rdiv__(x.contiguous() + 2)),
    # a value at its mean times a negative weight, where nothing is added
    "layer norm of one element": (torch.tensor([[-8.5]]), lambda x: torch.layer_norm(x, (1,), x[0], None)),
    "gradient of dropout of integers": (torch.tensor([-9, 9, 0]), lambda x: torch.ops.aten.native_dropout_backward(x, x > 0, 2.0)),
    "norms of an empty batch": (torch.ones(0, 4, 3), lambda x: (torch.layer_norm(x, (3,)), torch.group_norm(x, 2), torch.rms_norm(x, (4, 3)))),
    "take of one number": (torch.tensor(5.0), lambda x: x.take(torch.tensor([[0, -1], [0, 0]]))),
    # GCC 12 reads a tail of known lanes as if it were full
    "sum of a constant beside floats": (torch.tensor([-4, -6, -6, -5, 4]), lambda x: (x.sum(0, dtype=torch.float32), (x * 0 + 1).sum(0), (x * 0 + 1).bool().all())),
    "relu of -0": (torch.tensor([-0.0, 0.0, 1.0, -1.0]), torch.relu),
}


@pytest.mark.parametrize("name", CASES)
def test_found_by_the_operator_database(name: str) -> None:
    x, function = CASES[name]
    if name == "any of a reduction as condition" and torch.__version__ < (2, 13):
        pytest.skip("quantile of this torch compares data on the host")
    compiled = tp.compile(function, strict_native=True)
    got, want = tree_leaves(compiled(x)), tree_leaves(function(x))
    assert eq(tuple(got), tuple(want))
    assert [t.stride() for t in got] == [t.stride() for t in want]


def test_a_new_tensor_may_overlap_itself() -> None:
    with pytest.warns(tp.FallbackWarning, match="overlaps itself"):
        made = tp.compile(lambda x: x.new_empty_strided((3, 2, 2), (1, 2, 3)))(torch.ones(2))
    assert made.shape == (3, 2, 2) and made.stride() == (1, 2, 3)
