"""The joint graph: forward, tangents and backward of a training region as one operator graph (section 5.1).

In: a captured graph and the tensors to run it on, some of which require grad.
Out: a `Joint`. torch's own derivative formulas ran under the recorder, so backward is made of their operators.
Always: inputs that require no grad cause no backward work; a result depends on no tangent; the caller's tensors,
their version counters, the generators and the autocast state are as before; no autograd graph outlives the run.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ...capture.history import nodes_of
from ...errors import UnsupportedError
from ..loops.nodes import Spec
from . import views
from .functional import dense, functionalize
from .narrow import narrow
from .numbers import has_numbers
from .opgraph import OpGraph, runnable
from .recorder import MARK, Recorder, Result
from .retrace import Run, attempts, generators, grad_mode_kept, modes_kept, sweep
from .views import Link

WRITE = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class Leaf:
    """How one leaf of the region's result is made at run time.

    source: ('input', k), ('result', k) or ('value', the value itself). links: the views that lead from there to it.
    fresh: it is an object of its own even without views. grad: it takes part in autograd.
    """

    source: tuple[str, Any]
    links: tuple[Link, ...] = ()
    fresh: bool = False
    grad: bool = False


@dataclass(frozen=True)
class Joint:
    """ops: placeholders are the primals, then the tangents; the outputs are the results, then the gradients.

    results: how many outputs are results. tangents: for each tangent the result that it belongs to.
    grads: for each primal the position of its gradient among the gradients; None: eager gives it none.
    reached: for each tangent the primals that autograd leads to, with a gradient or without.
    leaves: the region's result, leaf by leaf. taken: for each result the leaf whose tensor it is, and whether it is
    that leaf's base. Nodes of backward have meta['backward'], those of a
    checkpointed region meta['checkpoint'].
    """

    ops: OpGraph
    results: int
    tangents: tuple[int, ...]
    grads: tuple[int | None, ...]
    leaves: tuple[Leaf, ...]
    taken: tuple[tuple[int, bool], ...]
    reached: tuple[tuple[int, ...], ...]

    @property
    def primals(self) -> int:
        return len(self.grads)


def differentiate(graph: fx.GraphModule, samples: Sequence[Tensor]) -> Joint:
    """The joint graph of a captured graph."""
    joint = attempts(_Tape, graph, samples)
    if joint.tangents and has_numbers(graph):
        raise UnsupportedError("a graph that trains and computes with numbers read from tensors")
    return joint


class TapeRecorder(Recorder):
    """A recorder below autograd. Autograd saves copies of tensors that lack our mark; the memory tells which they are."""

    def __init__(self, foreign: dict[int, str]) -> None:
        self.marks: list[tuple[int, str]] = []  # autograd's sequence number from which on nodes belong to a line
        self.backward = False
        self.places: dict[tuple, fx.Node | Result] = {}
        self.storages: dict[int, Any] = {}  # storage -> weak handle, which keeps the number from being used again
        super().__init__(foreign)

    @property
    def line(self) -> str:  # type: ignore[override]
        if self.backward and (at := torch._C._current_autograd_node()) is not None:
            k = bisect.bisect_right(self.marks, at._sequence_nr(), key=lambda mark: mark[0])
            return self.marks[k - 1][1] if k else ""
        return self.marks[-1][1] if self.marks else ""

    @line.setter
    def line(self, line: str) -> None:
        self.marks.append((torch._C._autograd._get_sequence_nr(), line))

    def bind(self, t: Tensor, node: fx.Node | Result) -> None:
        super().bind(t, node)
        storage = t.untyped_storage()
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = storage._weak_ref()
        self.places[_place(t)] = node

    def node(self, t: Tensor) -> fx.Node:
        found: Any = getattr(t, MARK, None)
        if (found.node if type(found) is Result else found) is None and t.layout is torch.strided:
            place = self.places.get(_place(t))
            if place is not None:
                setattr(t, MARK, place)
            elif t.untyped_storage()._cdata in self.storages:
                raise UnsupportedError("backward reads a tensor through memory that no recorded operator made")
        return super().node(t)

    def release(self) -> None:
        for handle in self.storages.values():
            torch.UntypedStorage._free_weak_ref(handle)
        self.storages.clear()
        self.places.clear()


def _place(t: Tensor) -> tuple:
    return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg()


class _Tape(Run):
    recorder_type = TapeRecorder
    recorder: TapeRecorder

    def result(self) -> Joint:  # type: ignore[override]
        recorder, samples = self.recorder, self.samples
        undoing = generators({t.device for t in samples})
        inputs = [t.requires_grad_(s.requires_grad) for t, s in zip(self.inputs, samples, strict=True)]
        self.inputs = inputs
        with modes_kept(), grad_mode_kept():
            self.bind_inputs()
            try:
                return self.joint(inputs, self.execute())
            finally:
                recorder.release()
                for undo in undoing:
                    undo()

    def call(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        nodes = self.recorder.graph.nodes
        last = next(iter(reversed(nodes)), None)
        found = super().call(node, values)
        if node.meta.get("checkpoint"):
            for made in itertools.takewhile(lambda n: n is not last, reversed(nodes)):
                made.meta["checkpoint"] = True
        if node.op == "get_attr" and isinstance(found, Tensor) and found.requires_grad:
            raise UnsupportedError("a constant that requires grad")
        return found

    def joint(self, inputs: list[Tensor], leaves: list[Any]) -> Joint:
        recorder, graph = self.recorder, self.recorder.graph
        check_inputs(inputs, self.samples)
        if any(isinstance(x, Tensor) and x.requires_grad and x.is_leaf and not any(x is t for t in inputs) for x in leaves):
            raise UnsupportedError("returns a tensor that it made require grad")
        bases, taken = _bases(inputs, leaves)
        kept = [recorder.load(x) for x in (*bases, *leaves)]
        tangents = tuple(k for k, t in enumerate(bases) if t.requires_grad)
        reached = tuple([_reached(bases[k], inputs) for k in tangents])
        before = set(graph.nodes)
        found = self.backward(inputs, [bases[k] for k in tangents])
        gradients = [recorder.load(g) for g in found if g is not None]
        escapes = any(isinstance(x, Tensor) and x.untyped_storage()._cdata in recorder.lifted for x in leaves)
        graph.output(tuple([*kept, *gradients]))
        if recorder.written or escapes:
            functionalize(graph)
        at = iter(range(len(gradients)))
        grads = tuple(None if g is None else next(at) for g in found)
        return _finished(recorder, self.samples, bases, leaves, inputs, taken, tangents, grads, reached, before)

    def backward(self, inputs: list[Tensor], roots: list[Tensor]) -> list[Tensor | None]:
        """Runs autograd from the roots with new tangents; for each input its gradient."""
        recorder = self.recorder
        wanted = [k for k, t in enumerate(inputs) if t.requires_grad]
        found: list[Tensor | None] = [None] * len(inputs)
        if not roots or not wanted:
            return found
        tangents = []
        with torch.no_grad():
            after = [n for n in recorder.graph.nodes if n.op == "placeholder"][-1]
            for k, t in enumerate(roots):
                tangent = torch.empty_strided(t.shape, dense(Spec.of(t)), dtype=t.dtype, device=t.device).fill_(1)
                with recorder.graph.inserting_after(after):
                    after = recorder.graph.placeholder(f"tangents_{k + 1}")
                after.meta.update(spec=Spec.of(tangent), line="", ordered=False)
                recorder.bind(tangent, after)
                tangents.append(tangent)
        for device in ("cpu", "cuda"):
            torch.set_autocast_enabled(device, False)  # as in `loss.backward()` behind the `with`
        recorder.backward = True
        run = torch.autograd.graph._engine_run_backward
        try:
            with recorder:
                grads = run(tuple(roots), tuple(tangents), False, False, tuple([inputs[k] for k in wanted]), allow_unreachable=True, accumulate_grad=False)  # fmt: skip
        except UnsupportedError:
            raise
        except Exception as error:
            raise UnsupportedError(f"backward failed while its operators were recorded: {error}") from error
        finally:
            recorder.backward = False
        for k, g in zip(wanted, grads, strict=True):
            found[k] = g
        return found


def check_inputs(inputs: Sequence[Tensor], samples: Sequence[Tensor]) -> None:
    """Refuses a graph that gives an input of the caller a history, or makes it require grad."""
    for t, s in zip(inputs, samples, strict=True):
        if t.requires_grad != s.requires_grad:
            raise UnsupportedError("a write that makes an input require grad")
        if t.grad_fn is not None:  # a write without grad mode, as an optimizer's, leaves a leaf a leaf
            raise UnsupportedError("a write to an input that requires grad")


def _bases(inputs: list[Tensor], leaves: list[Any]) -> tuple[list[Tensor], tuple[tuple[int, bool], ...]]:
    """The tensors that the compiled part returns: one for each piece of memory that leaves the region, inputs apart."""
    owned = {t.untyped_storage()._cdata for t in inputs}
    groups: dict[int, list[int]] = {}
    for k, x in enumerate(leaves):
        if isinstance(x, Tensor) and x.untyped_storage()._cdata not in owned:
            group = groups.setdefault(x.untyped_storage()._cdata, [])
            if not any(leaves[j] is x for j in group):
                group.append(k)
    bases, taken = [], []
    for group in groups.values():
        first = max(group, key=lambda k: (leaves[k].requires_grad, not leaves[k]._is_view()))
        x = leaves[first]
        above = len(group) > 1 and x._is_view() and x._base is not None
        bases.append(x._base if above else x)
        taken.append((first, above))
    return bases, tuple(taken)


def of_leaves(leaves: Sequence[Any], taken: Iterable[tuple[int, bool]]) -> list[Tensor]:
    """The results among the leaves of a run of the captured graph."""
    return [leaves[k]._base if above else leaves[k] for k, above in taken]


def _finished(
    recorder: TapeRecorder, samples: Sequence[Tensor], bases: list[Tensor], leaves: list[Any], inputs: list[Tensor],
    taken: tuple[tuple[int, bool], ...], tangents: tuple[int, ...], grads: tuple[int | None, ...],
    reached: tuple[tuple[int, ...], ...], before: set[fx.Node],
) -> Joint:  # fmt: skip
    graph = recorder.graph
    output = graph.output_node()
    outputs: Any = output.args[0]
    n, m = len(bases), len(leaves)
    made = tuple([_leaf(x, outputs[n + k], bases, outputs[:n], inputs) for k, x in enumerate(leaves)])
    output.args = ((*outputs[:n], *outputs[n + m :]),)
    sweep(graph)
    _tag(graph, n, before)
    narrow(graph)
    ops = OpGraph(runnable(recorder.constants, graph), training=True)
    return Joint(ops, n, tangents, grads, made, taken, reached)


def _leaf(x: Any, node: Any, bases: list[Tensor], nodes: Sequence[fx.Node], inputs: list[Tensor]) -> Leaf:
    if not isinstance(x, Tensor):
        return Leaf(("value", x))
    for kind, tensors in (("result", bases), ("input", inputs)):
        for k, t in enumerate(tensors):
            if t is x:
                return Leaf((kind, k), grad=x.requires_grad)
    links: list[Link] = []
    at = node
    while True:
        if at.op == "placeholder":
            source = "input", int(at.name.removeprefix("primals_")) - 1
        elif at in nodes:
            source = "result", nodes.index(at)
        else:
            parent = views.parent(at)
            if parent is None:
                raise UnsupportedError("results that share memory in a way that no chain of views gives")
            links.append(views.link(at))
            at = parent
            continue
        whole = (inputs if source[0] == "input" else bases)[source[1]]
        if x.requires_grad and not (whole.requires_grad or whole.is_leaf):
            raise UnsupportedError("a result that requires grad and shares memory with one that does not")
        if x.requires_grad and not _only_views(x, whole):
            raise UnsupportedError(
                "returns a view whose gradient goes another way than through views: of an autograd.Function, or made without grad mode"
            )
        return Leaf(source, tuple(reversed(links)), True, x.requires_grad)


def _reached(root: Tensor, inputs: list[Tensor]) -> tuple[int, ...]:
    """The inputs that autograd leads to from a result."""
    places = {id(t): k for k, t in enumerate(inputs)}
    variables = [getattr(node, "variable", None) for node in nodes_of(root)]
    found = {places[id(t)] for t in variables if id(t) in places}
    if not found:
        raise UnsupportedError("a result that requires grad though autograd leads from it to no input")
    return tuple(sorted(found))


def _only_views(x: Tensor, whole: Tensor) -> bool:
    """Whether autograd leads from a tensor to the one that it views through operators alone that make views."""
    node: Any = x.grad_fn
    end: Any = whole.grad_fn
    while node is not None and node is not end:
        if getattr(node, "variable", None) is whole:
            return True
        if isinstance(node, torch.autograd.function.BackwardCFunction) or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return node is not None


def _tag(graph: fx.Graph, results: int, before: set[fx.Node]) -> None:
    """Marks the nodes of backward: recorded or made after forward, and not needed by a result or an effect."""
    nodes = list(graph.nodes)
    outputs: Any = nodes[-1].args[0]
    effects = [n for n in nodes if n.target is WRITE or (n in before and n.meta.get("ordered"))]
    forward = ancestors([*(x for x in outputs[:results] if isinstance(x, fx.Node)), *effects])
    late = False
    for node in nodes[:-1]:
        if node.target is operator.getitem:  # written down when it is first read, maybe by backward
            node.meta["backward"] = node.args[0].meta["backward"]  # type: ignore[union-attr]
        else:
            late = late or node not in before
            node.meta["backward"] = late and node not in forward and node.op == "call_function"
    tangent = dependent(graph)
    if tangent & forward:
        raise UnsupportedError("backward writes what forward returns")


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and all that they read."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def dependent(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that need a tangent, the output apart."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and node.name.startswith("tangents_")
        if tangent or (node.op == "call_function" and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found
