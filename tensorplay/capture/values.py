"""Which node each tensor of a run is: inputs, stand-ins for what must not be written, arguments as nodes.

In: tensors by identity.  Out: fx nodes; a placeholder is made when the function first uses a tensor that existed.
Always: a tensor is known only while it lives; one that is neither recorded nor reachable from the function is
refused, never baked in; the graph holds no tensor.
"""

from __future__ import annotations

import keyword
import re
import sys
import types
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import fx

from ..key.sources import Source
from ..stax.loops.nodes import Spec
from .gates import Trait
from .isolate import isolate
from .kinds import is_library_file
from .numbers import is_kept
from .reach import Reach
from .trees import LITERALS
from .watch import storage_key

Tensor = torch.Tensor
MANY = 3  # storages that the function writes, after which a new run takes all of its inputs to be written
KNOWN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_LIBRARY_FILES: dict[str, bool] = {}


class Restart(BaseException):
    """Something was learned that the run should have known from its beginning."""


class Written(BaseException):
    """An operator is about to write storages of the caller that nothing else of the run lies in: copies can still stand in."""

    def __init__(self, keys: set[int]) -> None:
        super().__init__()
        self.keys = keys


class Refused(BaseException):
    """The function does something that capture cannot represent. Not an Exception, so that user code lets it pass."""


@dataclass
class Learned:
    """What earlier runs of one capture found out."""

    isolated: set[int] = field(default_factory=set)  # keys of the caller's storages that the function writes
    inlined: set[Any] = field(default_factory=set)  # library functions with a data gate inside
    numbers: bool = True  # whether what `item` reads may stay symbolic
    varied: bool = False  # whether what it read from a result of the call has differed between calls


class Values:
    """The graph under construction and its inputs.

    `pending` is what stopped the run, for the case that the function swallowed the signal.
    """

    def __init__(self, reach: Reach, learned: Learned) -> None:
        super().__init__()
        self.reach, self.learned = reach, learned
        self.graph, self.root = fx.Graph(), torch.nn.Module()
        self.inputs: list[Source] = []
        self.samples: list[Tensor] = []
        self.sample_keys: list[int] = []
        self.traits: dict[fx.Node, Trait] = {}
        self.pending: BaseException | None = None
        self._known: dict[int, tuple[weakref.ref, fx.Node]] = {}
        self._stand_ins: dict[int, tuple[Tensor, Tensor]] = {}  # id of the caller's tensor -> (it, its copy)
        self._originals: dict[int, Tensor] = {}  # id of a copy -> the caller's tensor
        self._isolated_keys: set[int] = set()
        self._groups: dict[int, list[Tensor]] = {}  # storage key -> tensors in reach, when they were so many:
        self._grouped = -1
        self._callers: dict[int, Source] | None = None  # storage keys of the caller's tensors
        self._names: set[str] = set()
        self._constants: dict[int, tuple[Any, str]] = {}
        self._last_input: fx.Node | None = None
        self.number_owner: list[Any] = []  # this recorder while it runs, if it made a number that stays symbolic
        self.outermost: types.CodeType | None = None  # what runs the function: frames behind it are its caller's

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
        if type(tensor) not in KNOWN_TYPES:
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
        keys = frozenset((key,))
        node.meta["spec"], node.meta["line"] = Spec.of(tensor), ""
        self._bind(tensor, node)
        if key in self.learned.isolated:
            self._isolate(key)
            keys = frozenset((key, storage_key(self._stand_ins[id(tensor)][1])))
        self.traits[node] = Trait(keys, lies=keys)
        return node

    def _isolate(self, key: int) -> None:
        """Stand-ins for every tensor of the caller that lies in a storage which the function writes."""
        if key in self._isolated_keys:
            return
        self._isolated_keys.add(key)
        group = {id(t): t for t in self._sharing(key)}
        group.update((id(t), t) for t, k in zip(self.samples, self.sample_keys) if k == key)
        tensors = list(group.values())
        for tensor, copy in zip(tensors, self._stand_ins_for(tensors)):
            self._stand_ins[id(tensor)] = (tensor, copy)
            self._originals[id(copy)] = tensor

    def _sharing(self, key: int) -> list[Tensor]:
        """The tensors in reach that lie in a storage."""
        if len(self.reach.tensors) != self._grouped:
            self._grouped, self._groups = len(self.reach.tensors), {}
            for tensor, _ in self.reach.tensors.values():
                self._groups.setdefault(storage_key(tensor), []).append(tensor)
        return self._groups.get(key, [])

    def _stand_ins_for(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        return isolate(tensors)

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
        while frame is not None and frame.f_code is not self.outermost:
            self.reach.add_frame(frame)
            frame = frame.f_back

    def _arguments(self, value: Any) -> Any:
        """A call's argument with nodes in place of tensors, as fx can hold and print it."""
        kind = type(value)
        if kind in LITERALS:
            return value
        if isinstance(value, Tensor):
            return self.node_of(value)
        if is_kept(value):
            return value._value if value._constant else value._node
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
        if isinstance(value, torch.Generator) and not self._existed(value):
            self.refuse("draws from a generator made during the call")
        found = self._constants.get(id(value))
        if found is None:
            found = self._constants[id(value)] = (value, f"_constant_{len(self._constants)}")
            setattr(self.root, found[1], value)
        return self.graph.create_node("get_attr", found[1])

    def _existed(self, generator: torch.Generator) -> bool:
        default = torch.default_generator if generator.device.type == "cpu" else None
        return generator is default or any(generator is g for g in self.reach.generators)

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
            self._callers = {storage_key(t): source for t, source in self.reach.tensors.values()}
            self._callers.pop(0, None)
        found: set[int] = set()
        for tensor in tensors:
            key = storage_key(tensor)
            if key in self._callers or key in self.sample_keys:
                if tensor.is_inference() and not torch.is_inference_mode_enabled():
                    self.refuse("writes an inference tensor outside of inference mode")
                if key in self.learned.isolated or key == 0:
                    self.refuse(f"writes {self._callers.get(key, 'an argument')} where capture cannot stand in for it")
                found.add(key)
        if not found:
            return
        if self._untouched(found):
            raise Written(found)
        if len(self.learned.isolated) >= MANY:  # a training step writes most of what it reads
            found.update(key for key in self.sample_keys if key)
        self.learned.isolated |= found
        self._stop(Restart())

    def _untouched(self, keys: set[int]) -> bool:
        """Whether copies of these storages can take their place from here on."""
        return False

    def _swap(self, keys: set[int]) -> None:
        """From here on copies stand in for the caller's tensors in these storages."""
        self.learned.isolated |= keys
        for key in keys:
            self._isolate(key)
        for tensor, at in zip(self.samples, self.sample_keys):
            if at in keys:
                node = self._known[id(tensor)][1]
                both = frozenset((at, storage_key(self._stand_ins[id(tensor)][1])))
                self.traits[node] = Trait(both, lies=both)


def _tail(source: Source) -> str:
    """A name for a lifted tensor: the end of its path."""
    words = re.findall(r"\w+", re.sub(r"\(closure.*", "", str(source)))
    words = [w for w in words if w not in ("globals", "of")]
    return "_".join(words[-4:]) or "lifted"
