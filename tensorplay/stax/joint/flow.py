"""Maximum flow and minimum cut on integer capacities (Dinic), on plain arrays.

In: a network.  Out: the value of the flow and the side of the sink.
Always: the cut is the minimum cut nearest the sink; no recursion.
"""

from __future__ import annotations

from collections import deque

INFINITE = 1 << 62


class Network:
    """Vertices 0 .. n - 1; edge k and edge k ^ 1 are each other's residual."""

    def __init__(self, n: int) -> None:
        self.out: list[list[int]] = [[] for _ in range(n)]
        self.to: list[int] = []
        self.left: list[int] = []

    def edge(self, a: int, b: int, capacity: int) -> None:
        self.out[a].append(len(self.to))
        self.out[b].append(len(self.to) + 1)
        self.to += (b, a)
        self.left += (capacity, 0)

    def flow(self, source: int, sink: int) -> int:
        """Sends as much as fits; INFINITE or more where no finite cut exists."""
        total = 0
        while total < INFINITE and (level := self.levels(source, sink)) is not None:
            total += self.blocking(source, sink, level)
        return total

    def levels(self, source: int, sink: int) -> list[int] | None:
        level = [-1] * len(self.out)
        level[source] = 0
        queue = deque((source,))
        while queue:
            at = queue.popleft()
            for e in self.out[at]:
                b = self.to[e]
                if self.left[e] and level[b] < 0:
                    level[b] = level[at] + 1
                    queue.append(b)
        return level if level[sink] >= 0 else None

    def blocking(self, source: int, sink: int, level: list[int]) -> int:
        """Paths along rising levels until none is left."""
        to, left, out = self.to, self.left, self.out
        tried = [0] * len(out)
        total = 0
        path: list[int] = []
        at = source
        while True:
            if at == sink:
                amount = min(left[e] for e in path)
                total += amount
                if total >= INFINITE:
                    return total
                for e in path:
                    left[e] -= amount
                    left[e ^ 1] += amount
                first = next(k for k, e in enumerate(path) if not left[e])
                at = to[path[first] ^ 1]
                del path[first:]
                continue
            while tried[at] < len(out[at]):
                e = out[at][tried[at]]
                if left[e] and level[to[e]] == level[at] + 1:
                    path.append(e)
                    at = to[e]
                    break
                tried[at] += 1
            else:
                if at == source:
                    return total
                e = path.pop()
                at = to[e ^ 1]
                tried[at] += 1

    def near(self, sink: int) -> set[int]:
        """After `flow`: the vertices from which the sink can still be reached."""
        found = {sink}
        stack = [sink]
        while stack:
            at = stack.pop()
            for e in self.out[at]:
                a = self.to[e]
                if self.left[e ^ 1] and a not in found:
                    found.add(a)
                    stack.append(a)
        return found
