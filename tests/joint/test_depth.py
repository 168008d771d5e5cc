"""Proposition 4.3 over the whole table in use: the rules form a graph without cycles, and every chain ends in the base.

A rule is ours or a composite kernel of torch in C++, whose calls no source text shows: each rule runs on arguments from
torch's own database of operators, from the aliases that it lists, or made up from the schema, and its calls are noted.
"""

from __future__ import annotations

import graphlib
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tensorplay.errors import UnsupportedError
from tensorplay.stax.joint import decompose

from .graphs import aten, trace
from .test_decompose import CASES, special

Op = torch._ops.OpOverload
# other layouts, other devices, packed arguments, and backward kernels that only a forward kernel's own state fits
ELSEWHERE = [
    "sparse", "coalesce", "to_dense", "nested", "mkldnn", "quantize", "fake_quant", "fbgemm", "rowwise", "xla", "cufft", "cudnn", "vulkan", "nnpack", "packed", "pack_padded", "_test", "batch_dim", "unpack_dual", "_version", "get_gradients", "lanczos", "names", "Dimname", "align_to", "lstm_cell", "gru_cell", "backward", "wrapped", "qparams", "propagate",
]  # fmt: skip


def table() -> list[Op]:
    """Every operator of torch that a rule replaces; what writes is split before rules are asked."""
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        space, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        op = getattr(getattr(aten, name, None), overload or "default", None) if space == "aten" else None
        if isinstance(op, Op) and not op._schema.is_mutable and decompose.rule(op) is not None:
            found.append(op)
    return found


class Cycle(Exception):
    """A rule led back to its own operator."""


class Watch(TorchDispatchMode):
    """Runs rules as the recorder does, and notes which operators each one calls."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, calls: dict[Op, set[Op]]) -> None:
        super().__init__()
        self.calls = calls
        self.inside: list[Op] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            self.calls[self.inside[-1]].add(func)
        rule = None if func._schema.is_mutable else decompose.rule(func)
        if rule is None:
            return func(*args, **kwargs)
        if func in self.inside:
            raise Cycle([*self.inside, func])
        self.calls.setdefault(func, set())
        self.inside.append(func)
        try:
            with self:
                found = rule(*args, **kwargs)
        finally:
            self.inside.pop()
        return func(*args, **kwargs) if found is NotImplemented else found


def known() -> Iterator[tuple[Any, tuple, dict]]:
    """Calls of torch's functions with the arguments that its database lists."""
    for info in op_db:
        dtype = next((d for d in (torch.float32, torch.int64, torch.complex64) if d in info.dtypes), None)
        if dtype is None:
            continue
        for function in (info.op, *[alias.op for alias in info.aliases]):
            for sample in itertools.islice(info.sample_inputs_func(info, "cpu", dtype, False), 2):
                yield function, (sample.input, *sample.args), sample.kwargs


def made_up(op: Op) -> Iterator[tuple[tuple, dict]]:
    """Arguments of the types that the schema names."""
    square = torch.rand(2, 2) + 0.5
    tensors = [square, square > 1, torch.arange(4).view(2, 2) % 2, square[0], torch.rand(2, 2, 2, 2), square[None],
               square.to(torch.complex64), torch.arange(2)]  # fmt: skip
    fixed = {
        "int": [0, 1, 2], "SymInt": [0, 1, 2], "float": [0.5], "number": [2], "bool": [False], "List[int]": [[0], [1], [2, 2], [0, 1]],
        "List[SymInt]": [[0], [1], [2, 2], [0, 1]], "List[number]": [[2, 2]], "List[float]": [[2.0, 2.0]], "str": ["fro", "sum"],
    }  # fmt: skip
    arguments = op._schema.arguments
    for x in tensors:
        own = {"Tensor": [x, tensors[0], tensors[2]], "List[Tensor]": [[x, x]], "List[Optional[Tensor]]": [[x, x]]}
        choices = [
            own.get(str(a.type)) or ([a.default_value] if a.has_default_value() else fixed.get(str(a.type), [None]))
            for a in arguments
        ]
        for values in itertools.islice(itertools.product(*choices), 12):
            named = list(zip(arguments, values, strict=True))
            yield tuple(v for a, v in named if not a.kwarg_only), {a.name: v for a, v in named if a.kwarg_only}


def attempt(calls: dict[Op, set[Op]], function: Any, args: tuple, kwargs: dict) -> None:
    try:
        with Watch(calls):
            function(*args, **kwargs)
    except Cycle:
        raise
    except Exception:  # arguments that the operator does not take
        pass


@pytest.fixture(scope="module")
def calls() -> dict[Op, set[Op]]:
    """Which operators each rule calls; in inference mode, since else autograd takes composites apart before a rule is asked."""
    found: dict[Op, set[Op]] = {}
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        for case in CASES.values():
            attempt(found, case, (special(),), {})
        for function, args, kwargs in known():
            attempt(found, function, args, kwargs)
        for op in table():
            if op not in found and not any(word in str(op) for word in ELSEWHERE):
                for args, kwargs in made_up(op):
                    attempt(found, op, args, kwargs)
                    if op in found:
                        break
    return found


def test_every_rule_ran(calls: dict[Op, set[Op]]) -> None:
    left = [str(op) for op in table() if op not in calls and not any(word in str(op) for word in ELSEWHERE)]
    assert not left and len(calls) >= 400


def test_the_rules_have_no_cycle(calls: dict[Op, set[Op]]) -> None:
    edges = {op: {inner for inner in called if inner in calls} for op, called in calls.items()}
    depth: dict[Op, int] = {}
    for op in graphlib.TopologicalSorter(edges).static_order():  # raises on a cycle
        depth[op] = 1 + max((depth[inner] for inner in edges[op]), default=0)
    assert 2 <= max(depth.values()) <= 6


def test_a_cycle_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        decompose.OWN, aten.mse_loss.default, lambda x, y, reduction=1: aten.mul.Tensor(aten.mse_loss.default(x, y), 1)
    )
    decompose.rule.cache_clear()
    try:
        with pytest.raises(Cycle, match="mse_loss"):
            attempt({}, aten.mse_loss.default, (torch.ones(2), torch.ones(2)), {})
    finally:
        monkeypatch.undo()
        decompose.rule.cache_clear()


def test_two_hundred_operators_end_in_the_base() -> None:
    """Retraced with the recorder itself: each operator that is left has a row, or no rule (a fallback kernel)."""
    ran = 0
    for info in op_db:
        if torch.float32 not in info.dtypes or "sparse" in info.name:
            continue
        sample = next(iter(info.sample_inputs_func(info, "cpu", torch.float32, False)))
        tensors = [
            t for t in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, torch.Tensor)
        ]

        def program(*inputs: torch.Tensor, sample: Any = sample, info: Any = info) -> Any:
            rest = iter(inputs)
            tree = (sample.input, sample.args, sample.kwargs)
            first, args, kwargs = pytree.tree_map(lambda t: next(rest) if isinstance(t, torch.Tensor) else t, tree)
            return [t for t in pytree.tree_leaves(info.op(first, *args, **kwargs)) if isinstance(t, torch.Tensor)]

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                graph = trace(program, *tensors)
        except UnsupportedError:
            continue
        ran += 1
        for node in graph.module.graph.nodes:
            if isinstance(node.target, Op):
                assert decompose.has_row(node.target) or decompose.rule(node.target) is None, (info.name, node.target)
    assert ran >= 200
