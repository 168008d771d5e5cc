"""The dispatch mode that writes down every operator which reaches the dispatcher.

In: operators with real tensors.  Out: nodes of `Recorder.graph`, each with meta['spec'], meta['line'], meta['ordered'].
Always: a tensor knows its node through an attribute of its own, so that no value lives longer than in eager; writes
are recorded as the functional overload followed by `aten.copy_`; storages of `foreign` are never written.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from ... import collectives
from ...errors import NeedsDataError, UnsupportedError
from ..loops.nodes import Spec
from . import decompose, views
from .mutate import BATCH_NORM, bound, laid_out, random, writes
from .numbers import Numbers

aten = torch.ops.aten
DROPPED = {aten.detach.default, aten.alias.default}  # bookkeeping of autograd: the result is its argument
MARK = "_stax_node"


class WritesCaller(Exception):
    """The program is about to write a storage that the caller owns."""

    def __init__(self, storage: int) -> None:
        self.storage = storage


@dataclass(frozen=True)
class Result:
    """One of several results of a node."""

    node: fx.Node
    index: int


class Recorder(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operator imports torch._dynamo (2.4 s)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, foreign: dict[int, str]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants = torch.nn.Module()
        self.foreign = foreign  # storage -> what owns it
        self.known: set[int] = set()  # tensors that may become constants
        self.originals: dict[int, fx.Node] = {}  # the caller's own tensors, which a function that stays whole reads itself
        self.held: list[Tensor] = []
        self.named: dict[int, fx.Node] = {}  # constant tensor -> its node
        self.items: dict[Result, fx.Node] = {}
        self.line = ""
        self.numbers: Numbers | None = None  # where the program reads numbers from tensors
        self.written: set[int] = set()  # storages
        self.lifted: set[int] = set()  # storages of constants that the program makes anew at each call

    # -- tensors and their nodes

    def bind(self, t: Tensor, node: fx.Node | Result) -> None:
        setattr(t, MARK, node)

    def constant(self, t: Tensor, fresh: bool) -> fx.Node:
        """The node of a tensor that is the same at every call; `fresh`: each call makes a new one."""
        node = self.named.get(id(t))
        if node is None:
            name = f"constant_{len(self.named)}"
            setattr(self.constants, name, t.detach())
            node = self.graph.create_node("get_attr", name, name=name)
            node.meta.update(spec=_spec(t), line=self.line, ordered=False, fresh=fresh)
            self.named[id(t)] = node
            self.held.append(t)
            if not fresh:
                self.foreign.setdefault(_storage(t), "a constant of the program")
        return node

    def node(self, t: Tensor) -> fx.Node:
        found = getattr(t, MARK, None)
        if type(found) is Result and found.node.graph is self.graph:
            item = self.items.get(found)
            if item is None:
                with self.graph.inserting_after(found.node):  # its value is there as soon as the operator has run
                    item = self.graph.create_node("call_function", operator.getitem, (found.node, found.index), name="getitem")
                item.meta.update(spec=found.node.meta["spec"][found.index], line=found.node.meta["line"], ordered=False)
                self.items[found] = item
            return item
        if isinstance(found, fx.Node) and found.graph is self.graph:
            return found
        original = self.originals.get(id(t))
        if original is not None:
            if t.requires_grad and torch.is_grad_enabled():
                raise UnsupportedError("a function that stays one node reads a tensor that requires grad and is no argument of it")
            return original
        if id(t) in self.known or id(t) in self.named or _is_number(t):
            return self.constant(t, fresh=False)
        raise UnsupportedError("a tensor that is neither an argument nor made by a recorded operator")

    def load(self, a: Any) -> Any:
        """An argument as the graph holds it."""
        if isinstance(a, Tensor):
            return self.node(a)
        if type(a) in (list, tuple):
            return type(a)([self.load(x) for x in a])
        if self.numbers is not None and type(a) in (float, int):
            found = self.numbers.node(a)
            return a if found is None else found
        return a

    def add(self, target: torch._ops.OpOverload, args: tuple, kwargs: dict, result: Any, ordered: bool = False) -> fx.Node:
        load = self.load
        loaded, named = tuple([load(a) for a in args]), {k: load(v) for k, v in kwargs.items()}
        node = self.graph.create_node("call_function", target, name=_name(target))
        node.args = loaded  # set here, since create_node walks them as a tree
        if named:
            node.kwargs = named
        node.meta.update(spec=_spec(result), line=self.line, ordered=ordered)
        if isinstance(result, Tensor):
            self.bind(result, node)
        elif isinstance(result, (tuple, list)):
            for i, r in enumerate(result):
                if isinstance(r, Tensor):
                    self.bind(r, Result(node, i))
        return node

    # -- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            raise UnsupportedError(f"the higher-order operator {func}")
        if any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())):  # before it runs, and draws
            raise UnsupportedError("an operator that draws from a generator of its own")
        if func.namespace == "profiler":  # names a stretch of the program for whoever measures it
            return func(*args, **kwargs)
        if collective := collectives.name_of(func):
            return self.exchange(collective, func, args)
        if func in DROPPED:
            result = func(*args, **kwargs)
            self.bind(result, self.node(args[0]))
            return result
        if func is aten.lift_fresh.default:
            return self.lift(args[0])
        if func in BATCH_NORM and (result := self.batch_norm(func, args, kwargs)) is not NotImplemented:
            return result
        if func._schema.is_mutable:
            return self.mutate(func, args, kwargs)
        return self.run(func, args, kwargs)

    def run(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
        rule = decompose.rule(func)
        if rule is not None:
            with self:
                found = rule(*args, **kwargs)
            if found is not NotImplemented:
                return found
        result = func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            return self.scalar(func, args, result)
        if not func._schema.returns:
            self.add(func, args, kwargs, result, ordered=True)
        elif _has_tensor(result):
            if func.is_view and any(result is a for a in args):  # a view that changes nothing may give its argument back
                return result
            self.add(func, args, kwargs, result, random(func) or func.namespace == "tensorplay")
        return result

    def exchange(self, name: str, func: torch._ops.OpOverload, args: tuple) -> Any:
        """Nothing is sent while operators are recorded; at each call one operator exchanges and waits."""
        if name not in collectives.STAND_INS:
            raise UnsupportedError(f"{func} exchanges data in a way that has no functional overload")
        result = collectives.STAND_INS[name](*args)
        if name in collectives.WAITS:
            self.bind(result, self.node(args[0]))
        else:
            from ..ops.collective import waiting

            self.add(waiting(func), collectives.plain(args), {}, result, ordered=True)
        return result

    def scalar(self, func: torch._ops.OpOverload, args: tuple, result: Any) -> Any:
        """A Python value read from tensors: a constant if they are."""
        if all(self.fixed(a) for a in args if isinstance(a, Tensor)):
            return result
        raise NeedsDataError(f"{func} reads a value of a tensor")

    def fixed(self, t: Tensor) -> bool:
        """Whether the tensor has the same value at every call: a constant that nothing has written."""
        node = self.node(t)
        return node.op == "get_attr" and node.meta["fresh"] and _storage(t) not in self.written

    def lift(self, t: Tensor) -> Tensor:
        if hasattr(t, MARK):
            return t
        node = self.constant(t, fresh=True)
        result = t.clone()
        self.bind(result, node)
        self.lifted.add(_storage(result))
        return result

    # -- writes

    def mutate(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
        how = writes(func)
        assert how is not None
        if func is aten.copy_.default and not isinstance(args[1], Tensor):
            return self.mutate(aten.fill_.Scalar, args[:2], {})
        if func is aten.copy_.default:
            if crosses(args[0], args[1]):
                raise UnsupportedError("copy_ reads elements that it has already written")
            self.write(args[0], args[1], fresh=False)
            return args[0]
        if how.functional is None:
            if func is aten.detach_.default:
                return args[0]
            raise UnsupportedError(f"{func} writes {', '.join(how.names)} and has no functional overload")
        named = bound(func, args, kwargs)
        if how.reshapes:
            return self.reshape(how.functional, args, func, kwargs)
        for name in how.names:
            for t in _tensors(named[name]):
                self.may_write(t)
        _check_order(func, how.functional, how.names, named)
        inputs = {a.name: named[a.name] for a in how.functional._schema.arguments}
        if func is aten.fill_.Tensor and self.fixed(args[1]):
            results: Any = self.call(aten.fill.Scalar, {"self": args[0], "value": args[1].item()})
        elif random(func) and how.names == ("self",) and not args[0].is_contiguous():
            results = self.call(laid_out(func), inputs | {"stride": list(args[0].stride())})
        else:
            results = self.call(how.functional, inputs)
        results = (results,) if len(how.functional._schema.returns) == 1 else tuple(results)
        own = [r for r in how.returns if r is None]
        for name, value in zip(how.names, results[len(own) :], strict=True):
            target = named[name]
            pairs = zip(target, value, strict=True) if isinstance(target, (list, tuple)) else ((target, value),)
            for t, v in pairs:
                if t.shape != v.shape:
                    raise UnsupportedError(f"{func} resizes the tensor that it writes")
                self.write(t, v, fresh=True)
        values = iter(results)
        returned = tuple(next(values) if name is None else named[name] for name in how.returns)
        return returned[0] if len(returned) == 1 else returned or None

    def call(self, func: torch._ops.OpOverload, named: dict[str, Any]) -> Any:
        """Runs an operator under this mode."""
        arguments = func._schema.arguments
        args = [named[a.name] for a in arguments if not a.kwarg_only and a.name in named]
        for a in reversed(arguments[: len(args)]):  # defaults stay unwritten, as in the program
            if not (a.has_default_value() and a.default_value is args[-1]):
                break
            args.pop()
        kwargs = {
            a.name: named[a.name]
            for a in arguments
            if a.kwarg_only and a.name in named and not (a.has_default_value() and a.default_value == named[a.name])
        }
        with self:
            return func(*args, **kwargs)

    def reshape(self, view: torch._ops.OpOverload, args: tuple, func: torch._ops.OpOverload, kwargs: dict) -> Tensor:
        """An in-place operator on metadata: from here on, the same tensor object stands for the view."""
        t = args[0]
        if self.node(t).op in ("placeholder", "get_attr"):
            raise UnsupportedError(f"{func} changes the shape of an input in place")
        node = self.add(view, args, kwargs, view(*args, **kwargs))
        func(*args, **kwargs)
        self.bind(t, node)
        return t

    def may_write(self, t: Tensor) -> None:
        owner = self.foreign.get(_storage(t))
        if owner == "caller":
            raise WritesCaller(_storage(t))
        if owner is not None:
            raise UnsupportedError(f"a write to {owner}")

    def write(self, target: Tensor, value: Tensor, fresh: bool) -> None:
        self.may_write(target)
        if views.overlaps(target.shape, target.stride()):
            raise UnsupportedError("a write to overlapping memory (as_strided, unfold or expand)")
        if value.dtype != target.dtype or value.device != target.device:
            options: dict[str, Any] = {"dtype": target.dtype} if value.dtype != target.dtype else {}
            if value.device != target.device:
                options["device"] = target.device
            with self:
                value = aten._to_copy.default(value, **options)
            fresh = True
        if value.shape != target.shape:
            with self:
                value = aten.expand.default(value, list(target.shape))
            fresh = False
        args = (self.node(target), self.node(value))
        node = self.graph.create_node("call_function", aten.copy_.default, args, name="write")
        node.meta.update(spec=_spec(target), line=self.line, ordered=False, fresh=fresh)
        self.written.add(_storage(target))
        target.copy_(value)

    def batch_norm(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
        named = bound(func, args, kwargs)
        mean, var = named["running_mean"], named["running_var"]
        training = named["training"]
        if training and mean is None and var is None and func is not aten._native_batch_norm_legit.no_stats:
            keys: tuple[str, ...] = ("input", "weight", "bias", "training", "momentum", "eps")
            if keys[0] in named and len(func._schema.returns) == 3:
                return self.call(aten._native_batch_norm_legit.no_stats, {k: named[k] for k in keys})
        if not training or mean is None or var is None:
            if func is aten._native_batch_norm_legit.default and not training and mean is not None:
                keys = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
                return self.call(aten._native_batch_norm_legit_no_training.default, {k: named[k] for k in keys})
            return NotImplemented
        self.may_write(mean)
        self.may_write(var)
        _check_order(func, func, ("running_mean", "running_var"), named)
        eps = named["eps"] if "eps" in named else named["epsilon"]
        first = named["input"] if "input" in named else named["self"]
        with self:
            out, save_mean, save_invstd, new_mean, new_var = aten._native_batch_norm_legit_functional.default(
                first, named["weight"], named["bias"], mean, var, True,
                named["momentum"] if "momentum" in named else named["exponential_average_factor"], eps,
            )  # fmt: skip
        self.write(mean, new_mean, fresh=True)
        self.write(var, new_var, fresh=True)
        if len(func._schema.returns) == 3:
            return out, save_mean, save_invstd
        with self:
            reserve = aten.empty.memory_format([0], dtype=torch.uint8, device=first.device)
        return out, save_mean, save_invstd, reserve


@functools.cache
def _name(op: torch._ops.OpOverload) -> str:
    return op._schema.name.split("::")[1]


def crosses(target: Tensor, source: Tensor) -> bool:
    """Whether a step that writes one reads memory that it writes elsewhere: then the order of its steps decides what
    eager gives."""
    same = (target.shape, target.stride(), target.storage_offset()) == (source.shape, source.stride(), source.storage_offset())
    return overlap(target, source) and not (same and target.dtype == source.dtype)


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share an element."""
    if _storage(a) != _storage(b) or not a.numel() or not b.numel():
        return False
    if a.dtype != b.dtype:
        return True
    (first, last), (start, end) = _extent(a), _extent(b)
    if last < start or end < first:
        return False
    memory = torch.zeros(max(last, end) + 1 - min(first, start), dtype=torch.bool)
    memory.as_strided(a.shape, a.stride(), first - min(first, start)).fill_(True)
    return bool(memory.as_strided(b.shape, b.stride(), start - min(first, start)).any())


def _extent(t: Tensor) -> tuple[int, int]:
    """The first and the last element of the storage that a tensor has."""
    first: Any = t.storage_offset()
    return first, first + sum((n - 1) * st for n, st in zip(t.shape, t.stride(), strict=True))


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _tensors(value: Any) -> Iterable[Tensor]:
    return [t for t in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(t, Tensor)]


def _is_number(t: Tensor) -> bool:
    """Whether a tensor is a Python number that torch wrapped: such a one does not widen a tensor of its kind."""
    if t.dim() or t.device.type != "cpu":
        return False
    narrow = torch.complex32 if t.is_complex() else torch.float16 if t.is_floating_point() else torch.int8
    return t.dtype is torch.bool or (t.dtype is not narrow and torch.result_type(torch.empty((), dtype=narrow), t) is narrow)


def _check_order(func: Any, functional: torch._ops.OpOverload, names: tuple[str, ...], named: dict[str, Any]) -> None:
    """What is written may be read at the same place only, by an operator that goes over the elements one by one: any
    other reads after it has written, in an order of its own, or of the library that computes it."""
    elementwise = torch.Tag.pointwise in functional.tags or _name(functional).startswith("_foreach_")
    places: dict[int, list[tuple[str, int, Tensor]]] = {}
    for name, value in named.items():
        for k, t in _placed(value):
            places.setdefault(_storage(t), []).append((name, k, t))
    for name in names:
        for i, target in _placed(named[name]):
            for other, k, t in places[_storage(target)]:
                if (other, k) != (name, i) and (crosses if elementwise and i == k else overlap)(target, t):
                    raise UnsupportedError(f"{func} reads elements of {name} that it has already written")


def _placed(value: Any) -> Iterable[tuple[int, Tensor]]:
    """Tensors of an argument with their places in its list; one that is no list has none."""
    return enumerate(_tensors(value)) if isinstance(value, (list, tuple)) else ((-1, t) for t in _tensors(value))


def _spec(result: Any) -> Any:
    if isinstance(result, Tensor):
        if result.layout is not torch.strided or result.is_quantized:
            raise UnsupportedError(f"a tensor of layout {result.layout}")
        return Spec.of(result)
    if isinstance(result, (tuple, list)):
        return tuple([_spec(r) for r in result])
    return result


def _has_tensor(result: Any) -> bool:
    return isinstance(result, Tensor) or (isinstance(result, (tuple, list)) and any(isinstance(r, Tensor) for r in result))
