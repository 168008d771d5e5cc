"""Functionalization: a graph whose only writes are `copy_` nodes becomes one without writes (section 4.9).

In: a graph in which every in-place operator was already split into its functional overload and a
`aten.copy_.default(written, value)`, in program order, `written` being any tensor or view of one.
Out: the same program on values. Each write gives its root (the tensor that owns the memory) a new value through the
scatter inverses of the views on the way; later reads of any alias see it; inputs that were written get one trailing
`copy_` with their last value.
Always: an output that shared memory with an input, or with another output, still does; a constant never leaves
the graph uncopied.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from ...errors import UnsupportedError
from ..loops.nodes import Spec, row_major
from . import views
from .views import Link

aten = torch.ops.aten
WRITE = aten.copy_.default
_ITSELF = Link(None, ())


@dataclass
class Root:
    """A tensor that owns memory: its first value, its value now, how often it was written."""

    first: fx.Node
    value: fx.Node
    version: int = 0


@dataclass
class Alias:
    """A tensor of the program: the root whose memory it has, as a view of which parent (None: it is the root),
    the layout that the program sees, and its value as of some version of the root."""

    root: Root
    seen: Spec
    value: fx.Node
    version: int = 0
    parent: Alias | None = None
    link: Link = _ITSELF


@dataclass
class _Pass:
    """One walk over the graph, which it rewrites in place."""

    graph: fx.Graph
    at: fx.Node  # the node that is being rewritten; new ones go before it
    alias: dict[fx.Node, Alias] = field(default_factory=dict)

    # -- new nodes

    def emit(self, target: Any, args: tuple[Any, ...], spec: Spec | None = None, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.at):
            node = self.graph.create_node("call_function", target, args, kwargs, target._schema.name.split("::")[1])
        node.meta.update(
            spec=views.spec(target, args) if spec is None else spec, line=self.at.meta.get("line", ""), ordered=False
        )
        return node

    def copied(self, value: fx.Node, layout: Spec) -> fx.Node:
        """A new tensor with this value and the strides of `layout`, those of dimensions of size 1 included."""
        source = value.meta["spec"]
        spec = Spec(layout.size, layout.stride, source.dtype, source.device)
        if layout.stride == row_major(layout.size):
            return self.emit(aten.clone.default, (value,), spec, memory_format=torch.contiguous_format)
        options = {"dtype": source.dtype, "device": source.device}
        blank = self.emit(aten.empty_strided.default, (list(layout.size), list(layout.stride)), spec, **options)
        return blank if layout.numel == 0 else self.emit(aten.copy.default, (blank, value), spec)

    # -- reading

    def read(self, node: fx.Node) -> fx.Node:
        """The value that `node` has at this point of the program."""
        return self.now(self.alias[node]) if node in self.alias else node  # else it has several results

    def now(self, alias: Alias) -> fx.Node:
        stale: list[Alias] = []
        at = alias
        while at.parent is not None and at.version != at.root.version:
            stale.append(at)
            at = at.parent
        value = at.value if at.parent is not None else at.root.value
        for each in reversed(stale):
            value = self.view(each, value)
            each.value, each.version = value, each.root.version
        return value

    def view(self, alias: Alias, base: fx.Node) -> fx.Node:
        try:
            return views.apply(self.emit, base, _placed(alias, alias.root.value.meta["spec"]))
        except RuntimeError as error:
            raise UnsupportedError(f"{alias.link.target} of a tensor whose layout changed by a write: {error}") from error

    # -- writing

    def write(self, node: fx.Node, value: fx.Node, fresh: bool) -> None:
        """`fresh`: the value may stand for the tensor that was written: no output and no later write shares its memory."""
        alias = self.alias[node]
        chain: list[Alias] = [alias]
        while chain[-1].parent is not None:
            chain.append(chain[-1].parent)
        bases = [self.now(each) for each in chain[1:]]  # the values before the write
        after: list[tuple[Alias, fx.Node]] = []
        for each, base in zip(chain[:-1], bases, strict=True):
            link = _placed(each, each.root.value.meta["spec"], writes=True)
            if not views.copies(link):
                laid = self.laid(value, each.seen)
                value, fresh = laid, fresh or laid is not value
            if _agrees(value.meta["spec"], each.seen):
                after.append((each, value))
            value = views.scatter(self.emit, base, value, link)
            fresh = fresh or views.copies(link)
        root = alias.root
        value = self.laid(value, chain[-1].seen) if fresh else self.copied(value, chain[-1].seen)
        root.value = value
        root.version += 1
        for each, found in after:
            each.value, each.version = found, root.version

    def laid(self, value: fx.Node, layout: Spec) -> fx.Node:
        return value if _agrees(value.meta["spec"], layout) else self.copied(value, layout)

    # -- the walk

    def step(self, node: fx.Node) -> None:
        self.at = node
        if node.target is WRITE:
            target, value = cast(tuple[fx.Node, fx.Node], node.args)
            source = self.alias[value].root.first
            into_input = self.alias[target].root.first.op == "placeholder" and source.op != "placeholder"
            self.write(target, self.read(value), node.meta["fresh"] or into_input)
            self.graph.erase_node(node)
            return
        if node.target in views.LISTS:  # left as it is: only its elements are read, and they follow their parent
            return
        base = views.parent(node)
        if base is None:
            self.reread(node)
            spec = node.meta["spec"]
            if isinstance(spec, Spec):
                self.alias[node] = Alias(Root(node, node), spec, node)
            return
        above = self.alias[base]
        now = self.now(above)
        moved = now.meta["spec"] != above.seen or (node.target is operator.getitem and now is not base)
        if node.target is aten.as_strided.default:
            moved = above.root.version > 0 or moved
            above = _top(above)
        alias = Alias(above.root, node.meta["spec"], node, above.root.version, above, views.link(node))
        alias.value = self.view(alias, self.now(above)) if moved else self.reread(node)
        self.alias[node] = alias

    def reread(self, node: fx.Node) -> fx.Node:
        """The node, with the values that its arguments have now."""
        if any(self.read(a) is not a for a in node.all_input_nodes):
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), self.read)
        return node

    def output(self, node: fx.Node) -> None:
        self.at = node
        leaving: dict[int, fx.Node] = {}  # id of a root -> the tensor that outputs view
        made: dict[int, fx.Node] = {}

        def leave(node: fx.Node) -> fx.Node:
            if node not in self.alias:
                return node
            alias = self.alias[node]
            root = alias.root
            if id(root) not in leaving:
                leaving[id(root)] = self.owner(root)
            owner = leaving[id(root)]
            if owner is root.value and root.version == 0:
                return self.now(alias)
            chain: list[Alias] = []
            at = alias
            while at.parent is not None and id(at) not in made:
                chain.append(at)
                at = at.parent
            value = owner if at.parent is None else made[id(at)]
            for each in reversed(chain):
                link = _placed(each, owner.meta["spec"])
                value = made[id(each)] = views.apply(self.emit, value, link)
            return value

        for alias in list(self.alias.values()):
            root = alias.root
            if alias.parent is None and root.first.op == "placeholder" and root.value is not root.first:
                self.emit(WRITE, (root.first, root.value), root.first.meta["spec"])
        node.args = (fx.map_arg(node.args[0], leave),)

    def owner(self, root: Root) -> fx.Node:
        """The tensor that leaves for a root: an input itself, anything else in the layout that it has in eager."""
        if root.first.op == "placeholder":
            return root.first
        layout = self.alias[root.first].seen
        lent = root.first.op == "get_attr" and root.first.meta.get("fresh") and root.value is root.first
        if lent or root.value.meta["spec"].stride != layout.stride:
            return self.copied(root.value, layout)
        return root.value


def _top(alias: Alias) -> Alias:
    while alias.parent is not None:
        alias = alias.parent
    return alias


def _placed(alias: Alias, now: Spec, writes: bool = False) -> Link:
    """The link; `as_strided`, which counts from the begin of the storage, moved to where the root lies now. Only an
    unwritten root has memory around its elements: else the view must consist of them."""
    link, top = alias.link, _top(alias)
    if link.target is not aten.as_strided.default:
        return link
    then = top.seen
    if then.stride != now.stride:
        raise UnsupportedError("as_strided on a tensor whose layout changed by a write")
    size, stride, offset = link.args
    if writes or top.root.version:
        last = offset + sum((n - 1) * st for n, st in zip(size, stride, strict=True))
        dense = 1 + sum((n - 1) * st for n, st in zip(then.size, then.stride, strict=True)) == then.numel
        if alias.seen.numel and not (dense and then.offset <= offset and last < then.offset + then.numel):
            raise UnsupportedError("as_strided beyond the elements of a tensor that is written")
    return Link(link.target, (size, stride, offset - then.offset + now.offset))


def functionalize(graph: fx.Graph) -> None:
    """Rewrites the graph to have no writes, except the trailing copies into inputs. Nodes may be left without users."""
    nodes = list(graph.nodes)
    work = _Pass(graph, nodes[0])
    for node in nodes[:-1]:
        work.step(node)
    work.output(nodes[-1])


def _order(layout: Spec) -> list[int]:
    """Dimensions from the outermost in memory to the innermost; ties and dimensions of size 1 keep their place."""
    order = list(range(len(layout.size)))
    real = [d for d in order if layout.size[d] != 1]
    by_stride = iter(sorted(real, key=lambda d: -layout.stride[d]))
    return [d if layout.size[d] == 1 else next(by_stride) for d in order]


def dense(layout: Spec) -> tuple[int, ...]:
    """The strides of a dense tensor whose dimensions lie in the same order."""
    order = _order(layout)
    packed = row_major(tuple(layout.size[d] for d in order))
    stride = [0] * len(order)
    for step, d in zip(packed, order, strict=True):
        stride[d] = step
    return tuple(stride)


def _agrees(spec: Spec, layout: Spec) -> bool:
    """Whether every view and every operator gives the same layout of both: where they are equal, or dense in one order.

    The strides of an empty tensor and of dimensions of size 1 address nothing, yet operators order dimensions by them.
    """
    return spec.stride == layout.stride or (not {0, 1} & {*layout.size} and spec.stride == dense(layout))
