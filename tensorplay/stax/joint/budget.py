"""How much forward may keep: the options `partition` and `memory_budget` (row 5.09).

In: the options of tp.compile.  Out: `chosen(options)`, which picks the saved values of a region.
Always: random operators never run twice; library operators only where the budget asks for it, first those that take
least time for the bytes that they free. What backward must keep for any choice is the least that a budget can reach.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx

from ...errors import UnsupportedError
from ...training import check_budget
from ..loops.nodes import Spec
from ..ops.table import find
from .partition import Region, closure, default, minimum, nbytes, recomputable

Choose = Callable[[Region], list[fx.Node]]
aten = torch.ops.aten


def chosen(options: Mapping[str, Any]) -> Choose:
    """The choice that the options ask for."""
    check_budget(options)
    budget = options.get("memory_budget")
    if budget is None:
        return default if options.get("partition") == "default" else minimum
    return lambda region: within(region, float(budget))


def within(region: Region, budget: float) -> list[fx.Node]:
    """A saved set of at most `budget` times the default's bytes, wherever there is one.

    Library operators may run again in order of time a byte. Of the shortest such list that meets the budget, those that
    it does not need are spared, the most work first; the least work is a knapsack, which nothing here claims to solve.
    """
    limit = math.floor(budget * total(region, default(region)))
    candidates = sorted((n for n in region.values if again(n) and not recomputable(n)), key=time_a_byte)

    def saved(allowed: Collection[fx.Node]) -> list[fx.Node]:
        return minimum(region, lambda n: n in allowed or recomputable(n))

    found = saved(())
    if total(region, found) <= limit:
        return found
    found = saved(set(candidates))
    if total(region, found) > limit:
        least = total(region, found) / max(total(region, default(region)), 1)
        raise UnsupportedError(f"memory_budget={budget}: backward needs {least:.3f} of what the default partition saves, whatever runs again")
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        tried = saved(set(candidates[:middle]))
        if total(region, tried) <= limit:
            high, found = middle, tried
        else:
            low = middle + 1
    allowed = closure(region, set(found)).intersection(candidates)
    for node in sorted(allowed, key=work, reverse=True):
        tried = saved(allowed - {node})
        if total(region, tried) <= limit:
            allowed, found = allowed - {node}, tried
    return found


def total(region: Region, saved: list[fx.Node]) -> int:
    return sum(region.cost(n) for n in saved)


def again(node: fx.Node) -> bool:
    """Whether backward may run the operator again where memory is short: anything that draws nothing."""
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op != "placeholder"
    row = find(node.target)  # type: ignore[arg-type]
    return row is not None and not row.ordered and not node.meta.get("ordered")


def time_a_byte(node: fx.Node) -> float:
    """Arithmetic of an operator for a byte of its result."""
    spec = node.meta["spec"]
    made = sum(nbytes(s) for s in (spec if isinstance(spec, tuple) else (spec,)) if isinstance(s, Spec))
    return work(node) / max(made, 1)


def work(node: fx.Node) -> int:
    """Multiplications, as far as sizes tell: of a product the result times what is summed over."""
    sizes = [a.meta["spec"].size for a in node.all_input_nodes if isinstance(a.meta.get("spec"), Spec)]
    spec = node.meta["spec"]
    first = next((s for s in (spec if isinstance(spec, tuple) else (spec,)) if isinstance(s, Spec)), None)
    if first is None:
        return 0
    if node.target in (aten.mm.default, aten.bmm.default):
        return first.numel * sizes[0][-1]
    if node.target in (aten.addmm.default, aten.baddbmm.default):
        return first.numel * sizes[1][-1]
    if node.target is aten.convolution.default:
        return first.numel * math.prod(sizes[1][1:])
    if "attention" in str(node.target):
        return 2 * math.prod(sizes[0]) * sizes[1][-2]
    return first.numel + sum(math.prod(s) for s in sizes)
