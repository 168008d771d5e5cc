"""What a run reads from tensors: gates on data, and numbers that stay symbolic.

In: the tensors and numbers of calls.  Out: `gates`, and nodes whose values are Python numbers.
Always: what Python sees of data is either computed anew by the graph or compared by a gate.
"""

from __future__ import annotations

import contextlib
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from .gates import Taken, Trait
from .numbers import Kept, concrete, kept, power, tensor_of
from .reach import Reach
from .spelling import SILENT_READS, Tensor
from .trees import tensors
from .values import Learned, Restart, Values
from .watch import Seen, Watch


class Reads(Values):
    """The part of the recorder that meets data."""

    watch: Watch

    def __init__(self, reach: Reach, learned: Learned) -> None:
        super().__init__(reach, learned)
        self.gates: list[Taken] = []
        self.by_value = False  # whether a number that could have stayed symbolic is a constant
        self._variables: set[fx.Node] = set()  # numbers that the caller's memory held, and what Python computed from them
        self._levels = 0  # of torch.func transforms that are open
        self._last: fx.Node | None = None

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Operators of our own, which are no part of the function."""
        outer, self.watch.seen = self.watch.seen, Seen()
        try:
            yield
        finally:
            self.watch.seen = outer

    def _gate(self, kind: str, tensor: Tensor, value: Any) -> None:
        self.gates.append(Taken(kind, self.node_of(tensor), value, self.line(), self._last))

    def _convert(self, kind: str, func: Any, args: tuple, kwargs: dict) -> Any:
        if self._levels:
            args = (unwrapped(args[0]), *args[1:])
        node = self.node_of(args[0])
        with self._aside():
            value = func(*self._substitute(args), **kwargs)
        if kind == "item" and self._stays(value):
            return self._item(node, value)
        self.gates.append(Taken(kind, node, value, self.line(), self._last))
        return value

    # ---- numbers that stay symbolic --------------------------------------------------------------------------------

    def _stays(self, value: Any) -> bool:
        return type(value) in (int, float) and self.learned.numbers and not self._levels

    def without_numbers(self) -> None:
        """The program asks of a number what only a plain one can answer."""
        self.learned.numbers = False
        self._stop(Restart())

    def _item(self, node: fx.Node, value: Any) -> Any:
        if not self.number_owner:
            self.number_owner.append(self)
        made = self.graph.call_method("item", (node,))
        self.traits[made] = Trait(self.traits[node].touches)
        if node.op == "placeholder" or self.traits[node].lies & {*self.sample_keys}:
            self._variables.add(made)
        return kept(value, self._is_number(made, type(value)), self.number_owner)

    def number_node(self, op: Callable, args: tuple) -> fx.Node:
        """A node for an operator of Python on numbers."""
        if self.pending is not None:
            raise self.pending
        return self._is_number(self.graph.call_function(op, args), bool)

    def number(self, op: Callable, args: tuple, result: Any) -> Any:
        """The number that an operator of Python gives."""
        if op is operator.pow and str(args[0]).startswith("-"):
            op = power
        made = self.number_node(op, args)
        if not self._variables.isdisjoint(a for a in args if isinstance(a, fx.Node)):
            self._variables.add(made)
        return kept(result, self._is_number(made, type(result)), self.number_owner)

    def _by_value(self, numbers: list[Kept]) -> bool:
        """Whether numbers that a tensor operator takes are constants of the version: what stands in the caller's memory is
        a variable of the program, what was computed becomes one when a call has computed another value."""
        if self.learned.varied or any(n._node in self._variables for n in numbers):
            return False
        self.by_value = True
        return True

    def _is_number(self, node: fx.Node, kind: type) -> fx.Node:
        node.meta["line"], node.meta["spec"], node.meta["number"] = self.line(), None, kind
        self._last = node
        return node

    def gate_on(self, kind: str, node: fx.Node, value: Any) -> None:
        """The program turned a number into something of its own."""
        if self.pending is not None:
            raise self.pending
        self.gates.append(Taken(kind, node, value, self.line(), self._last))

    def _numeric(self, func: Any, args: tuple, kwargs: dict, node_args: tuple, node_kwargs: dict) -> tuple:
        """A call on plain numbers, and its node on symbolic ones; a tensor of a number is an operator on it."""
        if func in _TENSOR_OF and isinstance(node_args[0], fx.Node) and "number" in node_args[0].meta:
            func, extra = tensor_of, {"dtype": torch.int64} if isinstance(args[0], int) else {}
            kwargs, node_kwargs = extra | kwargs, extra | node_kwargs
        return func, concrete(tuple(args)), concrete(dict(kwargs)), node_args, node_kwargs

    def _shape_gates(self, result: Any, line: str) -> None:
        for tensor in tensors(result):
            self.gates.append(Taken("shape", self.node_of(tensor), tuple(tensor.shape), line, self._last))

    def _silent_read(self, func: Any, args: tuple, kwargs: dict) -> None:
        tensor = SILENT_READS[func](args, kwargs)
        if isinstance(tensor, Tensor):
            with self._aside():
                value = self._substitute(tensor).tolist()
            self._gate("tolist", tensor, value)

    def _hidden_reads(self, func: Any, seen: Seen, args: tuple, node_kwargs: dict) -> dict[fx.Node, Any]:
        """What stands for data that the call read on its own: gates, and numbers where they are factors; a library function
        with a read inside is entered next time."""
        factors = [node_kwargs[k] for k in FACTORS & node_kwargs.keys()]
        baked: dict[fx.Node, Any] = {}
        for tensor in seen.read:
            original = self._originals.get(id(tensor), tensor)
            known = self._known.get(id(original))
            if known is not None and known[0]() is original:
                with self._aside():
                    value = baked[known[1]] = tensor.item()
                history = torch.is_grad_enabled() and any(t.requires_grad for t in tensors(args))
                if known[1] in factors and self._stays(value) and not history:
                    baked[known[1]] = number = self._item(known[1], value)._node
                    self._variables.add(number)
                    seen.read = [t for t in seen.read if t is not tensor]  # the shape of the result depends on none
                else:
                    self._gate("item", original, value)
            elif self._can_open(func):
                self.learned.inlined.add(func)
                self._stop(Restart())
            else:
                seen.opaque = True
        if (seen.hidden or seen.dynamic) and self._can_open(func):
            self.learned.inlined.add(func)
            self._stop(Restart())
        seen.opaque = seen.opaque or seen.hidden
        return baked

    def _can_open(self, func: Any) -> bool:
        return isinstance(func, types.FunctionType) and func not in self.learned.inlined


FACTORS = {"alpha", "value"}  # keywords that take a number, or read it from a 0-dim tensor
_TENSOR_OF: set[Any] = {torch.tensor, torch.as_tensor}


def unwrapped(tensor: Tensor) -> Tensor:
    """The value beneath every functorch level; one that is batched has no single value, and the read raises."""
    functorch = torch._C._functorch
    found = tensor
    while functorch.is_functorch_wrapped_tensor(found):
        if functorch.is_batchedtensor(found):
            return tensor
        found = functorch.get_unwrapped(found)
    return found
