"""Who must run before whom: live nodes, readers and writers of buffers, direct predecessors (row 7.01).

In: `Loops`.  Out: `Dependences` over the nodes that some output, write-back or effect needs.
Always: nodes keep the order of `Loops`, which is topological; a write-back reads the input that it overwrites at
the very offset that it stores to, or not at all, so that it may run in place point by point; it stands behind
every node with a run-time check.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..expr import Expr, linear, load, loads, postorder
from ..loops.nodes import Buffer, Compute, Extern, Loops, Node, Pointwise, Reduction, Ref, Scan, row_major
from ..ops.numbers import NUMBERS

# Integer atoms that fail on a zero divisor; reads at an index from memory fail outside its range.
DIVISIONS = frozenset({"div_floor", "div_trunc", "remainder", "fmod"})


@dataclass(frozen=True)
class Walked:
    """A node with its load expressions, the buffers that it reads, and whether running it may fail."""

    node: Node
    loads: tuple[Expr, ...]
    reads: tuple[str, ...]
    fails: bool


@dataclass(frozen=True)
class Dependences:
    """The live nodes of a graph, by position.

    loads: the load expressions of each node.  reads, writes: its buffers.  before: direct predecessors of each node, for whatever reason (a value that
    is read, an old value that must be read first, an order of effects).  writer: the node that defines a buffer;
    an input that is written back has its write-back here.  readers: the nodes that read a buffer.
    """

    loops: Loops
    buffers: dict[str, Buffer]
    loads: tuple[tuple[Expr, ...], ...]
    reads: tuple[tuple[str, ...], ...]
    writes: tuple[tuple[str, ...], ...]
    before: tuple[tuple[int, ...], ...]
    writer: dict[str, int]
    readers: dict[str, tuple[int, ...]]
    returned: frozenset[str]  # buffers that the graph's outputs refer to
    written: frozenset[str]  # inputs that are written back
    fails: frozenset[int]  # nodes with run-time checks, after which the program is run again by eager

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.loops.nodes

    def reduces(self, i: int) -> bool:
        node = self.nodes[i]
        return isinstance(node, Compute) and isinstance(node.loop, Reduction)


def dependences(loops: Loops) -> Dependences:
    """Drops dead nodes and collects the edges between the rest."""
    inputs = frozenset(b.name for b in loops.inputs)
    walked = live(write_last(loops.nodes, inputs), loops.outputs, inputs)
    loops = replace(loops, nodes=tuple(w.node for w in walked))
    reads = tuple(w.reads for w in walked)
    fails = frozenset(i for i, w in enumerate(walked) if w.fails)
    writes = tuple(n.writes for n in loops.nodes)
    last_writer: dict[str, int] = {}
    since: dict[str, list[int]] = {}  # readers of the present value
    readers: dict[str, list[int]] = {}
    ordered: int | None = None
    before: list[tuple[int, ...]] = []
    for i, node in enumerate(loops.nodes):
        first: dict[int, None] = {}
        for name in reads[i]:
            if name in last_writer:
                first[last_writer[name]] = None
        for name in writes[i]:
            first.update(dict.fromkeys(since.pop(name, ())))
            if name in last_writer:
                first[last_writer[name]] = None
            last_writer[name] = i
        for name in reads[i]:
            if name not in writes[i]:
                since.setdefault(name, []).append(i)
            readers.setdefault(name, []).append(i)
        if not inputs.isdisjoint(writes[i]):
            first.update(dict.fromkeys(j for j in fails if j < i))
        if isinstance(node, Extern) and node.ordered:
            if ordered is not None:
                first[ordered] = None
            ordered = i
        before.append(tuple(first))
    return Dependences(
        loops=loops,
        buffers=loops.buffers,
        loads=tuple(w.loads for w in walked),
        reads=reads,
        writes=writes,
        before=tuple(before),
        writer=last_writer,
        readers={name: tuple(at) for name, at in readers.items()},
        returned=frozenset(ref.buffer for ref in loops.outputs if isinstance(ref, Ref)),
        written=frozenset(w for ws in writes for w in ws if w in inputs),
        fails=fails,
    )


def live(nodes: Sequence[Node], outputs: tuple, inputs: frozenset[str]) -> list[Walked]:
    """The nodes that an output, a write-back or an effect needs, in their order."""
    needed = {ref.buffer for ref in outputs if isinstance(ref, Ref)}
    kept: list[Walked] = []
    for node in reversed(nodes):
        effect = isinstance(node, Extern) and node.ordered
        if effect or any(w in needed or w in inputs for w in node.writes):
            kept.append(walk(node))
            needed.update(kept[-1].reads)
    return kept[::-1]


def walk(node: Node) -> Walked:
    """One look at every expression of a node."""
    if isinstance(node, Extern):
        return Walked(node, (), node.reads, node.target is NUMBERS)
    found, fails = [], False
    for e in postorder(node.loop.body, *node.at):
        if e.op == "load":
            found.append(e)
        elif e.op == "index" or (e.op in DIVISIONS and not e.dtype.is_floating_point):  # type: ignore[union-attr]
            fails = True
    return Walked(node, tuple(found), tuple(dict.fromkeys(e.name for e in found)), fails)


def write_last(nodes: Sequence[Node], inputs: frozenset[str]) -> list[Node]:
    """Puts write-backs behind everything else, so that a check that fails finds the caller's tensors untouched.

    A write-back whose input is read again stays where it is. One that reads its own target at other points than it
    stores to (x.copy_(x.t())), or that may fail itself, gets a block of its own for its value.
    """
    read_later: set[str] = set()
    first: list[Node] = []
    last: list[Node] = []
    for node in reversed(nodes):
        if isinstance(node, Compute) and any(w in inputs for w in node.writes):
            parts = [node] if _in_place(node) else list(_through_a_copy(node))[::-1]
            for part in parts:
                moves = part.writes[0] in inputs and read_later.isdisjoint(part.writes)
                (last if moves else first).append(part)
        else:
            first.append(node)
        read_later.update(node.reads)
    return first[::-1] + last[::-1]


def _in_place(node: Compute) -> bool:
    stores = dict(zip(node.writes, node.at, strict=True))
    walked = walk(node)
    own = [e for e in walked.loads if e.name in stores]
    same = isinstance(node.loop, Pointwise) and all(e.args[1] is stores[e.name] for e in own)
    return not walked.fails and (same or not own)


def _through_a_copy(node: Compute) -> Iterator[Compute]:
    size = tuple(v.args[1] for v in node.vars)
    dense = tuple(Buffer(f"{b.name}_new", b.dtype, b.device, size, row_major(size)) for b in node.outputs)
    yield replace(node, outputs=dense, at=tuple(linear(node.vars, b.stride) for b in dense))
    for buffer, at, new in zip(node.outputs, node.at, dense, strict=True):
        body = load(new.name, linear(node.vars, new.stride), new.dtype)
        yield Compute((buffer,), (at,), Pointwise(node.vars, body), node.origins)


def standing_alone(node: Node) -> str:
    """Why a node never shares a kernel, or ''."""
    if isinstance(node, Extern):
        return f"library call {node.target} is a barrier" if node.library else f"fallback {node.target} is a barrier"
    if isinstance(node.loop, Scan):
        return "a scan stands alone"
    if any(v.args[1] == 0 for v in (*node.vars, *node.rvars)):
        return "its range is empty"
    if node.rvars and all(v.args[1] == 1 for v in node.rvars):
        return "it reduces over a single element"
    if any(True for _ in loads(*node.at)):
        return "it stores at offsets that are read from memory"
    return ""
