"""The operator-level retrace: one run of the captured graph, seen at the dispatcher (sections 4.8, 4.9, 5.1).

In: a captured graph whose placeholders are tensors, and the tensors to run it on.
Out: an `OpGraph`: functional, decomposed down to the base.
Always: the caller's tensors, their version counters and the generators are as before; no autograd graph is built;
no sample value outlives the run.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...errors import TensorPlayError, UnsupportedError
from ...source import Sourced
from ..loops.nodes import Spec
from .functional import functionalize
from .functions import FUNCTIONS
from .numbers import Numbers, compare, gather, has_numbers
from .opgraph import OpGraph, runnable
from .recorder import Recorder, WritesCaller, _storage

SMALL = 1 << 16  # bytes; storages up to this size are cloned together, to keep the number of runs at three


def retrace(graph: fx.GraphModule, samples: Sequence[Tensor]) -> OpGraph:
    """The operators that the graph calls."""
    return attempts(Run, _with_all_digits(graph), samples)


def _with_all_digits(module: fx.GraphModule) -> fx.GraphModule:
    """`exp(x) - 1` that a pass wrote, and marked as precise, is computed as `expm1(x)`; what the user wrote stays."""
    if not any(node.meta.get("precise") for node in module.graph.nodes):
        return module
    graph = _copied(module.graph)
    for node in graph.nodes:
        exp = node.args[0] if node.meta.get("precise") and node.target is operator.sub and node.args[1] == 1 else None
        if isinstance(exp, fx.Node) and exp.target in ("exp", torch.exp) and len(exp.args) == 1 and not exp.kwargs:
            node.target, node.args = torch.expm1, exp.args
    return Sourced(module, graph)


def attempts(run: type[Run], graph: fx.GraphModule, samples: Sequence[Tensor]) -> Any:
    """What `run` records; where numbers are read from tensors, two runs tell whether every use of them is known."""
    if not has_numbers(graph):
        return _settled(run, graph, samples, None)
    found, again = (_settled(run, graph, samples, trial) for trial in (0, 1))
    if found is not None:
        compare(*(getattr(x, "ops", x) for x in (found, again)))  # of a joint graph, its operators
    return found


def _settled(run: type[Run], graph: fx.GraphModule, samples: Sequence[Tensor], trial: int | None) -> Any:
    """Runs until no storage of the caller is about to be written: the first run writes none, a later one clones."""
    storages = _group(samples)
    cloned: set[int] = set()
    while True:
        try:
            return run(graph, samples, storages, cloned, trial).result()
        except WritesCaller as found:
            small = {s for s, at in storages.items() if samples[at[0]].untyped_storage().nbytes() <= SMALL}
            cloned = {found.storage, *small} if not cloned else set(storages)
            _check_apart([samples[i] for i in storages[found.storage]])


def _group(samples: Sequence[Tensor]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for i, s in enumerate(samples):
        if type(s) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise UnsupportedError(f"an input of type {type(s).__name__}")
        if s.layout is not torch.strided or s.is_quantized:
            raise UnsupportedError(f"an input of layout {s.layout}")
        if s.is_neg():
            raise UnsupportedError("an input that shows the negative of its memory")
        groups.setdefault(_storage(s), []).append(i)
    return groups


def _check_apart(samples: list[Tensor]) -> None:
    """A written input may share its storage with others only where their memory does not overlap."""
    end = -1
    for s in sorted((s for s in samples if s.numel()), key=lambda s: s.storage_offset() * s.element_size()):
        if s.storage_offset() * s.element_size() < end:
            raise UnsupportedError("a write to an input that shares memory with another input")
        last: Any = s.storage_offset() + sum((n - 1) * st for n, st in zip(s.shape, s.stride(), strict=True))
        end = (last + 1) * s.element_size()


class Run:
    """One run under a recorder."""

    recorder_type = Recorder

    def __init__(
        self, graph: fx.GraphModule, samples: Sequence[Tensor], storages: dict[int, list[int]], cloned: set[int], trial: int | None
    ) -> None:
        self.module = graph
        self.samples = samples
        foreign = {s: "caller" for s in storages if s not in cloned}
        self.recorder = self.recorder_type(foreign)
        self.inputs = self.copies(storages, cloned)
        if trial is not None:
            self.recorder.numbers = Numbers(self.recorder, trial)

    def copies(self, storages: dict[int, list[int]], cloned: set[int]) -> list[Tensor]:
        """The tensors to run on: aliases of the samples, those in cloned storages moved to a copy of the storage."""
        inputs = [s.detach() for s in self.samples]
        for storage, positions in storages.items():
            if storage in cloned:
                copy = self.samples[positions[0]].untyped_storage().clone()
                for i in positions:
                    s = self.samples[i]
                    t = torch.empty(0, dtype=s.dtype, device=s.device)
                    inputs[i] = t.set_(copy, s.storage_offset(), s.shape, s.stride())
        return inputs

    def result(self) -> OpGraph:
        recorder = self.recorder
        undoing = generators({t.device for t in self.inputs})
        with modes_kept(), torch.inference_mode(False), torch.no_grad():
            self.bind_inputs()
            try:
                leaves = self.execute()
                recorder.graph.output(tuple([recorder.load(x) for x in leaves]))
            finally:
                for undo in undoing:
                    undo()
        escapes = any(isinstance(x, Tensor) and _storage(x) in recorder.lifted for x in leaves)
        recorded = None
        if recorder.written or escapes:
            recorded = _copied(recorder.graph)
            functionalize(recorder.graph)
        sweep(recorder.graph)
        gather(recorder.graph)
        return OpGraph(runnable(recorder.constants, recorder.graph), recorded=recorded)

    def bind_inputs(self) -> None:
        for i, (t, sample) in enumerate(zip(self.inputs, self.samples, strict=True)):
            node = self.recorder.graph.placeholder(f"primals_{i + 1}")
            node.meta.update(spec=Spec.of(t), line="", ordered=False)
            self.recorder.bind(t, node)
            self.recorder.originals[id(sample)] = node

    def execute(self) -> list[Any]:
        """Runs the captured graph node by node under the recorder; the flat outputs."""
        values: dict[fx.Node, Any] = {}
        dying = _last_uses(self.module.graph)
        inputs = iter(self.inputs)
        self.inputs = []
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(inputs)
                continue
            if node.op == "output":
                return pytree.tree_leaves(fx.map_arg(node.args[0], values.__getitem__), is_leaf=lambda x: x is None)
            self.recorder.line = node.meta.get("line", "")
            values[node] = self.number(node, values) if "number" in node.meta else self.call(node, values)
            for dead in dying.get(node, ()):
                del values[dead]
        raise AssertionError("a graph without output")

    def number(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        args = fx.map_arg(tuple(node.args), values.__getitem__)
        numbers: Any = self.recorder.numbers
        return numbers.read(args[0], node.meta["number"]) if node.op == "call_method" else numbers.operate(node.target, args, node.meta["number"])

    def call(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), values.__getitem__)
        target: Any = node.target
        if node.op == "get_attr":
            found: Any = self.module
            for name in target.split("."):
                found = getattr(found, name)
            if isinstance(found, Tensor):
                self.recorder.known.add(id(found))
            return found
        if node.op == "call_method":
            target, args = getattr(type(args[0]), target), args
        elif node.op == "call_module":
            target = self.module.get_submodule(target)
            self.recorder.known.update(id(t) for t in (*target.parameters(), *target.buffers()))
        _check_reads(getattr(target, "__name__", ""), args)
        try:
            with self.recorder:
                found = FUNCTIONS[target](*args, **kwargs) if target in FUNCTIONS else NotImplemented
                return target(*args, **kwargs) if found is NotImplemented else found
        except (TensorPlayError, WritesCaller):
            raise
        except Exception as error:
            if "leaf Variable that requires grad" in str(error):  # the caller's tensor is none, but its stand-in is
                raise UnsupportedError("a write to an input that requires grad") from error
            name = getattr(node.target, "__name__", node.target)
            raise UnsupportedError(f"{name} failed while its operators were recorded: {error}") from error


def _check_reads(name: str, args: tuple[Any, ...]) -> None:
    """Functions that read values of tensors, or exchange their memory, where the dispatcher does not see it."""
    into = name in ("tensor", "as_tensor", "asarray", "new_tensor", "Tensor") or name.endswith("Tensor")
    if name in ("tolist", "numpy", "__array__", "data_ptr") or (into and _lists_tensors(args)):
        raise UnsupportedError(f"{name} reads a value of a tensor")
    if name == "setattr":
        raise UnsupportedError(f"assigns Tensor.{args[1]}, which changes a tensor without an operator")


def _lists_tensors(args: tuple[Any, ...]) -> bool:
    return any(isinstance(x, Tensor) for a in args if isinstance(a, (list, tuple)) for x in pytree.tree_leaves(a))


def generators(devices: set[torch.device]) -> list[Callable[[], None]]:
    """What puts the default generators back to where they are now."""
    state = torch.get_rng_state()
    undo: list[Callable[[], None]] = [functools.partial(torch.set_rng_state, state)]
    for device in devices:
        if device.type == "cuda":
            undo.append(functools.partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device))
    return undo


@contextlib.contextmanager
def modes_kept() -> Iterator[None]:
    """Default dtype and autocast, which nodes of the captured graph may switch, are afterwards as before."""
    dtype = torch.get_default_dtype()
    casts = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    try:
        yield
    finally:
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        for device, enabled, low in casts:
            if (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) != (enabled, low):
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, low)
                torch.clear_autocast_cache()


@contextlib.contextmanager
def grad_mode_kept() -> Iterator[None]:
    """Outside of inference mode, in the caller's grad mode, which leaving inference mode would turn on."""
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


def _copied(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = new.node_copy(node, copies.__getitem__)
    return new


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node those whose values nobody reads after it."""
    seen: set[fx.Node] = set()
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for used in (node, *node.all_input_nodes):
            if used not in seen:
                seen.add(used)
                dying.setdefault(node, []).append(used)
    return dying


def sweep(graph: fx.Graph) -> None:
    """Erases what no output needs (section 4.6): placeholders, ordered nodes and writes to inputs stay."""
    for node in reversed(graph.nodes):
        keep = node.users or node.op in ("placeholder", "output") or node.meta["ordered"]
        if not keep and node.target is not torch.ops.aten.copy_.default:
            graph.erase_node(node)
