"""Pointwise regions, as hints for back ends that want them (section 4.7).

In: a graph.  Out: meta['region'], ('pointwise', number) or (None, None), on every node; one note where one changed.
Always: the regions are the connected components of the pointwise nodes, direction of edges aside; numbered in order
of appearance; only metadata change, so that a second run finds nothing to do.
"""

from __future__ import annotations

from torch import fx

from ..stax.loops.nodes import Spec
from .choices import Choices
from .memory import facts
from .rules import POINTWISE, name_of

NONE = (None, None)


def mark_regions(graph: fx.Graph, choices: Choices) -> list[str]:
    parent = {n: n for n in graph.nodes if fusible(n)}
    rank = dict.fromkeys(parent, 0)

    def find(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            parent[node] = node = parent[parent[node]]
        return node

    for node in parent:
        for used in node.all_input_nodes:
            if used in parent:
                a, b = find(node), find(used)
                if a is not b:
                    if rank[a] < rank[b]:
                        a, b = b, a
                    parent[b] = a
                    rank[a] += rank[a] == rank[b]
    numbers: dict[fx.Node, int] = {}
    moved = 0
    for node in graph.nodes:
        region = ("pointwise", numbers.setdefault(find(node), len(numbers))) if node in parent else NONE
        if node.op not in ("placeholder", "output") and node.meta.get("region") != region:
            node.meta["region"] = region
            moved += 1
    return [f"{len(parent)} nodes in {len(numbers)} regions"] if moved else []


def fusible(node: fx.Node) -> bool:
    """A pointwise operator that only computes a tensor."""
    if node.op not in ("call_function", "call_method") or not isinstance(node.meta.get("spec"), Spec):
        return False
    return not facts(node).effect and name_of(node) in POINTWISE


def regions(graph: fx.Graph) -> list[tuple[str, str | None, int | None]]:
    """The hints as the chapter prints them: (name, kind, number) of each node that computes."""
    return [
        (n.name, *n.meta.get("region", NONE)) for n in graph.nodes if n.op not in ("placeholder", "output", "get_attr")
    ]
