"""Which loops form a kernel: greedy merging of pairs that share buffers, most saved bytes first (section 7).

In: `Dependences`.  Out: groups of nodes over common variables in a valid order, and the refused pairs.
Always: the graph of groups has no cycle.  A merge is legal iff (1) no path leads from one group to the other through
a third, (2) their spaces match (align.py), (3) a value that one side stores and the other loads is loaded at the
very offset that it is stored at, so that each point needs its own value only: the one symbolic comparison to which
legality by distance vectors comes down for loops of this shape.

Minimum-traffic fusion is NP-hard (multiway cut reduces to it); the greedy result equals the exhaustive optimum on
most small graphs (tests/schedule/test_optimum.py prints the ratios).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from ..codegen.target import Target
from ..expr import Expr, coefficient, integer, parts, postorder, substitute
from ..loops.nodes import Compute, Extern, Reduction
from ..loops.stretches import FEW, comparisons
from .align import Link, Match, Space, composed, match, numel, split_variables, straighten
from .cost import column, distinct, footprint, levels, points
from .deps import Dependences, standing_alone
from .legality import same_point

MAX_EXPRESSIONS = 1500  # value expressions of a kernel
MAX_BUFFERS = 60  # buffers of a kernel that live in memory
MAX_VISITED = 400  # groups that the search for a path looks at
MAX_READERS = 32  # readers of one buffer that are paired with its writer
FEW_ROWS = 8  # below this many rows, a later pass over a long row is better run by all threads
LONG_ROW = 32 * 1024  # bytes
COUNTING = ("argmax", "argmin", "max_index", "min_index")  # reductions that see the order of their range


@dataclass(slots=True)
class Group:
    """Nodes that will be one step, all over the variables of `space`.

    maps: each node's own variables over the group's.  rows: the nodes that run once a row.
    loads, stores: offsets by buffer.  values: indices that bodies use otherwise.  tests: the
    comparisons of indices with constants in conditions.  open: buffers that live in memory.
    """

    number: int
    nodes: list[int]
    space: Space
    alone: str = ""
    size: int = 0
    maps: dict[int, dict[Expr, Expr]] = field(default_factory=dict)
    loads: dict[str, dict[Expr, None]] = field(default_factory=dict)  # the offsets are empty for a library call
    stores: dict[str, Expr] = field(default_factory=dict)
    values: dict[Expr, None] = field(default_factory=dict)
    tests: dict[Expr, None] = field(default_factory=dict)
    open: dict[str, None] = field(default_factory=dict)
    rows: set[int] = field(default_factory=set)
    before: set[int] = field(default_factory=set)
    after: set[int] = field(default_factory=set)
    partners: dict[int, None] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """Why two groups, the earlier one first, are not one."""

    first: int
    second: int
    saved: int
    reason: str


class Fusion:
    """The state of greedy fusion: groups, their order, the candidates."""

    def __init__(self, deps: Dependences, target: Target) -> None:
        self.deps, self.target = deps, target
        self.whole = {name: distinct(b) * b.dtype.itemsize for name, b in deps.buffers.items()}  # bytes of each buffer
        self.parent = list(range(len(deps.nodes)))
        self.position = list(range(len(deps.nodes)))  # a topological order of the groups
        self.groups = {i: self.single(i) for i in range(len(deps.nodes))}
        for i, before in enumerate(deps.before):
            self.groups[i].before.update(before)
            for j in before:
                self.groups[j].after.add(i)
        for a, b in self.pairs():
            self.groups[a].partners[b] = None
            self.groups[b].partners[a] = None

    def find(self, i: int) -> int:
        parent = self.parent
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    # ---- one node ------------------------------------------------------------------------------------------------

    def single(self, i: int) -> Group:
        """The group of one node, over variables in which its indices are affine where splitting can achieve it."""
        node = self.deps.nodes[i]
        if isinstance(node, Extern):
            nothing = Space(())
            whole: dict[str, dict[Expr, None]] = {name: {} for name in node.reads}
            stores = dict.fromkeys(node.writes, integer(0))
            return Group(i, [i], nothing, standing_alone(node), loads=whole, stores=stores)
        loads: dict[str, dict[Expr, None]] = {}
        values: dict[Expr, None] = {}
        size = 0
        for e in postorder(node.loop.body, *node.at):
            size += not e.is_index
            if e.op == "load":
                loads.setdefault(e.name, {})[e.args[1]] = None
            elif e.op == "value":
                values[e.args[0]] = None
        alone = standing_alone(node)
        for name in node.writes:
            if name in self.deps.written and any(r > i for r in self.deps.readers.get(name, ())):
                alone = alone or "the input that it overwrites is read again later"
        at = {} if alone else straighten((*node.vars, *node.rvars), self.roots(loads, node.at, values), _inner(node))
        dims, rdims = split_variables(node.vars, at), split_variables(node.rvars, at)
        fixed = rdims if isinstance(node.loop, Reduction) and node.loop.kind in COUNTING else None
        return Group(
            number=i,
            nodes=[i],
            space=Space(dims, rdims, fixed),
            alone=alone,
            size=size,
            maps={i: {v: at.get(v, v) for v in (*node.vars, *node.rvars)}},
            loads={b: {substitute(e, at): None for e in es} for b, es in loads.items()},
            stores={b: substitute(e, at) for b, e in zip(node.writes, node.at, strict=True)},
            values={substitute(e, at): None for e in values},
            tests={substitute(e, at): None for e in comparisons(node.loop.body)},
            open=dict.fromkeys((*loads, *node.writes)),
        )

    @staticmethod
    def roots(loads: dict[str, dict[Expr, None]], at: Iterable[Expr], values: Iterable[Expr]) -> list[Expr]:
        return [*(e for offsets in loads.values() for e in offsets), *at, *values]

    # ---- candidates and their score ------------------------------------------------------------------------------

    def pairs(self) -> Iterable[tuple[int, int]]:
        """Pairs of nodes that share a buffer: its writer with readers, and neighbouring readers."""
        for name, readers in self.deps.readers.items():
            writer = self.deps.writer.get(name)
            if writer is not None:
                yield from ((writer, r) for r in readers[:MAX_READERS] if r != writer)
            yield from pairwise(readers)

    def nbytes(self, group: Group, name: str) -> int:
        """Bytes of a buffer that a group reads."""
        if not group.maps:
            return self.whole[name]
        needed = sum(map(points, group.loads[name]))
        return min(self.whole[name], needed * self.deps.buffers[name].dtype.itemsize)

    def saved(self, a: Group, b: Group) -> int:
        """Model bytes that merging saves: values that stay in registers, and inputs that are read once."""
        small, large = (a, b) if len(a.loads) + len(a.stores) <= len(b.loads) + len(b.stores) else (b, a)
        total = 0
        for name in small.loads:
            if name in large.stores and name not in self.deps.written:
                total += self.nbytes(small, name) + self.unwritten(name, a, b)
            elif name in large.loads and (name not in small.stores or name in self.deps.written):
                total += min(self.nbytes(small, name), self.nbytes(large, name))
        for name in small.stores:
            if name in large.loads and name not in self.deps.written:
                total += self.nbytes(large, name) + self.unwritten(name, a, b)
        return total

    def unwritten(self, name: str, a: Group, b: Group) -> int:
        """Bytes of a store that nobody outside the two groups needs."""
        if name in self.deps.returned:
            return 0
        if any(self.find(r) not in (a.number, b.number) for r in self.deps.readers[name]):
            return 0
        return self.whole[name]

    # ---- legality ------------------------------------------------------------------------------------------------

    def attempt(self, a: Group, b: Group) -> tuple[Group, Group, Match] | str:
        """How `b` joins `a` (in the order returned: base, guest), or why it does not."""
        if a.alone or b.alone:
            return a.alone or b.alone
        if self.deps.nodes[a.number].outputs[0].device != self.deps.nodes[b.number].outputs[0].device:  # type: ignore[union-attr]
            return "they run on different devices"
        if a.size + b.size > MAX_EXPRESSIONS:
            return f"the kernel would have more than {MAX_EXPRESSIONS} expressions"
        if len(a.open) + len(b.open) > MAX_BUFFERS and len(self.in_memory(a, b)) > MAX_BUFFERS:
            return f"the kernel would have more than {MAX_BUFFERS} buffers"
        if reason := self.between(a, b)[2]:
            return reason
        if bool(a.space.rdims) != bool(b.space.rdims):
            base, guest = (a, b) if a.space.rdims else (b, a)
        else:
            base, guest = (a, b) if len(a.nodes) >= len(b.nodes) else (b, a)
        links = self.links(base, guest)
        if isinstance(links, str):
            return links
        found = match(base.space, guest.space, links)
        if isinstance(found, str):
            return found
        shared = False
        for link in links:
            same = same_point(found.of_first(link.first), found.of_second(link.second))
            if link.must and not same:
                return "a value is needed at another point than it is made at"
            shared |= same
        if not shared:
            return "they read what they share at different points"
        if not any(link.must for link in links) and self.trifle(base, guest):
            return "they share too little"
        reason = self.overwrites(base, guest, found) or self.in_stretches(base, guest, found) or self.long_row(base, guest, found)
        return reason or (base, guest, found)

    def in_memory(self, a: Group, b: Group) -> dict[str, None]:
        """Buffers of the joint kernel that live in memory."""
        both = (a.number, b.number)
        return {name: None for name in (*a.open, *b.open) if self.lives(name, a, b, both)}

    def lives(self, name: str, a: Group, b: Group, both: tuple[int, int]) -> bool:
        if (name not in a.stores and name not in b.stores) or name in self.deps.returned or name in self.deps.written:
            return True
        return any(self.find(r) not in both for r in self.deps.readers.get(name, ()))

    def between(self, a: Group, b: Group) -> tuple[set[int], set[int], str]:
        """Groups after the first and before the second of two that stand between them, and why they can't be one."""
        first, last = sorted((a, b), key=lambda g: self.position[g.number])
        low, high = self.position[first.number], self.position[last.number]
        found: list[set[int]] = []
        for start, stop, forward in ((first, last.number, True), (last, first.number, False)):
            seen: set[int] = set()
            stack = [n for n in self.neighbours(start, forward) if n != stop]
            while stack:
                n = stack.pop()
                if n in seen or not low < self.position[n] < high:
                    continue
                seen.add(n)
                if len(seen) > MAX_VISITED:
                    return seen, seen, "they are too far apart"
                for m in self.neighbours(self.groups[n], forward):
                    if m == stop:
                        return seen, seen, f"a path leads through {self.describe(n)}"
                    stack.append(m)
            found.append(seen)
        return found[0], found[1], ""

    def neighbours(self, group: Group, forward: bool) -> set[int]:
        """Direct successors or predecessors, as present groups."""
        raw = group.after if forward else group.before
        now = {self.find(n) for n in raw}
        now.discard(group.number)
        if forward:
            group.after = now
        else:
            group.before = now
        return now

    def describe(self, group: int) -> str:
        node = self.deps.nodes[self.groups[group].nodes[0]]
        return str(node.target) if isinstance(node, Extern) else node.name

    def links(self, base: Group, guest: Group) -> list[Link] | str:
        """Pairs of offsets into shared buffers, those that must agree first, those of many loops before others."""
        out: list[Link] = []
        small = base if len(base.loads) + len(base.stores) <= len(guest.loads) + len(guest.stores) else guest
        large = guest if small is base else base
        for name in (*small.loads, *small.stores):
            if name not in large.loads and name not in large.stores:
                continue
            overwritten = name in self.deps.written
            for maker, user in ((base, guest), (guest, base)):
                if name in maker.stores and name in user.loads and name not in user.stores:
                    if len(user.loads[name]) > 1 and not overwritten:
                        return "it reads the value at several points"
                    at, read = maker.stores[name], next(iter(user.loads[name]))
                    out.append(Link(*((at, read) if maker is base else (read, at)), not overwritten))
            if name in base.loads and name in guest.loads and name not in base.stores and name not in guest.stores:
                mine, theirs = (sorted(g.loads[name], key=_loops)[:2] for g in (base, guest))
                out.extend(Link(e, f, False) for e in mine for f in theirs)
        out.sort(key=lambda link: (not link.must, _loops(link.first) + _loops(link.second)))
        return out[: 8 + sum(link.must for link in out)]

    def trifle(self, a: Group, b: Group) -> bool:
        """Whether two large neighbours share so little that a joint kernel would only be more work for registers."""
        saved = self.saved(a, b)
        moved = min(sum(self.nbytes(g, name) for name in g.loads) for g in (a, b))
        return saved * 32 < moved and moved > LONG_ROW

    def overwrites(self, base: Group, guest: Group, found: Match) -> str:
        """Keeps an old value from being read after its point was overwritten."""
        for name in self.deps.written:
            if name not in base.stores and name not in guest.stores:
                continue
            if not self.deps.fails.isdisjoint((*base.nodes, *guest.nodes)):
                return "the kernel would overwrite an input before its checks have passed"
            at = found.of_first(base.stores[name]) if name in base.stores else None
            at = at or found.of_second(guest.stores[name])
            offsets = [found.of_first(e) for e in base.loads.get(name, ())]
            offsets += [found.of_second(e) for e in guest.loads.get(name, ())]
            if any(e is not at for e in offsets):
                return "the kernel would overwrite an input that it reads at other points"
            if offsets and found.space.rdims:
                writer = self.deps.writer[name]
                rows = (base.rows | guest.rows | set(guest.nodes)) if found.row else base.rows | guest.rows
                mine = {*base.nodes, *guest.nodes}
                if writer not in rows or any(r in mine and r != writer for r in self.deps.readers[name]):
                    return "the kernel would overwrite an input that another pass reads"
        return ""

    def in_stretches(self, base: Group, guest: Group, found: Match) -> str:
        """Keeps conditions on the place along a row out of the loops that reduce it: a kernel of its own needs none."""
        if self.target.device != "cpu" or guest.space.rdims or base.loads.keys().isdisjoint(guest.stores):
            return ""
        for r in found.space.rdims:
            count = sum(r in found.of_second(e).free for e in guest.tests)
            side_by_side = any(coefficient(found.of_second(e), r) == 1 for e in guest.stores.values())
            if count > (0 if side_by_side else FEW):
                return "its conditions change along the rows that are reduced"
        return ""

    def long_row(self, base: Group, guest: Group, found: Match) -> str:
        """Refuses a second pass over a row where the second pass is better run as a kernel of its own."""
        rdims = found.space.rdims
        if not rdims:
            return ""
        sizes = {name: self.deps.buffers[name].dtype.itemsize for g in (base, guest) for name in (*g.loads, *g.stores)}
        accesses: dict[tuple[Expr, int], None] = {}
        for group, change in ((base, found.of_first), (guest, found.of_second)):
            for name, offsets in group.loads.items():
                if name not in base.stores and name not in guest.stores:
                    accesses.update(((change(e), sizes[name]), None) for e in offsets)
            accesses.update(((change(e), sizes[name]), None) for name, e in group.stores.items())
        resident = footprint(rdims, accesses)
        few = numel(found.space.dims) < FEW_ROWS and resident > LONG_ROW
        strided = resident > self.target.l2 and column(rdims, (e for e, _ in accesses))
        if not few and not strided:
            return ""
        joint = sorted((*base.nodes, *guest.nodes))
        stages = levels(
            [(self.deps.reads[i], self.deps.writes[i], self.deps.reduces(i)) for i in joint]
        )
        rows = base.rows | guest.rows | (set(guest.nodes) if found.row else set())
        if not any(stage for i, stage in zip(joint, stages, strict=True) if i not in rows):
            return ""
        if few:
            return "a second pass over so long a row runs on all threads only as a kernel of its own"
        return "columns of this length do not stay in the cache for a second pass"

    # ---- merging -------------------------------------------------------------------------------------------------

    def merge(self, base: Group, guest: Group, found: Match) -> Group:
        """Makes `guest` a part of `base`; keeps positions a topological order (only groups in between move)."""
        later, earlier, _ = self.between(base, guest)
        places = sorted(self.position[n] for n in (*later, *earlier, base.number, guest.number))
        order = [*sorted(earlier, key=self.position.__getitem__), base.number]
        order += sorted(later, key=self.position.__getitem__)
        for n, place in zip(order, places, strict=False):
            self.position[n] = place
        base.open = self.in_memory(base, guest)
        self.parent[guest.number] = base.number
        if found.first:
            base.maps = {i: composed(m, found.first) for i, m in base.maps.items()}
            base.loads = {b: {found.of_first(e): None for e in es} for b, es in base.loads.items()}
            base.stores = {b: found.of_first(e) for b, e in base.stores.items()}
            base.values = {found.of_first(e): None for e in base.values}
            base.tests = {found.of_first(e): None for e in base.tests}
        for i, m in guest.maps.items():
            base.maps[i] = composed(m, found.second)
        for name, offsets in guest.loads.items():
            base.loads.setdefault(name, {}).update((found.of_second(e), None) for e in offsets)
        base.stores.update((b, found.of_second(e)) for b, e in guest.stores.items())
        base.values.update((found.of_second(e), None) for e in guest.values)
        base.tests.update((found.of_second(e), None) for e in guest.tests)
        base.rows |= guest.rows | (set(guest.nodes) if found.row else set())
        base.space = found.space
        base.size += guest.size
        base.nodes.extend(guest.nodes)
        for mine, theirs in ((base.before, guest.before), (base.after, guest.after)):
            mine.update(theirs)
            mine.difference_update((base.number, guest.number))
        for n in guest.partners:
            partner = self.groups[n]
            partner.partners.pop(guest.number, None)
            if n != base.number:
                partner.partners[base.number] = None
                base.partners[n] = None
        base.partners.pop(guest.number, None)
        del self.groups[guest.number]
        return base

    def run(self) -> list[Refused]:
        """Merges until no candidate is left; one reason for each pair of final groups that share a buffer."""
        heap: list[tuple[int, int, int]] = []
        refused: dict[tuple[int, int], str] = {}

        def push(a: int, b: int) -> None:
            a, b = min(a, b), max(a, b)
            refused.pop((a, b), None)
            score = self.saved(self.groups[a], self.groups[b])
            if score > 0:
                heapq.heappush(heap, (-score, a, b))

        for a, b in self.candidates():
            push(a, b)
        while True:
            while heap:
                score, a, b = heapq.heappop(heap)
                if a not in self.groups or b not in self.groups or (a, b) in refused:
                    continue
                if self.saved(self.groups[a], self.groups[b]) < -score:
                    push(a, b)
                    continue
                answer = self.attempt(self.groups[a], self.groups[b])
                if isinstance(answer, str):
                    refused[a, b] = answer
                    continue
                base, guest, found = answer
                fresh = list(guest.partners)  # pairs with the base are in the heap already
                if bool(base.space.rdims) != bool(guest.space.rdims) or found.first:  # they may match better now
                    fresh += base.partners
                self.merge(base, guest, found)
                for n in dict.fromkeys(map(self.find, fresh)):
                    if n != base.number and not self.groups[n].alone:
                        push(n, base.number)
            out = []
            for a, b in self.candidates(alone=True):  # a merge elsewhere may have made room
                answer = self.attempt(self.groups[a], self.groups[b])
                saved = self.saved(self.groups[a], self.groups[b])
                if not isinstance(answer, str) and saved > 0:
                    push(a, b)
                else:
                    a, b = sorted((a, b), key=self.position.__getitem__)
                    out.append(Refused(a, b, saved, answer if isinstance(answer, str) else "no byte is saved"))
            if not heap:
                return out

    def candidates(self, alone: bool = False) -> list[tuple[int, int]]:
        """Pairs of present groups that share a buffer, with or without those that never merge."""
        return [
            (a, b)
            for a, group in sorted(self.groups.items())
            for b in sorted(group.partners)
            if a < b and (alone or not (group.alone or self.groups[b].alone))
        ]


def _loops(offset: Expr) -> int:
    return -len(offset.free)


def _inner(node: Compute) -> Expr | None:
    """The variable that the first store walks element by element."""
    return next((t for t, c in parts(node.at[0])[1] if c == 1 and t.op == "var"), None)
