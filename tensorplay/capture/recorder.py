"""The recorder: a torch function mode over real tensors that writes down every call as a node.

In: the calls of one run.  Out: the graph, its inputs, the gates, what each node touched.
Always: a node stands for one announced call and gives its result again; a call that reads data on its own is a gate,
or is entered, or is marked opaque; what a graph cannot repeat is refused with the user's line.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from ..collectives import name_of
from ..key.sources import Attribute, Method, Source
from . import ambient, gradients, history
from .exchange import C10D, exchange, exchange_in_place
from .gates import Taken, Trait
from .isolate import isolate
from .numbers import numbers_in, settle, stay
from .patches import apply_function, opened
from .reach import Reach, argument_tensors
from .reads import FACTORS, Reads, unwrapped
from .spelling import (
    CONVERSIONS,
    ESCAPES,
    HOST_RESULTS,
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
from .trees import bake, holds_tensor, is_plain, leaves, spec, tensors
from .values import KNOWN_TYPES, Learned, Written
from .watch import Seen, Watch, storage_key


class Recorder(Reads, TorchFunctionMode):
    """Records one run."""

    def __init__(self, fn: Any, args: tuple, kwargs: dict, reach: Reach, learned: Learned) -> None:
        super().__init__(reach, learned)
        self.python_valued: set[fx.Node] = set()
        self.rows: list[tuple[Source, Any]] = []
        self.watch = Watch(self._before_write, lambda op, args: exchange_in_place(self, op, args))
        self._applies: list[Call] = []
        self.execution: Any = None
        self._opening: Any = None  # the library function whose body runs under the mode
        self._state = ambient.ambient()
        self._inference = torch.is_inference_mode_enabled()
        self._hooks = _saved_tensor_hooks()
        self.grads: dict[int, tuple[Tensor, Tensor | None]] = {}  # tensors whose `grad` the function set, and to what
        self._lies: set[int] = set()  # storages in which values of the run lie
        self._historic: set[int] = set()  # storages that autograd may have kept for a backward
        self._histories: dict[Any, Any] = {}  # what stands for autograd nodes that the function has seen
        self.spent: set[Any] = set()  # autograd nodes whose saved tensors a backward has freed
        for name, tensor, source in argument_tensors(args, kwargs, _parameter_names(fn)):
            if id(tensor) not in self._known:
                self._lift(tensor, source, name)

    # ---- the mode ------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.pending is not None:
            raise self.pending
        if self.number_owner and (numbers := numbers_in((args, kwargs))) and not self._enters(func):
            aside = self._levels or self.watch.alone is not None
            if aside or not stay(func, args, kwargs, numbers) or self._by_value(numbers):
                args, kwargs = settle(args), settle(kwargs)
        if func in METADATA:
            if self._stand_ins:
                args = self._substitute(args)
            return func(*args, **kwargs)
        if func in STATE_SETTERS:
            return func(*args, **kwargs)
        reason = ESCAPES.get(func)
        if func == _GRAD_FN:
            return self._history(args[0])
        if reason is not None:
            self.refuse(f"{describe(func)} {reason}")
        if func in PLACEHOLDER_METADATA:
            return self._placeholder_metadata(func, args)
        if func == _GRAD:
            return self.gradient(args[0])
        if func in _SET_GRAD:
            return gradients.write(self, args[0], args[1] if len(args) > 1 else None)
        if func in _BACKWARD:
            return gradients.backward(self, *args, **{_BACKWARD[func].get(k, k): v for k, v in kwargs.items()})
        if func is torch.autograd.grad:
            gradients.unhooked(self, args[1] if len(args) > 1 else kwargs.get("inputs", ()))
        if func is Tensor.__deepcopy__:
            return self._deepcopy(args[0])
        if self._enters(func) and func is not self._opening:
            return self._inline(func, args, kwargs)
        if func is self._opening:
            return self._body(func, args, kwargs)
        if name_of(func):
            return exchange(self, func, args, kwargs)
        kind = CONVERSIONS.get(func)
        if kind is not None:
            return self._convert(kind, func, args, kwargs)
        if self._levels or (self.watch.alone is not None and any(map(_wrapped, tensors((args, kwargs))))):
            return func(*args, **kwargs)  # its operators are recorded one by one
        return self.record(func, args, kwargs)

    def _enters(self, func: Any) -> bool:
        """Whether the body of a library function runs under the mode."""
        return func is self._opening or (
            self._levels == 0 and (func in self.learned.inlined or getattr(func, "__module__", "") == C10D)
        )

    def record(self, func: Any, args: tuple, kwargs: dict, run: Callable | None = None) -> Any:
        """Runs one call and appends its node; `run` is the code of the program that stands behind it."""
        if torch._C._functorch.maybe_current_level() is not None:
            self.refuse("uses a functorch level that torch.func did not open")
        self._switches()
        node_args, node_kwargs = self._arguments(tuple(args)), self._arguments(dict(kwargs))
        early = [t for t in early_writes(func, args, kwargs) if id(t) not in self._stand_ins]
        setter = is_setter(func) or func in SILENT_WRITES
        if setter and args and isinstance(args[0], Tensor) and id(args[0]) not in self._stand_ins:
            early.append(args[0])
        if early:
            try:
                self._before_write(*early)
            except Written as written:
                self._swap(written.keys)
        if func in SILENT_READS:
            self._silent_read(func, args, kwargs)
        if self.number_owner:
            func, args, kwargs, node_args, node_kwargs = self._numeric(func, args, kwargs, node_args, node_kwargs)
        try:
            args, kwargs, result, seen = self._run(run or func, args, kwargs, None if run is None else self._reads)
        except Written as written:  # nothing is written yet: once more, on copies
            self._swap(written.keys)
            args, kwargs, result, seen = self._run(run or func, args, kwargs, None if run is None else self._reads)
        if self.pending is not None:
            raise self.pending
        if result is NotImplemented:
            return result
        if setter:
            seen.written.add(storage_key(args[0]))
        baked = self._hidden_reads(func, seen, args, node_kwargs)
        if baked:
            node_kwargs |= {k: bake(node_kwargs[k], baked) for k in FACTORS & node_kwargs.keys()}
        if baked and func in TAKES_NUMBERS:
            node_args, node_kwargs = bake(node_args, baked), bake(node_kwargs, baked)
        elif baked and func in TAKES_INDICES:
            node_args = (node_args[0], bake(node_args[1], baked), *node_args[2:])
        if self._originals:
            result = self._original(result)
        return self._append(func, node_args, node_kwargs, (*args, kwargs), result, seen)

    def _run(self, func: Any, args: tuple, kwargs: dict, reads: Any) -> tuple[tuple, dict, Any, Seen]:
        if self._stand_ins:
            args, kwargs = self._substitute(tuple(args)), self._substitute(dict(kwargs))
        seen, outer = Seen(reads=reads), self.watch.seen
        self.watch.seen = seen
        try:
            return args, kwargs, func(*args, **kwargs), seen
        finally:
            self.watch.seen = outer

    def _untouched(self, keys: set[int]) -> bool:
        seen = self.watch.seen
        begun = seen is not None and (seen.reads is not None or seen.written or seen.random or seen.read or seen.hidden)
        return not (begun or self._levels or self.watch.alone is not None or keys & (self._lies | self._historic))

    def _reads(self, tensor: Tensor) -> None:
        """A tensor of the caller that a function which stays one node reads itself is an input, too."""
        if id(tensor) not in self._known and self.reach.source_of(tensor) is not None:
            self.node_of(tensor)

    def _stand_ins_for(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        with self._aside():
            return isolate(tensors)

    def on_level(self, change: int) -> None:
        """Within a torch.func transform values are wrapped, so the operators beneath all levels are recorded instead."""
        self._levels += change
        self.watch.alone = self._record_operator  # from now on: torch.func.vjp returns a function to be called later

    def _record_operator(self, op: Any, args: tuple, kwargs: dict, seen: Seen) -> Any:
        self._switches()
        for tensor in (*tensors(args), *tensors(kwargs)):
            if id(tensor) in self._stand_ins:
                self.refuse("transforms a value that the function writes")
        node_args, node_kwargs = self._arguments(tuple(args)), self._arguments(dict(kwargs))
        result = op(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return self._append(op, node_args, node_kwargs, args, result, seen)

    def on_parameter(self, made: Tensor, data: Tensor, requires_grad: bool) -> None:
        """A parameter made during the call is the value of a node, too."""
        self._switches()
        known = self._known.get(id(data))
        if known is not None and known[0]() is data:
            with torch._C.DisableTorchFunction():
                self._append(torch.nn.Parameter, (known[1], bool(requires_grad)), {}, (data,), made, Seen())

    def _append(self, func: Any, node_args: tuple, node_kwargs: dict, args: tuple, result: Any, seen: Seen) -> Any:
        gives_tensor = holds_tensor(result)
        takes_tensor = any(isinstance(a, fx.Node) for a in leaves((node_args, node_kwargs)))
        if not gives_tensor and not takes_tensor and not seen.written and not seen.random:
            return result
        line = self.line()
        opcode, target, spelled, named = spell(func, node_args, node_kwargs)
        node = self.graph.create_node(opcode, target, spelled, named)
        node.meta["line"], node.meta["spec"] = line, spec(result)
        if seen.opaque:
            node.meta["opaque"] = True
        if _checkpointed():
            node.meta["checkpoint"] = True
        self._last = node
        lies = set()
        for tensor in tensors(result):
            if type(tensor) not in KNOWN_TYPES:
                self.refuse(f"{describe(func)} returns a {type(tensor).__name__}")
            lies.add(storage_key(tensor))
        self._lies |= lies
        touches = lies | seen.written
        for tensor in tensors(args):
            touches.add(storage_key(tensor))
        if any(tensor.requires_grad for tensor in tensors(result)):
            self._historic |= touches
        self.traits[node] = Trait(frozenset(touches), frozenset(seen.written), seen.random, frozenset(lies))
        if gives_tensor:
            self._bind_result(result, node, line)
            for k in HOST_RESULTS.get(func, ()):
                self._bind_constant(result[k], line)
            if seen.dynamic or seen.read:
                self._shape_gates(result, line)
        elif result is not None and takes_tensor:
            if not is_plain(result):
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
                if holds_tensor(item):
                    part = self.graph.call_function(operator.getitem, (owner, k))
                    part.meta["line"], part.meta["spec"] = line, spec(item)
                    lies = frozenset(storage_key(t) for t in tensors(item))
                    self.traits[part] = Trait(lies, lies=lies)
                    self._last = part
                    stack.append((item, part))

    def _bind_constant(self, tensor: Tensor, line: str) -> None:
        """A node that makes a tensor whose value follows from gates."""
        with self._aside():
            node = self.graph.call_function(torch.tensor, (tensor.tolist(),), {"dtype": tensor.dtype})
        node.meta["line"], node.meta["spec"] = line, spec(tensor)
        self.traits[node] = Trait(lies=frozenset((storage_key(tensor),)))
        self._last = node
        self._bind(tensor, node)

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
        if now[0] and _saved_tensor_hooks() != self._hooks:
            self.refuse("sets hooks on the tensors that autograd saves")

    def finish(self, outputs: Sequence[Any], before: tuple) -> None:
        """The output node; modes as they were at the beginning."""
        if self.watch.stray.random:
            self.refuse("draws random numbers where capture cannot see it")
        if ambient.ambient() != before:
            self.refuse("leaves a mode of torch otherwise than it found it")
        self._apart()
        for call, args in ambient.changes(self._state, before):
            node = self.graph.call_function(call, args)
            node.meta["line"], node.meta["spec"] = "", None
        for node, trait in self.traits.items():  # for rewrites, which must know what shares memory
            node.meta["trait"] = trait
        output = self.graph.output(tuple(outputs))
        output.meta["line"] = ""
        output.meta["spec"] = tuple(n.meta.get("spec") if isinstance(n, fx.Node) else n for n in outputs)

    def _apart(self) -> None:
        """A write by which an input requires grad shows in every view of its base, of which the graph knows nothing."""
        for tensor, copy in self._stand_ins.values():
            source = self.source_of_input(tensor)
            if source is not None and copy.requires_grad and not tensor.requires_grad:
                if tensor._is_view() or self.sample_keys.count(storage_key(tensor)) > 1:
                    self.refuse("makes a tensor require grad that shares its memory with others")
                self.rows.append((Method(source, "_is_view"), False))

    def close(self) -> None:
        """Forgets every tensor of the run."""
        self.number_owner.clear()
        self._known.clear()
        self._stand_ins.clear()
        self._originals.clear()
        self._groups.clear()
        self.grads.clear()
        self.spent.clear()
        self._histories.clear()
        self.reach.tensors.clear()
        vars(self.execution).clear()  # it and the watch hold methods of this recorder: no cycle keeps the caller's
        del self.watch, self.execution  # objects alive

    # ---- library functions that are entered --------------------------------------------------------------------------

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
        with opened(inspect.unwrap(func)), self:
            return func(*args, **kwargs)

    def detached(self, tensor: Tensor) -> fx.Node:
        """A node for a value without its history."""
        node = self.node_of(tensor)
        made = self.graph.call_method("detach", (node,))
        made.meta["line"], made.meta["spec"] = node.meta["line"], node.meta["spec"]
        self.traits[made] = Trait(self.traits[node].touches, lies=self.traits[node].lies)
        return made

    # ---- special calls -------------------------------------------------------------------------------------------

    def _placeholder_metadata(self, func: Any, args: tuple) -> Any:
        name = PLACEHOLDER_METADATA[func]
        self.node_of(args[0])
        source = self.source_of_input(args[0])
        if source is not None:
            with torch._C.DisableTorchFunction():
                found = func(*args)  # of the caller's tensor, not of its stand-in
            self.rows.append((Attribute(source, name) if name == "is_leaf" else Method(source, name), found))
        return func(*self._substitute(args))

    def gradient(self, tensor: Tensor) -> Tensor | None:
        """The `grad` of an input is an input too, or its absence a part of the key."""
        found = gradients.read(self, tensor)
        if found is not NotImplemented:
            return found
        node, owner = self.node_of(tensor), self.source_of_input(tensor)
        if owner is None:
            return self.record(_GRAD, (tensor,), {})
        source = Attribute(owner, "grad")
        with torch._C.DisableTorchFunction():
            value = tensor.grad
        if value is None:
            self.rows.append((source, None))
        elif id(value) not in self._known:
            self._lift(value, source, f"{node.name}_grad")
        return value

    def _history(self, tensor: Tensor) -> Any:
        """The `grad_fn`: of an input only where it is a leaf, which is in the key then; else known by its identity."""
        with torch._C.DisableTorchFunction():
            found = self._substitute(tensor).grad_fn
        if found is None:
            self._placeholder_metadata(_IS_LEAF, (tensor,))
            return None

        def refuse() -> None:
            self.refuse(f"{describe(_GRAD_FN)} {ESCAPES[_GRAD_FN]}")

        if self.source_of_input(tensor) is not None:
            refuse()
        if found not in self._histories:
            self._histories[found] = history.node_of(refuse)
        return self._histories[found]

    def _deepcopy(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            self.refuse("deep-copies a tensor that requires gradients")
        return self.record(Tensor.clone, (tensor,), {})

    def opaque(self, fn: Any, args: tuple, kwargs: dict, reason: str = "") -> Any:
        """A function that its author wants to be one node, for a reason that the node carries."""
        target = next((t for t in self._applies if t.func is fn), None)
        if target is None:
            target = Call(fn, str(getattr(fn, "__name__", type(fn).__name__)))
            self._applies.append(target)
        with torch._C.DisableTorchFunction():
            result = self.record(target, args, kwargs, run=lambda *a, **k: fn(*a, **k))
        if reason:
            next(n for n in reversed(self.graph.nodes) if n.target is target).meta["reason"] = reason
        if any(value is not None and not isinstance(value, Tensor) for value in leaves(result)):
            self.refuse(f"{target.__name__} stays one node and returns a {type(result).__name__}, not tensors alone")
        return result

    def assumed(self, fn: Any, args: tuple, kwargs: dict) -> Any:
        """A function whose result its author declares constant."""
        self.execution.paused = True
        try:
            with self._aside(), torch._C.DisableTorchFunction():
                result = fn(*args, **kwargs)
        finally:
            self.execution.paused = False
        if tensors(result):
            self.refuse(f"{getattr(fn, '__name__', fn)} is assumed to be constant, and returns a tensor")
        return result

    def on_module(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> Any:
        """A module that stays one call_module node."""
        source = self.reach.source_of(module)
        if source is None or kwargs or self._levels:
            self.refuse(f"calls {type(module).__name__}, a leaf, where it cannot stay one node")
        self.rows.append((source, module))  # type: ignore[arg-type]
        name = self._fresh(type(module).__name__.lower())
        with torch._C.DisableTorchFunction():
            result = self.opaque(module._wrapped_call_impl, args, kwargs)
        node = self.node_of(tensors(result)[0]) if isinstance(result, Tensor) else None
        if node is None:
            self.refuse(f"{type(module).__name__}, a leaf, returns a {type(result).__name__}, not one tensor")
        self.root.add_module(name, module)
        node.op, node.target = "call_module", name  # type: ignore[union-attr]
        return result

    def on_apply(self, cls: Any, args: tuple, kwargs: dict) -> Any:
        """Stands in for torch.autograd.Function.apply: the function stays one node, with its own backward."""
        if self.watch.seen is not None or not torch.overrides._is_torch_function_mode_enabled():
            return apply_function(cls, args, kwargs)
        if self._levels:
            if any(unwrapped(t).requires_grad for t in tensors(args)):
                self.refuse("uses a custom autograd function in a torch.func transform, with gradients through both")
            return apply_function(cls, args, kwargs)
        target = next((t for t in self._applies if t.func.__self__ is cls), None)
        if target is None:
            target = Call(cls.apply, f"apply_{cls.__name__}")
            self._applies.append(target)
        with torch._C.DisableTorchFunction():
            return self.record(target, args, kwargs, run=lambda *a, **k: apply_function(cls, a, k))


_GRAD: Any = Tensor.grad.__get__  # type: ignore[attr-defined]
_GRAD_FN: Any = Tensor.grad_fn.__get__  # type: ignore[attr-defined]
_IS_LEAF: Any = Tensor.is_leaf.__get__  # type: ignore[attr-defined]
_SET_GRAD: Any = {Tensor.grad.__set__, Tensor.grad.__delete__}  # type: ignore[attr-defined]
_BACKWARD: dict[Any, dict[str, str]] = {  # with the names of arguments that differ from ours
    Tensor.backward: {"gradient": "gradients"}, torch.autograd.backward: {"tensors": "roots", "grad_tensors": "gradients"}
}  # fmt: skip


_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # also by a level that is closed, as in what torch.func.vjp returns


def _saved_tensor_hooks() -> Any:
    """The hooks on saved tensors; those of checkpointing change what is kept, not what is computed."""
    return None if _checkpointed() else torch._C._autograd._top_saved_tensors_default_hooks(False)


def _checkpointed() -> bool:
    """Whether what is recorded stands in a region of `torch.utils.checkpoint`, which backward computes again."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def _parameter_names(fn: Any) -> list[str]:
    """The names of the positional parameters, as far as they have any."""
    if getattr(fn, "__name__", "") == "_call_impl":  # the call of a module, compiled in place
        fn = fn.__self__
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
