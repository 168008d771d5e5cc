"""The joint graph with less to save: what backward reads is expressed by smaller values (rows 5.06, 5.19).

In: a joint graph, which is rewritten in place.
Always: every value keeps its bits, size, stride and dtype.

- A mask that was drawn as floats of 0 and 1 is kept as bool.
- A normalized tensor is computed from its input and the statistics, as the row does it, so that backward can compute
  it again without the reduction.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..loops.nodes import Spec
from .functional import dense
from .mutate import bound, laid_out

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
MASKS = {aten.bernoulli.default, aten.bernoulli.p}
BATCH_NORMS = {aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats}


def narrow(graph: fx.Graph) -> None:
    """Rewrites masks and normalizations of forward."""
    for node in list(graph.nodes):
        if node.target is aten.native_batch_norm_backward.default and node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])  # in training it reads the saved statistics only
        if node.op != "call_function" or node.meta.get("backward"):
            continue
        if _is_mask(node.target) and node.meta["spec"].dtype.is_floating_point:
            _mask(graph, node)
        elif node.target is aten.native_layer_norm.default:
            _normalize(graph, node, lambda rank: None)
        elif node.target in BATCH_NORMS and node.args[-3] is True:
            _normalize(graph, node, lambda rank: [-1] + [1] * (rank - 2) if rank > 2 else None)


def _is_mask(target: Any) -> bool:
    return target in MASKS or (getattr(target, "namespace", "") == "tensorplay" and target is laid_out(aten.bernoulli_.float))


class _Writer:
    """Makes nodes, each behind the last."""

    def __init__(self, graph: fx.Graph, at: fx.Node) -> None:
        self.graph, self.at = graph, at

    def __call__(self, target: Any, spec: Any, *args: Any, **kwargs: Any) -> fx.Node:
        name = "getitem" if target is operator.getitem else target._schema.name.split("::")[1]
        with self.graph.inserting_after(self.at):
            node = self.graph.create_node("call_function", target, args, kwargs, name)
        node.meta.update(spec=spec, line=self.at.meta.get("line", ""), ordered=False, backward=False)
        self.at = node
        return node


def _as(spec: Spec, dtype: torch.dtype) -> Spec:
    return Spec(spec.size, spec.stride, dtype, spec.device)


def _mask(graph: fx.Graph, node: fx.Node) -> None:
    users, spec = list(node.users), node.meta["spec"]
    write = _Writer(graph, node)
    again = write(aten._to_copy.default, spec, write(aten.ne.Scalar, _as(spec, torch.bool), node, 0), dtype=spec.dtype)
    for user in users:
        user.replace_input_with(node, again)


def _normalize(graph: fx.Graph, node: fx.Node, shape: Callable[[int], list[int] | None]) -> None:
    """Result 0 of a normalization as (x - mean) * rstd * weight + bias; `shape`: of statistics beside a tensor of rank."""
    found = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    arguments = bound(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    x, parameters = arguments["input"], ((aten.mul.Tensor, arguments["weight"]), (aten.add.Tensor, arguments["bias"]))
    spec, *stats = node.meta["spec"][:3]
    wide = torch.float32 if spec.dtype in HALF else spec.dtype
    if 0 not in found or not spec.numel or any(t.dtype != wide for t in stats):
        return
    if not (spec.stride == x.meta["spec"].stride == dense(spec)):
        return
    write = _Writer(graph, node)
    items = []
    for k in (1, 2):
        if k in found:
            write.at.append(found[k])
            write.at = found[k]
        else:
            write(operator.getitem, stats[k - 1], node, k)
        items.append(write.at)
    size = shape(len(spec.size))

    def placed(t: fx.Node) -> fx.Node:
        if size is None:
            return t
        own = t.meta["spec"]
        full = (own.numel, *size[1:])
        return write(aten.view.default, Spec(full, (own.stride[0], *(1,) * (len(full) - 1)), own.dtype, own.device), t, list(full))

    mean, rstd = (placed(t) for t in items)
    y = x if spec.dtype == wide else write(aten._to_copy.default, _as(spec, wide), x, dtype=wide)
    y = write(aten.sub.Tensor, _as(spec, wide), y, mean)
    y = write(aten.mul.Tensor, _as(spec, wide), y, rstd)
    for target, parameter in parameters:
        if parameter is not None:
            y = write(target, _as(spec, wide), y, placed(parameter))
    if spec.dtype != wide:
        y = write(aten._to_copy.default, spec, y, dtype=spec.dtype)
    found[0].replace_all_uses_with(y)
    graph.erase_node(found[0])
