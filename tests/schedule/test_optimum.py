"""Row 7.06: greedy fusion against the exhaustive optimum on small graphs."""

from __future__ import annotations

import copy
import random
import statistics

from tensorplay.stax.loops.nodes import Compute
from tensorplay.stax.schedule.deps import dependences
from tensorplay.stax.schedule.fuse import Fusion
from tensorplay.stax.schedule.schedule import finish

from .build import TARGET, Builder, at, op

R, C = 16, 32


def program(seed: int) -> Builder:
    """Three to seven nodes: pointwise, reductions along rows and columns, a library call now and then."""
    rng = random.Random(seed)
    b = Builder()
    full = [b.input(R, C), b.input(R, C)]
    rows, columns = [], []
    for _ in range(rng.randrange(3, 8)):
        kind = rng.randrange(7)
        x, y = rng.choice(full[-3:]), rng.choice(full)
        if kind < 3:
            out = b.pointwise((R, C), lambda i, j, x=x, y=y: op("add", at(x, i, j), at(y, i, j)))
            full.append(out)
        elif kind == 3:
            rows.append(b.reduction("sum", (R,), (C,), lambda i, r, x=x: at(x, i, r)))
        elif kind == 4:
            columns.append(b.reduction("sum", (C,), (R,), lambda j, r, x=x: at(x, r, j)))
        elif kind == 5 and (rows or columns):
            s = rng.choice(rows + columns)
            value = (lambda i, j, s=s: at(s, i)) if s in rows else (lambda i, j, s=s: at(s, j))
            full.append(b.pointwise((R, C), lambda i, j, x=x, value=value: op("sub", at(x, i, j), value(i, j))))
        else:
            w = b.input(C, C)
            full.append(b.mm(x, w))
    return b


def moved(fusion: Fusion) -> int:
    groups = (g for g in fusion.groups.values() if isinstance(fusion.deps.nodes[g.nodes[0]], Compute))
    return sum(finish(g, "k", fusion).model_bytes for g in groups)


def copied(fusion: Fusion) -> Fusion:
    other = copy.copy(fusion)
    other.groups, other.parent = copy.deepcopy(fusion.groups), list(fusion.parent)
    other.position = list(fusion.position)
    return other


def best(fusion: Fusion) -> int:
    """The fewest bytes over everything that legal merges can reach."""
    seen: set[frozenset] = set()
    least, stack = moved(fusion), [fusion]
    while stack:
        state = stack.pop()
        for a in list(state.groups):
            for b in state.groups[a].partners:
                if a > b or isinstance(state.attempt(state.groups[a], state.groups[b]), str):
                    continue
                after = copied(state)
                answer = after.attempt(after.groups[a], after.groups[b])
                after.merge(*answer)
                key = frozenset(frozenset(g.nodes) for g in after.groups.values())
                if key not in seen:
                    seen.add(key)
                    least = min(least, moved(after))
                    stack.append(after)
    return least


def test_7_06_greedy_is_optimal_on_most_small_graphs():
    ratios = []
    for seed in range(40):
        b = program(seed)
        made = [n.outputs[0] for n in b.nodes]
        deps = dependences(b.loops(*random.Random(seed).sample(made, min(2, len(made)))))
        greedy = Fusion(deps, TARGET)
        greedy.run()
        optimum = best(Fusion(deps, TARGET))
        ratios.append(moved(greedy) / optimum if optimum else 1.0)
    assert statistics.median(ratios) == 1.0 and max(ratios) < 1.25, ratios
