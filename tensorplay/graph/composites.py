"""Composite operators as chains of primitives (section 4.4, table 4.2).

In: a settled graph.  Out: composites of the first row of the table are chains, those of the second stay, those of the
third are chains on request; one note for each.
Always: a chain has the composite's value, special values included, and its type and layout. Gradients never flow
through one: in a training region composites stay whole and keep their own derivative (the chain of selu has gradient
NaN at 100), as they do under autocast and, where a chain rounds more often than the operator does, in half types.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..capture.ambient import SETTERS
from ..stax.loops.nodes import Spec
from .choices import OPTIONAL, Choices
from .edit import Builder, Value, precise, replace
from .layout import Unknown
from .memory import Memory, facts
from .rules import name_of

KEPT = frozenset((
    "silu", "gelu", "elu", "leaky_relu", "hardtanh", "hardsigmoid", "threshold", "softplus", "log1p", "expm1", "log10",
    "sinh", "cosh", "asinh", "acosh", "atanh",
))  # fmt: skip

ANY, FLOAT = "every real type", "float32 and float64"
_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Composite:
    """One row. rule: the chain, a function of the operator's own arguments that runs on tensors as well; it returns
    NotImplemented for arguments that it does not cover. types: where it is exact enough. depth: how many rows deep the
    chain is, so that what it emits is always less deep. exact: whether the chain has the operator's digits everywhere.
    """

    name: str
    rule: Callable[..., Any]
    types: str
    depth: int
    exact: bool


ROWS: dict[str, Composite] = {}


def composite(
    types: str = FLOAT, depth: int = 1, exact: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(rule: Callable[..., Any]) -> Callable[..., Any]:
        ROWS[rule.__name__] = Composite(rule.__name__, rule, types, depth, exact)
        return rule

    return add


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and value == value


# ---- the rows of table 4.2 ------------------------------------------------------------------------------------------


@composite(exact=False)  # near zero exp(x) - 1 has fewer digits than expm1; stax computes it as that
def selu(input: Any, inplace: bool = False) -> Any:
    negative = 1.6732632423543772 * precise(input.exp() - 1)
    return 1.0507009873554805 * torch.where(input > 0, input, negative)


@composite(ANY, depth=2)
def relu6(input: Any, inplace: bool = False) -> Any:
    return torch.clamp(input, 0, 6)


@composite()
def mish(input: Any, inplace: bool = False) -> Any:
    return input * torch.nn.functional.softplus(input).tanh()


@composite(ANY)
def tanhshrink(input: Any) -> Any:
    return input - input.tanh()


@composite(ANY)
def hardshrink(input: Any, lambd: Any = 0.5) -> Any:
    if not is_number(lambd):
        return NotImplemented
    return torch.where((input >= -lambd) & (input <= lambd), 0.0, input)


@composite()
def softshrink(input: Any, lambd: Any = 0.5) -> Any:
    if not is_number(lambd) or lambd < 0:  # eager raises
        return NotImplemented
    inside = torch.where(input != input, input, 0.0)
    return torch.where(input > lambd, input - lambd, torch.where(input < -lambd, input + lambd, inside))


@composite(ANY)
def clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    bounds = [b for b in (min, max) if b is not None]
    if not bounds or not all(is_number(b) and _fits(b, input.dtype) for b in bounds):
        return NotImplemented
    if min is not None:
        input = torch.where(input < min, min, input)
    return input if max is None else torch.where(input > max, max, input)


def _fits(bound: float, dtype: torch.dtype) -> bool:
    """Whether comparing with the bound and storing it mean what they do in eager, which converts it first."""
    if dtype.is_floating_point:
        return dtype in _WIDE or torch.tensor(bound, dtype=dtype).item() == bound
    return type(bound) is int and dtype != torch.bool and torch.iinfo(dtype).min <= bound <= torch.iinfo(dtype).max


@composite()
def lerp(input: Any, end: Any, weight: Any) -> Any:
    if type(weight) in (int, float):
        far = abs(weight) >= 0.5
        return end - (end - input) * (1 - weight) if far else input + weight * (end - input)
    distance = end - input
    return torch.where(weight.abs() < 0.5, input + weight * distance, end - distance * (1 - weight))


@composite()
def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    product = tensor1 if value == 1 else value * tensor1
    return input + product * tensor2


@composite()
def addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    quotient = tensor1 if value == 1 else value * tensor1
    return input + quotient / tensor2


@composite(depth=2)
def logit(input: Any, eps: Any = None) -> Any:
    if eps is not None:
        if not is_number(eps):
            return NotImplemented
        input = torch.clamp(input, eps, 1 - eps)
    return (input / (1 - input)).log()


@composite()
def exp2(input: Any) -> Any:
    return 2.0**input  # exact where x is whole, which exp(x * log(2)) is not


@composite(ANY)
def square(input: Any) -> Any:
    return input * input


@composite(ANY)
def deg2rad(input: Any) -> Any:
    return input * (math.pi / 180)


@composite(ANY)
def rad2deg(input: Any) -> Any:
    return input * (180 / math.pi)


def _over(input: Any, dim: Any, stacklevel: Any, dtype: Any) -> Any:
    """The tensor and the dimension of a softmax; NotImplemented where neither torch's nor ours is defined."""
    if isinstance(stacklevel, torch.dtype):  # torch.softmax takes the type third
        dtype = stacklevel
    if type(dim) is not int or not input.shape or 0 in input.shape:
        return NotImplemented, dim
    return (input if dtype in (None, input.dtype) else input.to(dtype)), dim


@composite()
def softmax(input: Any, dim: Any = None, _stacklevel: Any = 3, dtype: Any = None) -> Any:
    x, dim = _over(input, dim, _stacklevel, dtype)
    if x is NotImplemented:
        return x
    exponential = (x - x.amax(dim, True)).exp()
    return exponential / exponential.sum(dim, True)


@composite()
def log_softmax(input: Any, dim: Any = None, _stacklevel: Any = 3, dtype: Any = None) -> Any:
    x, dim = _over(input, dim, _stacklevel, dtype)
    if x is NotImplemented:
        return x
    distance = x - x.amax(dim, True)
    return distance - distance.exp().sum(dim, True).log()


@composite()
def group_norm(
    input: Any, num_groups: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5, cudnn_enabled: bool = True
) -> Any:
    shape = input.shape
    if len(shape) < 2 or 0 in shape or shape[1] % num_groups:
        return NotImplemented
    groups = input.reshape(shape[0], num_groups, -1)
    centered = groups - groups.mean(2, True)
    normal = (centered * ((centered * centered).mean(2, True) + eps).rsqrt()).reshape(shape)
    channels = (shape[1], *[1] * (len(shape) - 2))
    if weight is not None:
        normal = normal * weight.reshape(channels)
    return normal if bias is None else normal + bias.reshape(channels)


# ---- the pass -------------------------------------------------------------------------------------------------------


def row_of(node: fx.Node, choices: Choices) -> Composite | None:
    """The row by which the node is to be decomposed under these choices, whatever its arguments."""
    row = ROWS.get(name_of(node))
    if row is None or choices.training or (choices.strict and not row.exact):
        return None
    return row if row.name not in OPTIONAL or row.name in choices.optional else None


def decompose(graph: fx.Graph, choices: Choices) -> list[str]:
    rows = [(node, row) for node in graph.nodes if (row := row_of(node, choices)) is not None]
    if not rows or choices.autocast:
        return []
    if any(n.op == "call_function" and n.target in SETTERS for n in graph.nodes):
        return []
    memory = Memory(graph)
    return [note for node, row in rows if (note := _expand(node, row, memory))]


def _expand(node: fx.Node, row: Composite, memory: Memory) -> str:
    if not all(condition(row, node) for condition in CONDITIONS.values()):
        return ""
    builder = Builder(node)
    args, kwargs = builder.values((node.args, node.kwargs))
    try:
        result = row.rule(*args, **kwargs)
    except (TypeError, RuntimeError, Unknown):  # arguments of another overload, or a layout that only torch knows
        result = NotImplemented
    made = builder.made
    if not isinstance(result, Value) or not made or not same(result._node, node):
        builder.undo()
        return ""
    memory.holders.update((s, [n]) for n in made for s in facts(n).lies)
    memory.position.update((n, memory.position[node]) for n in made)
    chain = ", ".join(n.name for n in made)
    replace(node, result._node, memory)
    return f"{node} is the chain {chain}"


def _sampled(row: Composite, node: fx.Node) -> bool:
    """The sample values of what it takes and gives are known."""
    values = [node, *node.all_input_nodes]
    return len(values) > 1 and all(isinstance(n.meta.get("spec"), Spec) for n in values)


def _pure(row: Composite, node: fx.Node) -> bool:
    """It writes nothing: `selu(x, inplace=True)` stays."""
    return not facts(node).effect


def _typed(row: Composite, node: fx.Node) -> bool:
    """The chain rounds no more often than the operator; integers where the operator takes them as they are."""
    types = {a.meta["spec"].dtype for a in node.all_input_nodes} | {node.meta["spec"].dtype}
    return not any(t.is_complex or t == torch.bool for t in types) and (row.types == ANY or types <= set(_WIDE))


CONDITIONS: dict[str, Callable[[Composite, fx.Node], bool]] = {"sample": _sampled, "writes": _pure, "type": _typed}


def same(made: fx.Node, node: fx.Node) -> bool:
    """Whether a chain's result has the composite's type and layout."""
    a, b = made.meta["spec"], node.meta["spec"]
    return (a.size, a.stride, a.dtype) == (b.size, b.stride, b.dtype) and b.offset == 0


def weight(graph: fx.Graph, choices: Choices) -> int:
    """The composites of a graph, each by its depth: what a chain emits weighs less than what it replaces."""
    total = 0
    for node in graph.nodes:
        row = ROWS.get(name_of(node).rstrip("_")) if node.op in ("call_function", "call_method") else None
        if row is not None:
            total += _EMITTED**row.depth
    return total


_EMITTED = 8  # more composites than any chain emits
