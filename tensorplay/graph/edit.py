"""How a pass makes nodes: values that write down what is done with them, and replacement that keeps facts right.

In: the node that is rewritten.  Out: `Builder`, under which a plain Python function on tensors writes its nodes in
front of it (it raises `layout.Unknown` where a layout depends on more); `replace`, one value in another's place.
Always: a new node has meta['spec'], meta['facts'] and the user's line.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .layout import computed
from .memory import Memory, facts, fresh, share
from .rules import name_of


class Builder:
    """Writes nodes in front of one node."""

    def __init__(self, node: fx.Node) -> None:
        self.at = node
        self.made: list[fx.Node] = []

    def values(self, tree: Any) -> Any:
        """A call's arguments with values in place of nodes."""
        return fx.map_arg(tree, lambda n: Value(n, self))  # type: ignore[return-value, arg-type]

    def emit(self, kind: str, target: Any, args: tuple, kwargs: dict[str, Any]) -> Value:
        args, kwargs = tuple([_node(a) for a in args]), {k: _node(a) for k, a in kwargs.items()}
        with self.at.graph.inserting_before(self.at):
            node = self.at.graph.create_node(kind, target, args, kwargs)
        self.made.append(node)
        spec = computed(name_of(node), target, args, kwargs)
        node.meta.update(spec=spec, facts=fresh(), line=self.at.meta.get("line", ""))
        return Value(node, self)

    def undo(self) -> None:
        for node in reversed(self.made):
            self.at.graph.erase_node(node)


class Value:
    """A tensor of the graph under a builder: methods, operators and torch's functions make nodes."""

    def __init__(self, node: fx.Node, builder: Builder) -> None:
        self._node, self._builder = node, builder

    @property
    def shape(self) -> tuple[int, ...]:
        return self._node.meta["spec"].size

    @property
    def dtype(self) -> torch.dtype:
        return self._node.meta["spec"].dtype

    def __getattr__(self, name: str) -> Callable[..., Value]:
        return lambda *args, **kwargs: self._builder.emit("call_method", name, (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Value:
        builder = next(a._builder for a in args if isinstance(a, Value))
        return builder.emit("call_function", func, args, kwargs or {})


def precise(value: Any) -> Any:
    """Marks what a chain computes as a difference that cancels: below the graph it may be computed with all its digits
    (`exp(x) - 1` as `expm1(x)`). What the user wrote is never marked: it has eager's digits."""
    if isinstance(value, Value):
        value._node.meta["precise"] = True
    return value


def _node(a: Any) -> Any:
    return a._node if isinstance(a, Value) else a


def _infix(op: Callable[..., Any], reflected: bool) -> Callable[..., Value]:
    def method(self: Value, *other: Any) -> Value:
        args = (*other, self) if reflected else (self, *other)
        return self._builder.emit("call_function", op, args, {})

    return method


for _name in ("add", "sub", "mul", "truediv", "pow", "lt", "le", "gt", "ge", "eq", "ne", "neg", "and", "or"):
    _op = getattr(operator, f"__{_name}__")
    setattr(Value, f"__{_name}__", _infix(_op, False))
    setattr(Value, f"__r{_name}__", _infix(_op, True))


def replace(old: fx.Node, new: fx.Node, memory: Memory) -> None:
    """Every user of `old` uses `new`; `old` is gone."""
    share(new, old, memory)
    old.replace_all_uses_with(new)
    if old in memory.leaving:
        memory.leaving.add(new)
        memory.escaping |= facts(new).lies
    old.graph.erase_node(old)
