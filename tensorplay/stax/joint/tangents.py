"""Backward for a subset of the tangents: an absent tangent stays absent, as in eager (row 5.13).

In: the backward graph, where each primal's gradient stands among its outputs, which tangents are there.
Out: the backward graph of those alone, the new places of the gradients, and which other inputs it still reads.
Always: a gradient that no present tangent reaches is absent; nothing is computed from an absent one. Zeros stand in
only where one operator takes both a present and an absent gradient and is no sum.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from ...errors import UnsupportedError
from ..loops.nodes import Spec, row_major
from .differentiate import dependent
from .opgraph import OpGraph, runnable
from .retrace import sweep

aten = torch.ops.aten
Places = tuple[int | None, ...]
MOST = 16  # autograd nodes of a region, each with a backward part of its own; where there would be more there is one


def restrict(backward: OpGraph, grads: Places, present: tuple[bool, ...]) -> tuple[OpGraph, Places, tuple[bool, ...]]:
    """The backward of the present tangents."""
    nodes = list(backward.module.graph.nodes)
    given = [n for n in nodes if n.op == "placeholder"]
    others, tangents = given[: len(given) - len(present)], given[len(given) - len(present) :]
    if all(present):
        return backward, grads, (True,) * len(others)
    absent = {n for n, there in zip(tangents, present, strict=True) if not there}
    follows = dependent(backward.module.graph)
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in nodes[:-1]:
        if node in absent:
            continue
        depends = [a for a in node.all_input_nodes if a in follows]
        if depends and absent.issuperset(depends):
            absent.add(node)
        elif (only := _sum_of_one(node, absent)) is not None:
            made[node] = _laid(graph, made[only], node)
        else:
            for a in depends:
                if a in absent and a not in made:
                    made[a] = _zeros(graph, a)
            made[node] = graph.node_copy(node, made.__getitem__)
    outputs: Any = nodes[-1].args[0]
    left = [k for k, x in enumerate(outputs) if x not in absent]
    graph.output(tuple([made[outputs[k]] for k in left]))
    sweep(graph)
    reads = tuple(bool(made[n].users) for n in others)
    for n in others:
        if not made[n].users:
            graph.erase_node(made[n])
    places = tuple(None if k is None or k not in left else left.index(k) for k in grads)
    return OpGraph(runnable(backward.module, graph), True), places, reads


def meetings(backward: OpGraph, count: int) -> tuple[int, ...]:
    """For each tangent, as bits, those that it meets, itself too, at an operator that reads a saved value: there their
    results share a part of eager's graph, which the backward of one of them frees for the others too."""
    nodes = list(backward.module.graph.nodes)
    given = [n for n in nodes if n.op == "placeholder"]
    saved = set(given[: len(given) - count])  # and what follows from saved values alone
    needs: dict[fx.Node, int] = {n: 1 << k for k, n in enumerate(given[len(given) - count :])}
    met: set[int] = set()
    for node in nodes:
        if node.op != "call_function":
            continue
        bits = 0
        for a in node.all_input_nodes:
            bits |= needs.get(a, 0)
        reads = not saved.isdisjoint(node.all_input_nodes)
        if bits:
            needs[node] = bits
            met.update((bits,) if reads else ())
        elif reads:
            saved.add(node)
    found = [0] * count
    for together in met:
        for k in range(count):
            found[k] |= together if together >> k & 1 else 0
    return tuple(found)


def groups(reached: Sequence[Sequence[int]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Tangents that reach a primal in common, and the primals that they reach: what one autograd node is for."""
    found: list[tuple[set[int], set[int]]] = []
    for k, primals in enumerate(reached):
        joined = [group for group in found if not group[1].isdisjoint(primals)]
        found = [group for group in found if group not in joined]
        found.append((set().union({k}, *[a for a, _ in joined]), set().union(primals, *[b for _, b in joined])))
    if len(found) > MOST:
        found = [(set().union(*[a for a, _ in found]), set().union(*[b for _, b in found]))]
    return sorted((tuple(sorted(a)), tuple(sorted(b))) for a, b in found)


def _sum_of_one(node: fx.Node, absent: Iterable[fx.Node]) -> fx.Node | None:
    """The operand of a sum of two gradients that is there, where the sum is just that."""
    if node.target not in (aten.add.Tensor, aten.add.default) or len(node.args) != 2 or node.kwargs:
        return None
    there = [a for a in node.args if a not in absent]
    if len(there) != 1 or not isinstance(there[0], fx.Node):
        return None
    a, b = there[0].meta["spec"], node.meta["spec"]
    return there[0] if (a.size, a.dtype) == (b.size, b.dtype) else None


def _laid(graph: fx.Graph, value: fx.Node, node: fx.Node) -> fx.Node:
    """The value in the layout of the node that it stands for: views of it were recorded with that."""
    spec = node.meta["spec"]
    if value.meta["spec"].stride == spec.stride:
        return value
    if spec.stride == row_major(spec.size):
        made = graph.call_function(aten.clone.default, (value,), {"memory_format": torch.contiguous_format})
    else:
        options = {"dtype": spec.dtype, "device": spec.device}
        blank = graph.call_function(aten.empty_strided.default, (list(spec.size), list(spec.stride)), options)
        blank.meta.update(node.meta)
        made = graph.call_function(aten.copy.default, (blank, value))
    made.meta.update(node.meta)
    return made


def _zeros(graph: fx.Graph, node: fx.Node) -> fx.Node:
    spec = node.meta["spec"]
    if not isinstance(spec, Spec) or spec.stride != row_major(spec.size) or node.target is operator.getitem:
        raise UnsupportedError(f"an absent gradient at {node.name}")
    made = graph.call_function(aten.full.default, (list(spec.size), 0), {"dtype": spec.dtype, "device": spec.device})
    made.meta.update(node.meta)
    return made
