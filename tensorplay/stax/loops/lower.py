"""Lowering: from the operator graph to loops, one row an operator (sections 6.1, 6.2).

In: an `OpGraph`.  Out: `Loops` that compute the same outputs, with eager's layouts and eager's aliasing.
Always: each operator is lowered by its row; without a row, or where the row refuses, it becomes a call of torch with
the reason. A view of the graph's output shares the buffer of the value that it views, as in eager. Write-backs to
inputs stand last.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx

from ...errors import NeedsDataError, UnsupportedError
from ..expr import integer, loads
from ..joint.opgraph import OpGraph
from ..ops.lowered import Lowered, Read, apart, broadcast, compute, known, reindex, to
from ..ops.numbers import NUMBER
from ..ops.pointwise import VARYING
from ..ops.row import Row
from ..ops.table import Library, Refuse, find
from .nodes import Buffer, Extern, Loops, Ref, Spec, dense
from .realize import LIMIT, Realizer, merged, named

_DEVICES = ("cpu", "cuda")
_CONSUMING = frozenset(("reduction", "norm", "scan"))  # their operands end in a buffer of their own loops


def lower(ops: OpGraph) -> Loops:
    """The loops of an operator graph."""
    return _Lowering(ops).run()


@dataclass(frozen=True, slots=True)
class _Use:
    """How a value is used: by how many readers, and whether something outside of loop IR needs it in memory."""

    reads: int
    stored: bool


class _Lowering:
    def __init__(self, ops: OpGraph) -> None:
        self.module = ops.module
        self.graph = list(ops.module.graph.nodes)
        self.cx = Realizer()
        self.env: dict[fx.Node, Any] = {}
        self.rows: dict[fx.Node, Row | None] = {}
        self.home: dict[fx.Node, Buffer] = {}  # values that lie in a buffer of their own, in eager's layout
        self.made: dict[fx.Node, tuple[set[str], tuple[str, ...]]] = {}  # of an operator with several results: its buffers, origins
        self.inputs: list[Buffer] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.writes: list[tuple[fx.Node, Lowered]] = []

    def run(self) -> Loops:
        for node in self.graph:
            if node.op == "call_function" and node.target is not operator.getitem:
                if not isinstance(node.target, torch._ops.OpOverload):
                    raise UnsupportedError(f"{node.target} is no operator that lowering knows{_where(node)}")
                self.rows[node] = find(node.target)
        self.uses = self._uses()
        outputs: tuple[Any, ...] = ()
        for node in self.graph:
            match node.op:
                case "placeholder":
                    self._input(node)
                case "get_attr":
                    self._constant(node)
                case "call_function":
                    self._call(node)
                case "output":
                    outputs = tuple(self._output(x) for x in node.args[0])  # type: ignore[union-attr]
        self._write_back()
        lines = {n.name: n.meta["line"] for n in self.graph if n.meta.get("line")}
        return Loops(tuple(self.inputs), tuple(self.cx.nodes), outputs, self.constants, lines)

    # ---- what the graph asks of each value -----------------------------------------------------------------------------

    def _uses(self) -> dict[fx.Node, _Use]:
        """One walk from the outputs back: readers of each value, through views that keep its size."""
        uses: dict[fx.Node, _Use] = {}
        for node in reversed(self.graph):
            reads, stored = 0, False
            for user in node.users:
                row = self.rows.get(user)
                if user.op == "output":
                    reads, stored = reads + 1, True
                elif user.target is operator.getitem:
                    inner = uses[user]
                    reads, stored = reads + inner.reads, stored or (inner.stored and _is_view(self.rows.get(node)))
                elif user.target is torch.ops.aten.copy_.default:
                    reads += 1
                elif row is None or row.kind == "library":
                    reads, stored = reads + 1, True
                elif _is_view(row) and user.args and user.args[0] is node:
                    inner = uses[user]
                    reads += max(inner.reads, 1)
                    stored = stored or (inner.stored and _covers(user, node))
                else:
                    reads += row.reads if user.args and user.args[0] is node else 1
            uses[node] = _Use(reads, stored)
        output = self.graph[-1]
        for x in output.args[0]:  # type: ignore[union-attr]
            if isinstance(x, fx.Node):
                root = self._root(x)
                uses[root] = _Use(uses[root].reads, True)
        return uses

    def _root(self, node: fx.Node) -> fx.Node:
        """The value whose memory `node` shares in eager."""
        while True:
            source = node.args[0] if node.target is operator.getitem else node
            if isinstance(source, fx.Node) and (_is_view(self.rows.get(source)) or source.target is torch.ops.aten.copy_.default):
                node = source.args[0]  # type: ignore[assignment]
            else:
                return node

    # ---- nodes without an operator -------------------------------------------------------------------------------------

    def _input(self, node: fx.Node) -> None:
        spec: Spec = node.meta["spec"]
        b = Buffer(node.name, spec.dtype, spec.device, spec.size, spec.stride)
        self.cx.add(b)
        self.inputs.append(b)
        self.home[node] = b
        self.env[node] = self.cx.read(b)

    def _constant(self, node: fx.Node) -> None:
        t: Any = self.module
        for part in str(node.target).split("."):
            t = getattr(t, part)
        if not isinstance(t, torch.Tensor):
            raise UnsupportedError(f"constant {node.target} is no tensor")
        name = node.name
        self.constants[name] = t.detach()
        b = Buffer(name, t.dtype, t.device, tuple(t.shape), tuple(t.stride()))
        self.cx.add(b)
        self.env[node] = self.cx.read(b)

    # ---- operators -----------------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> None:
        cx = self.cx
        if node.target is operator.getitem:
            source, k = node.args
            cx.made, cx.origins = self.made[source]  # type: ignore[index]
            self._settle(node, self.env[source][k], node.meta["spec"])  # type: ignore[index]
            return
        specs = node.meta["spec"]
        if node.target is NUMBER:
            values = self.env[node.args[0]][0] if isinstance(self.env[node.args[0]], tuple) else self.env[node.args[0]]  # type: ignore[index]
            self.env[node] = Read((), values.dtype, reindex(values, (), (integer(node.args[1]),)).body)  # type: ignore[arg-type]
            return
        if node.target is torch.ops.aten.copy_.default:
            self._copy(node)
            return
        several = isinstance(specs, (tuple, list))
        flat = tuple(specs) if several else () if specs is None else (specs,)
        if any(s is not None and not isinstance(s, Spec) for s in flat):
            raise UnsupportedError(f"{node.target} returns {specs!r}, which is no tensor{_where(node)}")
        operands = [self.env[a] for a in node.all_input_nodes]
        tensors = [x for x in operands if isinstance(x, Lowered)]
        device = next((s.device for s in flat if s is not None), torch.device("cpu"))
        cx.specs, cx.target, cx.device = flat, node.target, device
        cx.made = set()
        cx.origins = merged(tensors, node.name)
        row = self.rows[node]
        origins = cx.origins if row is None or row.kind not in _CONSUMING else (node.name,)
        if row is None:
            result = self._extern(node, flat, f"no row for {_name(node)}", library=False)
        elif row.lower is None:
            result = self._extern(node, flat)
        else:
            mark = len(cx.nodes)
            try:
                self._acceptable(node, row, tensors, flat)
                first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
                cx.operand_spec = first.meta["spec"] if first is not None else None
                result = row.lower(cx, *_resolve(node.args, self.env), **_resolve(dict(node.kwargs), self.env))
                result = _checked(result, flat, several)
            except Library:
                del cx.nodes[mark:]
                result = self._extern(node, flat)
            except Refuse as reason:
                del cx.nodes[mark:]
                result = self._extern(node, flat, f"{_name(node)}: {reason}", library=False)
        if several or not flat:
            self.env[node] = tuple(None if x is None else named(x, origins) for x in result)
            self.made[node] = cx.made, origins
        else:
            self._settle(node, named(result[0], origins), flat[0])

    def _acceptable(self, node: fx.Node, row: Row, tensors: Sequence[Lowered], specs: Sequence[Spec | None]) -> None:
        if node.target.overloadpacket not in VARYING and any(isinstance(x, Read) for x in tensors):  # type: ignore[union-attr]
            raise Refuse("a number that is read from a tensor")
        for spec in specs:
            if spec is not None and spec.device.type not in _DEVICES:
                raise Refuse(f"device {spec.device}")
        for dtype in (*(x.dtype for x in tensors), *(s.dtype for s in specs if s is not None)):
            if not known(dtype) and row.kind != "view":
                raise (Library if row.kind == "index" else Refuse)(f"dtype {dtype}")  # moved by torch, without arithmetic
        devices = {a.meta["spec"].device for a in node.all_input_nodes if isinstance(a.meta.get("spec"), Spec)}
        if len(devices | {s.device for s in specs if s is not None}) > 1:
            raise Library("operands on several devices")

    def _settle(self, node: fx.Node, x: Lowered, spec: Spec) -> None:
        """Decides whether the value becomes a buffer, and keeps it."""
        cx, use = self.cx, self.uses[node]
        source = node.args[0] if node.target is operator.getitem else node
        view = _is_view(self.rows.get(source))  # type: ignore[arg-type]
        if use.stored and not view:
            layout = spec.stride if apart(spec.size, spec.stride) else None
            found = cx.strided(x, spec.stride)
            own = found is not None and found.buffer in cx.made and found.offset == 0
            cx.made.discard(found.buffer if found is not None else "")  # two results never share memory
            if not own or found.stride != (layout or found.stride) or cx.buffers[found.buffer].size != x.size:  # type: ignore[union-attr]
                cx.device = spec.device
                x = cx.store(x, layout)
                found = cx.strided(x, spec.stride)
            self.home[node] = cx.buffers[found.buffer]  # type: ignore[union-attr]
        elif cx.weigh(x.body)[0] > LIMIT or (use.reads > 1 and not cx.cheap(x)) or (use.stored and cx.strided(x) is None):
            cx.device = spec.device
            x = cx.store(x, spec.stride if dense(spec.size, spec.stride) else None)
        self.env[node] = x

    def _extern(self, node: fx.Node, specs: Sequence[Spec | None], reason: str = "", library: bool = True) -> tuple[Lowered | None, ...]:
        """A call of torch; its tensor operands are put in memory."""
        cx, target = self.cx, cast(Any, node.target)
        schema = target._schema  # type: ignore[union-attr]
        if _TAG.dynamic_output_shape in target.tags or _TAG.data_dependent_output in target.tags:  # type: ignore[union-attr]
            raise NeedsDataError(f"{_name(node)} has a result whose shape depends on data{_where(node)}")
        if schema.is_mutable:
            raise UnsupportedError(f"{_name(node)} writes its arguments{_where(node)}")
        copies = any(r.alias_info is not None for r in schema.returns)
        if copies:
            target = _copying(target)
            if target is None or (self.uses[node].stored and any(self._root(x) is node for x in _output_nodes(self.graph))):
                raise UnsupportedError(f"{_name(node)} returns a view and has no row{_where(node)}")
        args = self._refs(node.args)
        kwargs = tuple((k, self._refs(v)) for k, v in node.kwargs.items())
        single = isinstance(node.meta["spec"], Spec)
        read = {u.args[1] for u in node.users if u.target is operator.getitem}
        outs: list[Buffer | None] = []
        for k, spec in enumerate(specs):
            if spec is None or not (single or k in read):
                outs.append(None)
                continue
            cx.device = spec.device
            outs.append(cx.buffer(spec.dtype, spec.size, None if copies else spec.stride))  # a view may overlap, a copy is row-major
        row = self.rows[node]
        ordered = bool(node.meta.get("ordered")) or (row is not None and row.ordered)
        cx.extern(Extern(tuple(outs), target, args, kwargs, library, reason, ordered, (node.name,)))
        return tuple(None if b is None else cx.read(b) for b in outs)

    def _refs(self, tree: Any) -> Any:
        if isinstance(tree, fx.Node):
            x = self.env[tree]
            if not isinstance(x, Lowered):
                raise UnsupportedError(f"{tree.name} is no tensor{_where(tree)}")
            if isinstance(x, Read):
                return replace(self.cx.ref(x), number=True)
            spec: Spec = tree.meta["spec"]
            self.cx.device = spec.device
            return self.cx.ref(x, spec.stride)
        if isinstance(tree, (list, tuple)):
            return tuple(self._refs(x) for x in tree)
        return tree

    # ---- outputs and write-backs ---------------------------------------------------------------------------------------

    def _copy(self, node: fx.Node) -> None:
        destination, source = node.args[0], node.args[1]
        root = destination
        if not isinstance(root, fx.Node) or root.op != "placeholder":
            raise UnsupportedError(f"a write to {destination}, which is no input{_where(node)}")
        b = self.home[root]
        if not apart(b.size, b.stride):
            raise UnsupportedError(f"a write to an input whose elements share memory{_where(node)}")
        x = self.env[source] if isinstance(source, fx.Node) else None
        if x is None or not known(b.dtype) or not known(x.dtype):
            raise UnsupportedError(f"a write of {source} to an input{_where(node)}")
        self.env[node] = named(broadcast(to(x, b.dtype), b.size), merged((x,), node.name))
        self.writes.append((root, self.env[node]))

    def _write_back(self) -> None:
        """Stores to inputs, after every reader of their old values."""
        written = {self.home[root].name for root, _ in self.writes}
        ready = []
        for root, x in self.writes:
            b = self.home[root]
            own = self.cx.read(b)
            here = next(loads(own.body))
            self.cx.origins = x.origins
            if any(n.name in written and n is not here for n in loads(x.body)):
                self.cx.device = b.device
                x = named(self.cx.store(x), x.origins)
            ready.append((b, x))
        for b, x in ready:
            self.cx.write_back(b, x)

    def _output(self, x: Any) -> Any:
        if not isinstance(x, fx.Node):
            return x
        if self.env[x] is None:
            return None
        if isinstance(self.env[x], Read):
            return self._refs(x)
        spec, root = x.meta["spec"], self._root(x)
        if not isinstance(spec, Spec):
            raise UnsupportedError(f"output {x.name} is no tensor")
        base: Spec = root.meta["spec"]
        if root not in self.home:  # a constant: each call returns its own
            self.cx.origins = (root.name,)
            self.cx.device = base.device
            stored = self.cx.store(self.env[root], base.stride if dense(base.size, base.stride) else None)
            self.home[root] = self.cx.buffers[next(loads(stored.body)).name]
        b = self.home[root]
        if b.stride != base.stride and x is not root and b.size != ():
            raise UnsupportedError(f"output {x.name} is a view of a value with an unusual layout{_where(x)}")
        stride = b.stride if x is root else spec.stride
        return Ref(b.name, spec.size, stride, spec.offset - base.offset if x is not root else 0)


_TAG = torch.Tag


def _is_view(row: Row | None) -> bool:
    return row is not None and row.kind == "view"


def _covers(view: fx.Node, source: fx.Node) -> bool:
    """Whether a view reaches every element of what it views."""
    a, b = view.meta["spec"], source.meta["spec"]
    return isinstance(a, Spec) and isinstance(b, Spec) and a.numel >= b.numel


def _output_nodes(graph: Sequence[fx.Node]) -> Iterator[fx.Node]:
    return (x for x in graph[-1].args[0] if isinstance(x, fx.Node))  # type: ignore[union-attr]


def _resolve(tree: Any, env: dict[fx.Node, Any]) -> Any:
    if isinstance(tree, fx.Node):
        return env[tree]
    if isinstance(tree, (list, tuple)):
        return tuple(_resolve(x, env) for x in tree)
    if isinstance(tree, dict):
        return {k: _resolve(v, env) for k, v in tree.items()}
    return tree


def _checked(result: Any, specs: Sequence[Spec | None], several: bool) -> tuple[Lowered | None, ...]:
    """The results of a row, held against what eager recorded."""
    results = tuple(result) if several else (result,)
    if len(results) != len(specs):
        raise Refuse(f"the row gives {len(results)} results, eager {len(specs)}")
    for x, spec in zip(results, specs, strict=True):
        if x is not None and spec is not None and (x.size != spec.size or x.dtype != spec.dtype):
            raise Refuse(f"the row gives {x.dtype} {x.size}, eager {spec.dtype} {spec.size}")
        if x is not None and x.body.dtype != compute(x.dtype):
            raise Refuse(f"the row computes {x.body.dtype} for {x.dtype}")
    return results


def _copying(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operator that returns a copy where `target` returns a view."""
    packet = getattr(torch.ops.aten, f"{target._schema.name.split('::')[1]}_copy", None)
    return getattr(packet, target._overloadname, None) if packet is not None else None


def _name(node: fx.Node) -> str:
    return str(node.target)


def _where(node: fx.Node) -> str:
    line = node.meta.get("line")
    return f" ({line})" if line else ""
