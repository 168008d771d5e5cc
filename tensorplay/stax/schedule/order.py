"""In which order steps run: close to the program's own order, or one that needs less memory (row 7.07).

In: the groups of a finished fusion.  Out: the groups in a topological order.
Always: the order that needs least memory is NP-hard to find (pathwidth reduces to it), so a greedy order, which runs
next what frees most, is taken only where it needs clearly less than the program's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from .fuse import Fusion, Group

CLEARLY = 0.95  # of the program order's peak
CHOICES = 32  # groups that the greedy order compares


def in_order(fusion: Fusion) -> list[Group]:
    """The groups in the order in which they will run."""
    life = Lifetimes(fusion)
    program = topological(fusion, lambda ready: heapq.heappop(ready))
    if life.peak(program) <= life.least():
        return program
    life.start()
    frugal = topological(fusion, life.take)
    return frugal if life.peak(frugal) < CLEARLY * life.peak(program) else program


def topological(fusion: Fusion, take: Callable[[list[tuple[int, int]]], tuple[int, int]]) -> list[Group]:
    """All groups, each after what it waits for; `take` removes the next one from the heap of those that may run."""
    waiting = {n: len(fusion.neighbours(g, False)) for n, g in fusion.groups.items()}
    ready = [(max(g.nodes), n) for n, g in fusion.groups.items() if not waiting[n]]
    heapq.heapify(ready)
    out = []
    while ready:
        _, n = take(ready)
        out.append(fusion.groups[n])
        for m in fusion.neighbours(fusion.groups[n], True):
            waiting[m] -= 1
            if not waiting[m]:
                heapq.heappush(ready, (max(fusion.groups[m].nodes), m))
    assert len(out) == len(fusion.groups), "the groups form a cycle"
    return out


class Lifetimes:
    """Bytes that each group makes, and which readers let them go."""

    def __init__(self, fusion: Fusion) -> None:
        deps = fusion.deps
        self.fusion = fusion
        self.made: dict[int, dict[str, int]] = {n: {} for n in fusion.groups}
        self.readers: dict[str, set[int]] = {}
        self.read: dict[int, list[str]] = {n: [] for n in fusion.groups}
        for n, group in fusion.groups.items():
            for name in group.stores:
                users = {fusion.find(r) for r in deps.readers.get(name, ())} - {n}
                if name not in deps.written and (users or name in deps.returned):
                    self.made[n][name] = fusion.whole[name]
                    self.readers[name] = users
                    for user in users:
                        self.read[user].append(name)
        self.kept = deps.returned

    def peak(self, order: Sequence[Group]) -> int:
        """The most bytes that are alive at once when the groups run in this order."""
        left = {name: len(users) for name, users in self.readers.items()}
        size = {name: n for made in self.made.values() for name, n in made.items()}
        live = most = 0
        for group in order:
            live += sum(self.made[group.number].values())
            most = max(most, live)
            for name in self.read[group.number]:
                left[name] -= 1
                if not left[name] and name not in self.kept:
                    live -= size[name]
        return most

    def least(self) -> int:
        """What no order can undercut: the largest step with its operands."""
        size = {name: n for made in self.made.values() for name, n in made.items()}
        return max((sum(made.values()) + sum(size[r] for r in self.read[n]) for n, made in self.made.items()), default=0)

    def start(self) -> None:
        self.left = {name: len(users) for name, users in self.readers.items()}
        self.size = {name: n for made in self.made.values() for name, n in made.items()}

    def take(self, ready: list[tuple[int, int]]) -> tuple[int, int]:
        """The group that adds fewest bytes, among those that the program runs first."""
        first = [heapq.heappop(ready) for _ in range(min(CHOICES, len(ready)))]
        chosen = min(first, key=lambda item: (self.growth(item[1]), item))
        for item in first:
            if item is not chosen:
                heapq.heappush(ready, item)
        for name in self.read[chosen[1]]:
            self.left[name] -= 1
        return chosen

    def growth(self, n: int) -> int:
        freed = sum(self.size[r] for r in self.read[n] if self.left[r] == 1 and r not in self.kept)
        return sum(self.made[n].values()) - freed
