"""Who must run before whom: live nodes, readers and writers of buffers, direct predecessors (row 7.01).

In: `Loops`.  Out: `Dependences` over the nodes that some output, write-back or effect needs.
Always: nodes keep the order of `Loops`, which is topological; a write-back reads the input that it overwrites at
the very offset that it stores to, or not at all, so that it may run in place point by point.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..expr import Expr, linear, load, loads
from ..loops.nodes import Buffer, Compute, Extern, Loops, Node, Pointwise, Reduction, Ref, Scan


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

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.loops.nodes

    def reduces(self, i: int) -> bool:
        node = self.nodes[i]
        return isinstance(node, Compute) and isinstance(node.loop, Reduction)


def dependences(loops: Loops) -> Dependences:
    """Drops dead nodes and collects the edges between the rest."""
    inputs = frozenset(b.name for b in loops.inputs)
    nodes, loaded, reads = live(separate(loops.nodes, inputs), loops.outputs, inputs)
    loops = replace(loops, nodes=nodes)
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
        if isinstance(node, Extern) and node.ordered:
            if ordered is not None:
                first[ordered] = None
            ordered = i
        before.append(tuple(first))
    return Dependences(
        loops=loops,
        buffers=loops.buffers,
        loads=loaded,
        reads=reads,
        writes=writes,
        before=tuple(before),
        writer=last_writer,
        readers={name: tuple(at) for name, at in readers.items()},
        returned=frozenset(ref.buffer for ref in loops.outputs if isinstance(ref, Ref)),
        written=frozenset(w for ws in writes for w in ws if w in inputs),
    )


def live(
    nodes: tuple[Node, ...], outputs: tuple, inputs: frozenset[str]
) -> tuple[tuple[Node, ...], tuple[tuple[Expr, ...], ...], tuple[tuple[str, ...], ...]]:
    """The nodes that an output, a write-back or an effect needs, in their order, with their loads and reads."""
    needed = {ref.buffer for ref in outputs if isinstance(ref, Ref)}
    kept: list[tuple[Node, tuple[Expr, ...], tuple[str, ...]]] = []
    for node in reversed(nodes):
        effect = isinstance(node, Extern) and node.ordered
        if effect or any(w in needed or w in inputs for w in node.writes):
            found = () if isinstance(node, Extern) else tuple(loads(node.loop.body, *node.at))
            reads = node.reads if isinstance(node, Extern) else tuple(dict.fromkeys(e.name for e in found))
            needed.update(reads)
            kept.append((node, found, reads))
    kept.reverse()
    return tuple(k[0] for k in kept), tuple(k[1] for k in kept), tuple(k[2] for k in kept)


def separate(nodes: tuple[Node, ...], inputs: frozenset[str]) -> tuple[Node, ...]:
    """Gives a write-back that reads its own target at other points than it stores to (x.copy_(x.t())) a block of its own."""
    out: list[Node] = []
    for node in nodes:
        if isinstance(node, Compute) and any(w in inputs for w in node.writes) and not _in_place(node):
            out.extend(_through_a_copy(node))
        else:
            out.append(node)
    return tuple(out)


def _in_place(node: Compute) -> bool:
    stores = dict(zip(node.writes, node.at, strict=True))
    own = [e for e in loads(node.loop.body, *node.at) if e.name in stores]
    return not own or (isinstance(node.loop, Pointwise) and all(e.args[1] is stores[e.name] for e in own))


def _through_a_copy(node: Compute) -> Iterator[Compute]:
    size = tuple(v.args[1] for v in node.vars)
    dense = tuple(Buffer(f"{b.name}_new", b.dtype, b.device, size, row_major(size)) for b in node.outputs)
    yield replace(node, outputs=dense, at=tuple(linear(node.vars, b.stride) for b in dense))
    for buffer, at, new in zip(node.outputs, node.at, dense, strict=True):
        body = load(new.name, linear(node.vars, new.stride), new.dtype)
        yield Compute((buffer,), (at,), Pointwise(node.vars, body), node.origins)


def row_major(size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a dense tensor, last dimension fastest."""
    stride, step = [], 1
    for n in reversed(size):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


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
