"""In which memory the values of a captured graph lie, and what its nodes do beside computing a value.

In: a graph whose nodes carry meta['trait'], what capture saw each call do.  Out: meta['facts'] on every node, kept
right by each rewrite, and `Memory`, an index of them over the whole graph.
Always: two values that may share memory have a storage in common; a node without a trait counts as writing its
arguments, drawing random numbers and sharing memory with everything it takes.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..capture.ambient import SETTERS
from ..capture.gates import Trait
from .rules import name_of


@dataclass(frozen=True)
class Facts:
    """lies: storages of the node's value. writes: storages that it changes. effect: it may not be removed or merged."""

    lies: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    effect: bool = False


_NUMBERS = itertools.count(1)
_NOTHING: frozenset[int] = frozenset()
_NEVER = [-1]


def fresh() -> Facts:
    """Facts of a node that computes a new tensor."""
    return Facts(frozenset((next(_NUMBERS),)))


def facts(node: fx.Node) -> Facts:
    return node.meta["facts"]


def settle(graph: fx.Graph) -> None:
    """Numbers the storages, and writes the facts.

    Capture identifies a storage by its address, which the next tensor may get: a storage ends with the last use of
    the last value that lies in it.
    """
    position = {node: k for k, node in enumerate(graph.nodes)}
    last_use = {node: max((position[u] for u in node.users), default=k) for node, k in position.items()}
    number: dict[int, int] = {}  # address -> the storage that is there now
    end: dict[int, int] = {}
    for node, k in position.items():
        trait: Trait | None = node.meta.get("trait")
        taken = _NOTHING.union(*[facts(a).lies for a in node.all_input_nodes])
        if node.op in ("output", "get_attr") or (node.op == "call_function" and node.target in SETTERS):
            found = Facts(
                frozenset((next(_NUMBERS),)) if node.op == "get_attr" else _NOTHING, effect=node.op != "get_attr"
            )
        elif trait is None:
            own = frozenset((next(_NUMBERS),))
            found = Facts(own if node.op == "placeholder" else taken | own, taken, True)
        else:
            lies = set()
            if node.op == "placeholder":  # the caller's storage, and the copy that capture ran on in its place
                same = next((number[key] for key in trait.lies if key in number), None) or next(_NUMBERS)
                number.update(dict.fromkeys(trait.lies, same))
                end[same] = len(position)
            for key in trait.lies:
                if key not in number or (number[key] not in taken and end[number[key]] < k):
                    number[key] = next(_NUMBERS)
                    end[number[key]] = -1
                lies.add(number[key])
            writes = [number[key] for key in trait.writes if key in number]
            written = frozenset(s for s in writes if s in taken or (s not in lies and end[s] >= k))
            found = Facts(frozenset(lies), written, trait.random or bool(written) or _opaque(node))
        node.meta["facts"] = found
        lasts = len(position) if node.op == "placeholder" else last_use[node]
        for storage in found.lies:
            end[storage] = max(end.get(storage, -1), lasts)


def _opaque(node: fx.Node) -> bool:
    """Whether the node calls something that may do more than it returns."""
    if node.op == "placeholder":
        return False
    if node.meta.get("opaque") or node.meta.get("spec") is None:
        return True
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] not in ("T", "mT", "H", "mH", "real", "imag", "data")
    return not name_of(node)


def share(first: fx.Node, second: fx.Node, memory: Memory) -> None:
    """`second` is about to be replaced by `first`: what lay in the memory of `second` alone lies in that of `first`."""
    new = facts(first).lies
    moved = facts(second).lies - memory.taken(second) - new
    if moved:
        memory.rename(moved, new)


class Memory:
    """An index of the facts of one graph, for one pass over it."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.position: dict[fx.Node, int] = {}
        self.holders: dict[int, list[fx.Node]] = {}
        self.writers: dict[int, list[int]] = {}  # positions, ascending
        self.inputs: set[int] = set()
        self.escaping: set[int] = set()
        self.leaving: set[fx.Node] = set()
        self.mode: dict[fx.Node, tuple] = {}
        mode: dict[Any, tuple] = {}
        state: tuple = ()
        for k, node in enumerate(self.nodes):
            known = facts(node)
            self.position[node] = k
            self.mode[node] = state
            for storage in known.lies:
                self.holders.setdefault(storage, []).append(node)
            for storage in known.writes:
                self.writers.setdefault(storage, []).append(k)
            if node.op in ("placeholder", "get_attr"):
                self.inputs |= known.lies
            elif node.op == "call_function" and node.target in SETTERS:
                mode[node.target, node.args[:-1] if len(node.args) > 1 else ()] = node.args
                state = tuple(mode.items())
            elif node.op == "output":
                self.leaving.update(node.all_input_nodes)
                for used in node.all_input_nodes:
                    self.escaping |= facts(used).lies

    def rename(self, old: frozenset[int], new: frozenset[int], after: int = -1) -> None:
        """What lies in or writes the storages `old`, behind a position, does so with `new` instead."""
        holders = [h for s in old for h in self.holders.get(s, ()) if self.position[h] > after and not h._erased]
        writes = sorted({p for s in old for p in self.writers.get(s, ()) if p > after})
        for node in dict.fromkeys((*holders, *[self.nodes[p] for p in writes])):
            known = facts(node)
            lies = known.lies - old | new if known.lies & old else known.lies
            written = known.writes - old | new if known.writes & old else known.writes
            node.meta["facts"] = replace(known, lies=lies, writes=written)
        for s in old:
            self.holders[s] = [h for h in self.holders.get(s, ()) if self.position[h] <= after]
            self.writers[s] = [p for p in self.writers.get(s, ()) if p <= after]
        for s in new:
            self.holders.setdefault(s, []).extend(holders)
            self.writers[s] = sorted({*self.writers.get(s, ()), *writes})
        if old & self.escaping:
            self.escaping |= new

    def taken(self, node: fx.Node) -> frozenset[int]:
        """Storages of the node's arguments."""
        return _NOTHING.union(*[facts(a).lies for a in node.all_input_nodes])

    def own(self, node: fx.Node) -> frozenset[int]:
        """Storages that the node made."""
        return facts(node).lies - self.taken(node)

    def written(self, storages: Iterable[int], after: int = -1) -> bool:
        """Whether one of the storages is written behind a position."""
        return any((self.writers.get(s) or _NEVER)[-1] > after for s in storages)

    def epoch(self, node: fx.Node, at: int) -> tuple[int, ...]:
        """How often each storage of a value was written before a position."""
        return tuple([bisect_right(self.writers[s], at) for s in sorted(facts(node).lies) if self.writers.get(s)])

    def modes_switched(self, setter: Any = torch._C._set_grad_enabled) -> bool:
        return any(node.op == "call_function" and node.target is setter for node in self.position)
