"""A training region at run time: autograd functions around its compiled forward and backward parts (section 5).

In: the joint graph, its parts, and what compiles a part.  Out: `TrainingProgram`, called like any program.
Always: values, gradients and their absence are eager's. Saved tensors go through torch's own version check and are
freed by backward unless the graph is retained. A tangent that is absent stays absent: for each pattern of tangents
there is a backward part of its own; results that reach no input in common are results of different autograd nodes, and
an input that autograd leads to from no result has no edge, so that autograd runs nothing that it would not run for
eager. Where backward must itself be differentiated, the captured graph runs again on the same inputs. Nothing here refers to an autograd node, so no cycle keeps tensors alive.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...capture import ambient
from ..loops.nodes import Spec
from .differentiate import Joint, Leaf, ancestors, differentiate, of_leaves
from .opgraph import OpGraph
from .partition import Parts, partition
from .tangents import groups, meetings, restrict

Run = Callable[..., Sequence[Any]]
_AS_IT_IS: contextlib.AbstractContextManager = contextlib.nullcontext()


class Unserved(Exception):
    """A check of the forward part failed before it wrote anything."""


class TrainingProgram:
    """A compiled training region. Attributes are what `tp.explain` and `tp.testing` read.

    compile: makes a runnable part of an operator graph; the forward part was compiled before, the backward part for
    the usual tangents is compiled by the first backward. A part that consumes frees saved tensors as it reads them.
    """

    def __init__(
        self, graph: fx.GraphModule, joint: Joint, parts: Parts, forward: Any, compile: Callable[[OpGraph], Run],
        compiled: tuple[Any, ...] = (), seconds: dict[str, float] | None = None,
    ) -> None:  # fmt: skip
        self.graph = graph
        self.joint = self.ops = joint.ops
        self.partition = parts
        self.parts = compiled
        self.seconds = {} if seconds is None else seconds
        self.forward, self.backward = parts.forward, parts.backward
        self.saved = [s.name for s in parts.saved]
        self.leaves = joint.leaves
        self.taken = joint.taken
        self.results = joint.results
        self.differentiable = joint.tangents
        self.kept = parts.kept
        self.grads = joint.grads
        led = set().union(*joint.reached)
        self.apart = tuple(k for k in range(joint.primals) if k not in led)  # inputs that autograd leads to from no result
        self.random = any(n.meta.get("ordered") for n in joint.ops.module.graph.nodes)
        self.writes = any(n.target is torch.ops.aten.copy_.default for n in joint.ops.module.graph.nodes)
        self.rebuild = rebuilder(graph.graph.output_node().args[0])
        self.program = forward
        self.run_forward: Run = getattr(forward, "call", forward)
        self.run_trusted: Run = getattr(forward, "trusted", forward)
        self.backwards: dict[tuple[bool, ...], tuple[Any, tuple[int | None, ...], tuple[bool, ...]]] = {}
        placeholders = [n for n in parts.backward.module.graph.nodes if n.op == "placeholder"]
        self.layouts: list[Spec] = [n.meta["spec"] for n in placeholders[len(placeholders) - len(joint.tangents) :]]
        self.meetings = meetings(parts.backward, len(joint.tangents))
        self.pieces = [Piece(self, *group) for group in groups(joint.reached)]
        self.modes = ambient.ambient()  # it is compiled for the modes that it is called under
        self._compile = compile
        self._lock = threading.Lock()

    def __call__(self, *inputs: Tensor) -> Any:
        return self._step(self.run_forward, inputs)

    def trusted(self, *inputs: Tensor) -> Any:
        """The same for inputs whose metadata a key has compared already."""
        return self._step(self.run_trusted, inputs)

    def _step(self, run: Run, inputs: tuple[Tensor, ...]) -> Any:
        call = Call(list(inputs))
        for k in self.apart:
            if inputs[k].requires_grad:
                call.inputs[k] = inputs[k].detach()
        try:
            with torch.enable_grad() if not torch.is_grad_enabled() else _AS_IT_IS:  # the region itself turns it on
                made = [_apply(piece, run, call, *[call.inputs[k] for k in piece.primals]) for piece in self.pieces]
        except Unserved:
            return self.graph(*inputs)
        results = call.flat[: self.results]
        for piece, found in zip(self.pieces, made, strict=True):
            for k, t in zip(piece.results, found, strict=True):
                results[k] = t
        return self.rebuild([_made(leaf, inputs, results) for leaf in self.leaves])

    @property
    def host(self) -> str:
        """The host code of the parts that are compiled."""
        runs = (self.program, *(run for run, _, _ in self.backwards.values()))
        return "\n".join(text for run in runs if (text := getattr(run, "host", "")))

    def backward_for(self, present: tuple[bool, ...]) -> tuple[Any, tuple[int | None, ...], tuple[bool, ...]]:
        """The backward part for a pattern of tangents: how to run it, each primal's gradient among its results, and
        which of the kept and saved values it reads."""
        found = self.backwards.get(present)
        if found is None:
            with self._lock:
                found = self.backwards.get(present)
                if found is None:
                    ops, grads, reads = restrict(self.backward, self.grads, present)
                    found = self.backwards[present] = (self._compile(ops), grads, reads)
        return found

    def run(self, level: str, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """The flat outputs of one level of the forward part, without gradients."""
        if level == "graph":
            return tuple(pytree.tree_leaves(self.graph(*inputs), is_leaf=lambda x: x is None))
        with torch.no_grad():
            results = self.program.run(level, inputs)[: self.results]
            return tuple([_made(leaf, inputs, results) for leaf in self.leaves])

    def __repr__(self) -> str:
        return f"<TrainingProgram: saves {len(self.saved)} values, {self.partition.saved_bytes} bytes>"


class Call:
    """What the autograd nodes of one call have in common: its inputs, the results and saved values, the generator's state."""

    __slots__ = ("flat", "inputs", "state")

    def __init__(self, inputs: list[Tensor]) -> None:
        self.inputs = inputs
        self.flat: list[Any] | None = None
        self.state: Tensor | None = None


class Piece:
    """One autograd node of a region.

    tangents: its own among the region's. primals: the inputs that autograd leads to. results: places of what it returns.
    kept: the inputs that it saves. saved: places of its saved values among the region's. rest: the other inputs.
    """

    def __init__(self, program: TrainingProgram, tangents: tuple[int, ...], primals: tuple[int, ...]) -> None:
        self.program, self.tangents, self.primals = program, tangents, primals
        self.results = tuple([program.differentiable[k] for k in tangents])
        nodes = list(program.backward.module.graph.nodes)
        outputs: Any = nodes[-1].args[0]
        needed = ancestors([outputs[place] for k in primals if (place := program.grads[k]) is not None])
        held = [k for k, n in enumerate(nodes[: len(program.kept) + len(program.saved)]) if n in needed]
        self.held = held if len(program.differentiable) > len(tangents) else [*range(len(program.kept) + len(program.saved))]
        self.kept = tuple([program.kept[k] for k in self.held if k < len(program.kept)])
        self.saved = tuple([program.results + k - len(program.kept) for k in self.held if k >= len(program.kept)])
        self.rest = tuple([k for k in range(len(program.grads)) if k not in {*self.kept}])
        self.layouts: list[Spec] = [program.layouts[k] for k in tangents]
        self.meetings = tuple([program.meetings[k] for k in tangents])
        self.reading = functools.reduce(operator.or_, self.meetings, 0)
        self._parts: dict[tuple[bool, ...], tuple[Any, list[int | None], list[bool]]] = {}

    def backward_for(self, present: tuple[bool, ...]) -> tuple[Any, list[int | None], list[bool]]:
        """For a pattern of the node's tangents how to run backward, where each primal's gradient is among its results, and
        which of the kept and saved values it reads."""
        found = self._parts.get(present)
        if found is None:
            there = {k for k, given in zip(self.tangents, present, strict=True) if given}
            run, grads, reads = self.program.backward_for(tuple([k in there for k in range(len(self.program.differentiable))]))
            found = self._parts[present] = run, [grads[k] for k in self.primals], [reads[k] for k in self.held]
        return found


def on_torch(graph: fx.GraphModule, samples: Sequence[Tensor]) -> TrainingProgram | None:
    """A training region whose two operator graphs run on torch; None where no result requires grad."""
    joint = differentiate(graph, samples)
    if not joint.tangents:
        return None
    parts = partition(joint)
    return TrainingProgram(graph, joint, parts, Operators(parts.forward), Operators)


class Operators:
    """An operator graph as a part that runs."""

    def __init__(self, ops: OpGraph) -> None:
        self.ops = ops

    def __call__(self, *inputs: Tensor) -> Sequence[Any]:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return self.ops.module(*inputs)

    def run(self, level: str, inputs: Sequence[Tensor]) -> Sequence[Any]:
        if level != "ops":
            raise ValueError(f"back end 'aot_eager' has no level {level!r}, only 'graph' and 'ops'")
        return self(*inputs)


def rebuilder(result: Any) -> Callable[[list[Any]], Any]:
    """What makes the graph's result of its leaves."""
    structure = pytree.tree_structure(result)
    if structure == pytree.tree_structure(0):
        return operator.itemgetter(0)
    if structure == pytree.tree_structure((0,) * structure.num_leaves):
        return tuple
    return lambda leaves: pytree.tree_unflatten(leaves, structure)


def _made(leaf: Leaf, inputs: Sequence[Tensor], results: Sequence[Any]) -> Any:
    """One leaf of the result."""
    kind, k = leaf.source
    if kind == "value":
        return k
    t = inputs[k] if kind == "input" else results[k]
    if not leaf.fresh:
        return t
    if not leaf.grad and t.requires_grad:  # a view made without grad mode would still require grad
        t = t.detach()
        if not leaf.links:
            return t
    with torch.set_grad_enabled(leaf.grad):
        for link in leaf.links or (_ALIAS,):
            t = link.target(t, *link.args)
    return t


class _Alias:
    target = torch.ops.aten.alias.default
    args = ()


_ALIAS = _Alias


class Step(torch.autograd.Function):
    """The one function; what it computes comes as its first argument. The first node of a call runs forward."""

    @staticmethod
    def forward(ctx: Any, piece: Piece, run: Run, call: Call, *edges: Tensor) -> tuple[Tensor, ...]:
        program, inputs = piece.program, call.inputs
        if call.flat is None:
            if program.random:
                call.state = torch.get_rng_state()
            call.flat = list(run(*inputs))
        flat = call.flat
        for k in piece.results:
            if flat[k]._is_view():  # else torch forbids later in-place writes to it
                flat[k] = flat[k].detach()
        ctx.set_materialize_grads(False)
        kept = [*[inputs[k] for k in piece.kept], *[flat[k] for k in piece.saved]]
        ctx.piece, ctx.versions, ctx.state = piece, None, call.state
        if len(program.differentiable) > 1:
            ctx.versions = [t._version for t in kept]
            made = {id(flat[k]) for k in program.differentiable}  # a saved one would hold a node, its `data` count anew
            kept = [t.detach() if id(t) in made else t for t in kept]
        ctx.save_for_backward(*kept)
        ctx.others = [(inputs[k], inputs[k]._version) for k in piece.rest]
        return tuple([flat[k] for k in piece.results])

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        piece: Piece = ctx.piece
        if torch.is_grad_enabled() or any(t is not None and _is_batched(t) for t in tangents):
            return *_NO_GRADS, *_again(ctx, piece, tangents)
        present = tuple([t is not None for t in tangents])
        run, grads, reads = piece.backward_for(present)
        values = _saved(ctx, present, reads)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            _spend(ctx, present, values)
        values = [v for v, read in zip(values, reads, strict=True) if read]
        values += [_laid(t, spec) for t, spec in zip(tangents, piece.layouts, strict=True) if t is not None]
        found = run.call(values) if getattr(run, "consumes", False) else run(*values)
        return *_NO_GRADS, *[None if k is None else found[k] for k in grads]


_NO_GRADS = (None, None, None)  # what stands before the inputs
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # of torch.autograd.grad(..., is_grads_batched=True)
# No transform of torch.func is active where a compiled version runs, so that the plain function of C serves.
_apply = getattr(super(torch.autograd.Function, Step), "apply", Step.apply)


def _saved(ctx: Any, present: tuple[bool, ...], reads: Iterable[bool]) -> list[Any]:
    """The kept inputs and saved values, unless one that is read was modified since, or a backward through the same part
    of the region has freed them."""
    left = getattr(ctx, "left", None)
    if left is None:
        try:
            return list(ctx.saved_tensors)
        except RuntimeError as error:
            if ctx.versions is None or "inplace" not in str(error):
                raise
            left = [(t.data, version) for t, version in zip(ctx._raw_saved_tensors, ctx.versions, strict=True)]
    elif any(there and ctx.spent >> k & 1 for k, there in zip(ctx.piece.tangents, present, strict=True)):
        raise RuntimeError(f"Trying to backward through the graph a second time {_FREED}")
    if any(read and t._version != version for (t, version), read in zip(left, reads)):
        raise RuntimeError(_MODIFIED)
    return [t for t, _ in left]


def _spend(ctx: Any, present: tuple[bool, ...], values: list[Any]) -> None:
    """Frees what was saved where no result is left that shares nothing with those that had their backward; before that,
    autograd itself would."""
    piece, spent = ctx.piece, getattr(ctx, "spent", 0)
    for bits in itertools.compress(piece.meetings, present):
        spent |= bits
    if spent != piece.reading or not spent:
        versions = ctx.versions or [t._version for t in values]
        ctx.spent, ctx.left = spent, [*zip(values, versions, strict=True)]
        return
    ctx.left = ctx.others = None
    ctx.maybe_clear_saved_tensors()


_FREED = "(or directly access saved tensors after they have already been freed): specify retain_graph=True the first time"
_MODIFIED = "one of the variables needed for gradient computation has been modified by an inplace operation"


def _laid(t: Tensor, spec: Spec) -> Tensor:
    """A tangent in the layout that backward was compiled for."""
    if t.stride() == spec.stride and not (t.is_conj() or t.is_neg()):
        return t
    return torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=spec.device).copy_(t)


def _again(ctx: Any, piece: Piece, tangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The gradients by autograd through the captured graph, which runs a second time, under the modes of the first."""
    program = piece.program
    if program.writes:
        raise RuntimeError("create_graph=True through a compiled region that writes its inputs: differentiate twice outside of tp.compile")
    create_graph, outside = torch.is_grad_enabled(), ambient.ambient()
    if ctx.others is None:
        raise RuntimeError(f"Trying to backward through the graph a second time {_FREED}")
    inputs: list[Any] = [None] * len(program.grads)
    for k, t in zip(piece.kept, _saved(ctx, tuple([t is not None for t in tangents]), itertools.repeat(True))):
        inputs[k] = t
    for k, (t, version) in zip(piece.rest, ctx.others, strict=True):
        if t._version != version:
            raise RuntimeError(_MODIFIED)
        inputs[k] = t
    now = torch.get_rng_state() if program.random else None
    try:
        if now is not None:
            torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            aliases = [t.view_as(t) if t.requires_grad else t for t in inputs]
        ambient.restore(program.modes)
        leaves = pytree.tree_leaves(program.graph(*aliases), is_leaf=lambda x: x is None)
    finally:
        ambient.restore(outside)
        if now is not None:
            torch.set_rng_state(now)
    roots = of_leaves(leaves, program.taken)
    pairs = [(roots[k], t) for k, t in zip(piece.results, tangents, strict=True) if t is not None]
    wanted = [aliases[k] for k in piece.primals]
    return torch.autograd.grad([r for r, _ in pairs], wanted, [t for _, t in pairs], create_graph=create_graph, allow_unused=True)
