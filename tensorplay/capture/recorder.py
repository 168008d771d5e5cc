"""The recorder: a torch function mode over real tensors that writes down every call as a node.

In: the calls of one run.  Out: the graph, its inputs, the gates, what each node touched.
Always: a tensor is known by identity, and only while it lives; a tensor that is neither recorded nor reachable from
the function is refused, never baked in; the graph holds no tensor.
"""

from __future__ import annotations

import inspect
import keyword
import operator
import re
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from ..key.sources import Attribute, Method, Source
from ..stax.loops.nodes import Spec
from . import ambient
from .gates import Taken, Trait
from .isolate import isolate
from .patches import apply_function, opened
from .reach import Reach, argument_tensors, is_library_file
from .spelling import (
    CONVERSIONS,
    ESCAPES,
    METADATA,
    PLACEHOLDER_METADATA,
    SILENT_READS,
    SILENT_WRITES,
    STATE_SETTERS,
    TAKES_INDICES,
    TAKES_NUMBERS,
    Call,
    Tensor,
    describe,
    early_writes,
    is_setter,
    spell,
)
from .watch import Seen, Watch, storage_key

_KNOWN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_LITERALS = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
     types.EllipsisType)
)  # fmt: skip


class Restart(BaseException):
    """Something was learned that the run should have known from its beginning."""


class Refused(BaseException):
    """The function does something that capture cannot represent. Not an Exception, so that user code lets it pass."""


@dataclass
class Learned:
    """What earlier runs of one capture found out."""

    isolated: set[int] = field(default_factory=set)  # keys of the caller's storages that the function writes
    inlined: set[Any] = field(default_factory=set)  # library functions with a data gate inside


class Recorder(TorchFunctionMode):
    """Records one run. `pending` is what stopped it, for the case that the function swallowed the signal."""

    def __init__(self, fn: Any, args: tuple, kwargs: dict, reach: Reach, learned: Learned) -> None:
        self.reach, self.learned = reach, learned
        self.graph, self.root = fx.Graph(), torch.nn.Module()
        self.inputs: list[Source] = []
        self.samples: list[Tensor] = []
        self.sample_keys: list[int] = []
        self.gates: list[Taken] = []
        self.traits: dict[fx.Node, Trait] = {}
        self.python_valued: set[fx.Node] = set()
        self.rows: list[tuple[Source, Any]] = []
        self.pending: BaseException | None = None
        self.watch = Watch(self._before_write)
        self._known: dict[int, tuple[weakref.ref, fx.Node]] = {}
        self._stand_ins: dict[int, tuple[Tensor, Tensor]] = {}  # id of the caller's tensor -> (it, its copy)
        self._originals: dict[int, Tensor] = {}  # id of a copy -> the caller's tensor
        self._callers: dict[int, str] | None = None  # storage keys of the caller's tensors
        self._names: set[str] = set()
        self._isolated_keys: set[int] = set()
        self._applies: list[Call] = []
        self._constants: dict[int, tuple[Any, str]] = {}
        self._last_input: fx.Node | None = None
        self._last: fx.Node | None = None
        self._opening: Any = None  # the library function whose body runs under the mode
        self._state = ambient.ambient()
        self._inference = torch.is_inference_mode_enabled()
        for name, tensor, source in argument_tensors(args, kwargs, _parameter_names(fn)):
            if id(tensor) not in self._known:
                self._lift(tensor, source, name)

    # ---- refusing ------------------------------------------------------------------------------------------------

    def refuse(self, reason: str) -> None:
        """Stops the run for good, naming the user's line."""
        self._stop(Refused(f"{self.line() or 'capture'}: {reason}"))

    def refuse_at(self, reason: str, fn: Any) -> None:
        code = getattr(fn, "__code__", None) or getattr(getattr(type(fn), "forward", None), "__code__", None)
        where = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else type(fn).__name__
        self._stop(Refused(f"{where}: {reason}"))

    def _stop(self, signal: BaseException) -> None:
        if self.pending is None:
            self.pending = signal
        raise signal

    def line(self) -> str:
        """'file:line' of the innermost frame outside of torch, the standard library and this package."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            filename = frame.f_code.co_filename
            library = _LIBRARY_FILES.get(filename)
            if library is None:
                library = _LIBRARY_FILES[filename] = is_library_file(filename)
            if not library:
                return f"{filename}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    # ---- tensors and nodes ---------------------------------------------------------------------------------------

    def _lift(self, tensor: Tensor, source: Source, name: str) -> fx.Node:
        """A placeholder for a tensor that existed before the call."""
        if type(tensor) not in _KNOWN_TYPES:
            self.refuse(f"{source} is a {type(tensor).__name__}, a tensor subclass that capture does not know")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            self.refuse(f"{source} has layout {tensor.layout}; only strided tensors are captured")
        name = self._fresh(name)
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_after(self._last_input) if self._last_input else self.graph.inserting_before(first):
            node = self.graph.placeholder(name)
        self._last_input = node
        key = storage_key(tensor)
        self.inputs.append(source)
        self.samples.append(tensor)
        self.sample_keys.append(key)
        self.traits[node] = Trait(frozenset((key,)))
        node.meta["spec"], node.meta["line"] = Spec.of(tensor), ""
        self._bind(tensor, node)
        if key in self.learned.isolated:
            self._isolate(key)
            self.traits[node] = Trait(frozenset((key, storage_key(self._stand_ins[id(tensor)][1]))))
        return node

    def _isolate(self, key: int) -> None:
        """Stand-ins for every tensor of the caller that lies in a storage which the function writes."""
        if key in self._isolated_keys:
            return
        self._isolated_keys.add(key)
        group = {id(t): t for t, _ in self.reach.tensors.values() if storage_key(t) == key}
        group.update((id(t), t) for t, k in zip(self.samples, self.sample_keys) if k == key)
        tensors = list(group.values())
        for tensor, copy in zip(tensors, isolate(tensors)):
            self._stand_ins[id(tensor)] = (tensor, copy)
            self._originals[id(copy)] = tensor

    def _fresh(self, name: str) -> str:
        name = re.sub(r"\W+", "_", name).strip("_") or "input"
        if name[0].isdigit() or keyword.iskeyword(name) or name == "self":
            name = f"_{name}"
        unique, k = name, 0
        while unique in self._names:
            k += 1
            unique = f"{name}_{k}"
        self._names.add(unique)
        return unique

    def _bind(self, tensor: Tensor, node: fx.Node) -> None:
        self._known[id(tensor)] = (weakref.ref(tensor), node)

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node whose value a tensor is; a placeholder is made for one that the function can reach."""
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        original = self._originals.get(id(tensor))
        if original is not None:
            return self.node_of(original)
        source = self.reach.source_of(tensor)
        if source is None:
            self._follow_frames()
            source = self.reach.source_of(tensor)
        if source is None:
            kind = "" if type(tensor) is Tensor else f" ({type(tensor).__name__})"
            self.refuse(
                f"uses a tensor{kind} that was neither computed by recorded operators nor is reachable from the function"
            )
        return self._lift(tensor, source, _tail(source))  # type: ignore[arg-type]

    def source_of_input(self, tensor: Tensor) -> Source | None:
        """Where a tensor is read from, if it is an input of the graph."""
        return next((source for t, source in zip(self.samples, self.inputs) if t is tensor), None)

    def _follow_frames(self) -> None:
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            self.reach.add_code(frame.f_code, frame.f_globals)
            frame = frame.f_back

    def _arguments(self, value: Any) -> Any:
        """A call's argument with nodes in place of tensors, as fx can hold and print it."""
        kind = type(value)
        if kind in _LITERALS:
            return value
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, (bool, int, float, str)) and not isinstance(value, numpy.generic):
            for base in (int, float, str):
                if isinstance(value, base):
                    return base.__str__(value) if base is str else base(value)
        if kind is tuple or kind is torch.Size:
            return tuple([self._arguments(v) for v in value])
        if kind is list:
            return [self._arguments(v) for v in value]
        if kind is dict and all(type(k) is str for k in value):
            return {k: self._arguments(v) for k, v in value.items()}
        if kind is slice:
            return slice(self._arguments(value.start), self._arguments(value.stop), self._arguments(value.step))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return tuple([self._arguments(v) for v in value])
        if isinstance(value, numpy.ndarray):
            self.refuse("passes a numpy array to an operator; its content is not in the key")
        if isinstance(value, (list, tuple)):
            return [self._arguments(v) for v in value]
        if isinstance(value, range):
            return list(value)
        return self._constant(value)

    def _constant(self, value: Any) -> fx.Node:
        """A get_attr node for an argument without a literal: a function, a generator, a type."""
        found = self._constants.get(id(value))
        if found is None:
            found = self._constants[id(value)] = (value, f"_constant_{len(self._constants)}")
            setattr(self.root, found[1], value)
        return self.graph.create_node("get_attr", found[1])

    def _substitute(self, value: Any) -> Any:
        """A call's argument with stand-ins in place of the tensors that must not be written."""
        if isinstance(value, Tensor):
            found = self._stand_ins.get(id(value))
            return value if found is None else found[1]
        if type(value) in (list, tuple):
            return type(value)([self._substitute(v) for v in value])
        if type(value) is dict:
            return {k: self._substitute(v) for k, v in value.items()}
        return value

    def _original(self, value: Any) -> Any:
        """A result in which the caller's own tensors stand again for their stand-ins."""
        if isinstance(value, Tensor):
            return self._originals.get(id(value), value)
        if type(value) in (list, tuple) and any(isinstance(v, Tensor) and id(v) in self._originals for v in value):
            return type(value)([self._original(v) for v in value])
        return value

    # ---- writes --------------------------------------------------------------------------------------------------

    def _before_write(self, *tensors: Tensor) -> None:
        """Called before an operator writes these tensors: the caller's storages are never written."""
        if self._callers is None:
            self._callers = {storage_key(t): str(source) for t, source in self.reach.tensors.values()}
            self._callers.pop(0, None)
        found = False
        for tensor in tensors:
            key = storage_key(tensor)
            if key in self._callers or key in self.sample_keys:
                if key in self.learned.isolated or key == 0:
                    self.refuse(f"writes {self._callers.get(key, 'an argument')} where capture cannot stand in for it")
                self.learned.isolated.add(key)
                found = True
        if found:
            self._stop(Restart())

    # ---- the mode ------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.pending is not None:
            raise self.pending
        if func in METADATA:
            if self._stand_ins:
                args = self._substitute(args)
            return func(*args, **kwargs)
        if func in STATE_SETTERS:
            return func(*args, **kwargs)
        reason = ESCAPES.get(func)
        if reason is not None:
            self.refuse(f"{describe(func)} {reason}")
        if func in PLACEHOLDER_METADATA:
            return self._placeholder_metadata(func, args)
        if func is Tensor.__deepcopy__:
            return self._deepcopy(args[0])
        if func in self.learned.inlined and func is not self._opening:
            return self._inline(func, args, kwargs)
        if func is self._opening:
            return self._body(func, args, kwargs)
        kind = CONVERSIONS.get(func)
        if kind is not None:
            return self._convert(kind, func, args, kwargs)
        return self.record(func, args, kwargs)

    def record(self, func: Any, args: tuple, kwargs: dict, run: Callable | None = None) -> Any:
        """Runs one call and appends its node."""
        if torch._C._functorch.maybe_current_level() is not None:
            self.refuse("uses a torch.func transform, which capture does not represent yet")
        self._switches()
        node_args, node_kwargs = self._arguments(tuple(args)), self._arguments(dict(kwargs))
        early = [t for t in early_writes(func, args, kwargs) if id(t) not in self._stand_ins]
        if early:
            self._before_write(*early)
        setter = is_setter(func) or func in SILENT_WRITES
        if setter and args and isinstance(args[0], Tensor) and id(args[0]) not in self._stand_ins:
            self._before_write(args[0])
        if func in SILENT_READS:
            self._silent_read(func, args, kwargs)
        if self._stand_ins:
            args, kwargs = self._substitute(tuple(args)), self._substitute(dict(kwargs))
        seen, outer = Seen(), self.watch.seen
        self.watch.seen = seen
        try:
            result = (run or func)(*args, **kwargs)
        finally:
            self.watch.seen = outer
        if self.pending is not None:
            raise self.pending
        if result is NotImplemented:
            return result
        if setter:
            seen.written.add(storage_key(args[0]))
        baked = self._hidden_reads(func, seen)
        if baked and func in TAKES_NUMBERS:
            node_args, node_kwargs = _bake(node_args, baked), _bake(node_kwargs, baked)
        elif baked and func in TAKES_INDICES:
            node_args = (node_args[0], _bake(node_args[1], baked), *node_args[2:])
        if self._originals:
            result = self._original(result)
        return self._append(func, node_args, node_kwargs, args, result, seen)

    def _append(self, func: Any, node_args: tuple, node_kwargs: dict, args: tuple, result: Any, seen: Seen) -> Any:
        holds_tensor = _holds_tensor(result)
        takes_tensor = any(isinstance(a, fx.Node) for a in _leaves((node_args, node_kwargs)))
        if not holds_tensor and not takes_tensor and not seen.written and not seen.random:
            return result
        line = self.line()
        opcode, target, spelled, named = spell(func, node_args, node_kwargs)
        node = self.graph.create_node(opcode, target, spelled, named)
        node.meta["line"], node.meta["spec"] = line, _spec(result)
        if seen.opaque:
            node.meta["opaque"] = True
        self._last = node
        touches = set(seen.written)
        for tensor in _tensors(result):
            if type(tensor) not in _KNOWN_TYPES:
                self.refuse(f"{describe(func)} returns a {type(tensor).__name__}")
            touches.add(storage_key(tensor))
        for tensor in _tensors(args):
            touches.add(storage_key(tensor))
        self.traits[node] = Trait(frozenset(touches), frozenset(seen.written), seen.random)
        if holds_tensor:
            self._bind_result(result, node, line)
            if seen.dynamic or seen.read:
                self._shape_gates(result, line)
        elif result is not None and takes_tensor:
            if not _is_plain(result):
                self.refuse(f"{describe(func)} returns a {type(result).__name__}")
            self.python_valued.add(node)
            self.gates.append(Taken(getattr(func, "__name__", "value"), node, result, line, node))
        return result

    def _bind_result(self, result: Any, node: fx.Node, line: str) -> None:
        stack = [(result, node)]
        while stack:
            value, owner = stack.pop()
            if isinstance(value, Tensor):
                self._bind(value, owner)
                continue
            for k, item in enumerate(value):
                if _holds_tensor(item):
                    part = self.graph.call_function(operator.getitem, (owner, k))
                    part.meta["line"], part.meta["spec"] = line, _spec(item)
                    self.traits[part] = Trait(frozenset(storage_key(t) for t in _tensors(item)))
                    self._last = part
                    stack.append((item, part))

    def _switches(self) -> None:
        """Nodes for the modes that were switched since the last record."""
        now = ambient.ambient()
        if now != self._state:
            for call, args in ambient.changes(self._state, now):
                self._last = self.graph.call_function(call, args)
                self._last.meta["line"], self._last.meta["spec"] = self.line(), None
            self._state = now
        if torch.is_inference_mode_enabled() != self._inference:
            self.refuse("switches inference mode")

    def finish(self, outputs: Sequence[Any], before: tuple) -> None:
        """The output node; modes as they were at the beginning."""
        if self.watch.stray.random:
            self.refuse("draws random numbers where capture cannot see it")
        for call, args in ambient.changes(self._state, before):
            node = self.graph.call_function(call, args)
            node.meta["line"], node.meta["spec"] = "", None
        output = self.graph.output(tuple(outputs))
        output.meta["line"] = ""
        output.meta["spec"] = tuple(n.meta.get("spec") if isinstance(n, fx.Node) else n for n in outputs)

    def close(self) -> None:
        """Forgets every tensor of the run."""
        self._known.clear()
        self._stand_ins.clear()
        self._originals.clear()
        self.reach.tensors.clear()

    # ---- gates ---------------------------------------------------------------------------------------------------

    def _gate(self, kind: str, tensor: Tensor, value: Any) -> None:
        self.gates.append(Taken(kind, self.node_of(tensor), value, self.line(), self._last))

    def _convert(self, kind: str, func: Any, args: tuple, kwargs: dict) -> Any:
        tensor = args[0]
        node = self.node_of(tensor)
        value = func(*self._substitute(args), **kwargs)
        self.gates.append(Taken(kind, node, value, self.line(), self._last))
        return value

    def _shape_gates(self, result: Any, line: str) -> None:
        for tensor in _tensors(result):
            self.gates.append(Taken("shape", self.node_of(tensor), tuple(tensor.shape), line, self._last))

    def _silent_read(self, func: Any, args: tuple, kwargs: dict) -> None:
        position = SILENT_READS[func]
        tensor = args[position] if len(args) > position else kwargs.get("tensor_indices_or_sections")
        if isinstance(tensor, Tensor):
            self._gate("tolist", tensor, self._substitute(tensor).tolist())

    def _hidden_reads(self, func: Any, seen: Seen) -> dict[fx.Node, Any]:
        """Gates for data that the call read on its own; a library function with one inside is entered next time."""
        baked: dict[fx.Node, Any] = {}
        for tensor in seen.read:
            original = self._originals.get(id(tensor), tensor)
            known = self._known.get(id(original))
            if known is not None and known[0]() is original:
                baked[known[1]] = tensor.item()
                self._gate("item", original, baked[known[1]])
            elif self._can_open(func):
                self.learned.inlined.add(func)
                self._stop(Restart())
            else:
                seen.opaque = True
        if (seen.hidden or seen.dynamic) and self._can_open(func):
            self.learned.inlined.add(func)
            self._stop(Restart())
        return baked

    def _can_open(self, func: Any) -> bool:
        return isinstance(func, types.FunctionType) and func not in self.learned.inlined

    def _inline(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Calls a library function under the mode; the first thing it does is to announce itself again."""
        outer, self._opening = self._opening, func
        try:
            with self:
                return func(*args, **kwargs)
        finally:
            self._opening = outer

    def _body(self, func: Any, args: tuple, kwargs: dict) -> Any:
        self._opening = None
        with opened(func), self:
            return func(*args, **kwargs)

    # ---- special calls -------------------------------------------------------------------------------------------

    def _placeholder_metadata(self, func: Any, args: tuple) -> Any:
        name = PLACEHOLDER_METADATA[func]
        node = self.node_of(args[0])
        value = func(*self._substitute(args))
        if node.op == "placeholder":
            source = self.inputs[[n for n in self.graph.nodes if n.op == "placeholder"].index(node)]
            self.rows.append((Attribute(source, name) if name == "is_leaf" else Method(source, name), value))
        return value

    def _deepcopy(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            self.refuse("deep-copies a tensor that requires gradients")
        return self.record(Tensor.clone, (tensor,), {})

    def on_apply(self, cls: type, args: tuple, kwargs: dict) -> Any:
        """Stands in for torch.autograd.Function.apply: the function stays one node, with its own backward."""
        if self.watch.seen is not None or not torch.overrides._is_torch_function_mode_enabled():
            return apply_function(cls, args, kwargs)
        target = next((t for t in self._applies if t.func.__self__ is cls), None)
        if target is None:
            target = Call(cls.apply, f"apply_{cls.__name__}", cls.__module__)
            self._applies.append(target)
        with torch._C.DisableTorchFunction():
            return self.record(target, args, kwargs, run=lambda *a, **k: apply_function(cls, a, k))

_LIBRARY_FILES: dict[str, bool] = {}


def _parameter_names(fn: Any) -> list[str]:
    """The names of the positional parameters, as far as they have any."""
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _tail(source: Source) -> str:
    """A name for a lifted tensor: the end of its path."""
    words = re.findall(r"\w+", re.sub(r"\(closure.*", "", str(source)))
    words = [w for w in words if w not in ("globals", "of")]
    return "_".join(words[-4:]) or "lifted"


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a call's arguments or result, in containers two deep and more."""
    found: list[Tensor] = []
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
    return found


def _leaves(value: Any) -> list[Any]:
    found, stack = [], [value]
    while stack:
        item = stack.pop()
        if isinstance(item, (list, tuple)):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, slice):
            stack.extend((item.start, item.stop, item.step))
        else:
            found.append(item)
    return found


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    return isinstance(value, (list, tuple)) and any(_holds_tensor(v) for v in value)


def _bake(value: Any, numbers: dict[fx.Node, Any]) -> Any:
    """The argument with numbers in place of the nodes that were read as numbers."""
    if isinstance(value, fx.Node):
        return numbers.get(value, value)
    if isinstance(value, (list, tuple)):
        return type(value)([_bake(v, numbers) for v in value])
    if isinstance(value, dict):
        return {k: _bake(v, numbers) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(_bake(value.start, numbers), _bake(value.stop, numbers), _bake(value.step, numbers))
    return value


def _spec(value: Any) -> Any:
    """Metadata that outlives the value."""
    if isinstance(value, Tensor):
        return Spec.of(value) if value.layout is torch.strided and not value.is_nested else None
    if isinstance(value, (list, tuple)) and _holds_tensor(value):
        return tuple(_spec(v) if _holds_tensor(v) else None for v in value)
    return None


def _is_plain(value: Any) -> bool:
    """Whether a result is made of Python scalars only, and so can be a gate."""
    return all(type(v) in _LITERALS for v in _leaves(value))
