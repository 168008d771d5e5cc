"""The check of one version as straight-line Python: reads every source once, compares, returns the inputs.

In: the parts of a version's key.  Out: a function `match(args, kwargs)` that returns the tensors for the
placeholders where the call belongs to the version, else None, and its text; the same as a table of steps, which the
extension runs.
Always: it says what `Version.failing` says, part by part; a value that can no longer be read is a difference.
Shared prefixes of sources (`model.layers[0]`) are read once; the type and hooks of every module on the way are
compared, which also keeps the way of reading valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..source import code_of
from .signature import Entry, _keys, entry, opaque, plain, tensor_entry
from .sources import (
    ADDED,
    Argument,
    Attribute,
    Cell,
    Defined,
    Item,
    Keys,
    Keyword,
    Members,
    Method,
    Names,
    Result,
    Root,
    Size,
    Source,
    TypeOf,
    element,
    elements,
    is_plain,
    size,
)

_TABLES = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (nn.ModuleList, nn.Sequential)


def module_entry(m: nn.Module) -> Entry:
    """What a trace through a module depends on beside its attributes: its class, hooks and own forward."""
    hooks = (*m._forward_pre_hooks.values(), *m._forward_hooks.values())
    own = m.__dict__.get("forward")
    return ("module", type(m), *map(entry, hooks), *(() if own is None else (entry(own),)))


@dataclass
class Text:
    """Straight-line code under construction, with the objects that it names."""

    args: tuple
    kwargs: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    env: dict[str, Any] = field(default_factory=dict)
    names: dict[Source, str] = field(default_factory=dict)
    values: dict[Source, Any] = field(default_factory=dict)
    owners: list[tuple[Source, nn.Module]] = field(default_factory=list)
    steps: list[tuple] = field(default_factory=list)  # (step, result, operand, object), and of a field its owner
    listed: dict[str, str] = field(default_factory=dict)  # variables for the names in a module, and the module's
    slots: dict[str, int] = field(default_factory=dict)  # of the names in the text, and of what only the steps read

    def constant(self, value: Any) -> str:
        if value is None or value is True or value is False:
            return repr(value)
        name = f"c{len(self.env)}"
        self.env[name] = value
        return name

    def check(self, failed: str) -> None:
        self.lines.append(f"if {failed}: return None")

    def slot(self, name: str) -> int:
        return self.slots.setdefault(name, len(self.slots))

    def step(self, kind: str, result: str, operand: str, value: Any = None, owner: str = "") -> None:
        """Adds a step; '' stands for no result or operand."""
        step = (kind, self.slot(result) if result else -1, self.slot(operand) if operand else -1, value)
        self.steps.append((*step, self.slot(owner)) if owner else step)

    def identical(self, a: str, b: str) -> None:
        """Compares two variables by identity."""
        self.check(f"{a} is not {b}")
        self.step("identical", a, b)

    def outcome(self, name: str, of: Callable[[tuple], Any], inputs: str, expected: Any) -> None:
        """Compares what a function of the inputs returns."""
        self.env[name] = of
        self.check(f"{name}(({inputs})) != {self.constant(expected)}")
        self.step("outcome", "", "", (of, expected))

    def read(self, source: Source) -> str:
        """The variable that holds the value of `source`."""
        chain = []
        while source not in self.names:
            chain.append(source)
            owner = getattr(source, "owner", None)
            if owner is None:
                break
            source = owner
        for item in reversed(chain):
            self._read(item)
        return self.names[chain[0] if chain else source]

    def is_module(self, source: Source) -> bool:
        """Whether a source reads a module, whose type and hooks are compared as soon as it is read."""
        self.read(source)
        return isinstance(self.values[source], nn.Module)

    def _read(self, source: Source) -> None:
        base: Any = self.values.get(getattr(source, "owner", source))
        match source:
            case Attribute(_, name):
                value = getattr(base, name)
            case Item(_, key):
                value = element(base, key)
            case _:
                value = source.get(self.args, self.kwargs)
        name = f"v{len(self.names)}"
        self.lines.append(f"{name} = {self._expression(source, base, value)}  # {str(source).splitlines()[0]}")
        self.names[source], self.values[source] = name, value
        self._step(source, base, name, value)
        if isinstance(value, nn.Module):
            self._module(source, name, value)

    def _expression(self, source: Source, base: Any, value: Any) -> str:
        match source:
            case Argument(position):
                return f"args[{position}]"
            case Keyword(keyword):
                return f"kwargs[{keyword!r}]"
            case Root():
                return self.constant(value)
            case Cell(Root(function), name):
                cell = function.__closure__[function.__code__.co_freevars.index(name)]
                return f"{self.constant(cell)}.cell_contents"
            case Attribute(owner, name):
                own = self.names[owner]
                if isinstance(base, nn.Module) and name not in base.__dict__ and not hasattr(type(base), name):
                    for table in _TABLES:
                        if name in base.__dict__[table]:
                            self.check(f"{name!r} in {own}.__dict__")  # an attribute would hide it
                            return f"{own}.{table}[{name!r}]"
                return f"{own}.{name}" if name.isidentifier() else f"getattr({own}, {name!r})"
            case Item(owner, key):
                own = self.names[owner]
                if type(base) in _CONTAINERS and type(key) is int and key >= 0:
                    return f"{own}._modules[{str(key)!r}]"
                text = repr(key) if type(key) in (int, str, bool) else self.constant(key)
                return f"{own}[{text}]" if is_plain(base) else f"{self.constant(element)}({own}, {text})"
            case Size(owner):
                return f"{'len' if is_plain(base) else self.constant(size)}({self.names[owner]})"
            case TypeOf(owner):
                return f"type({self.names[owner]})"
            case Method(owner, name):
                return f"{self.names[owner]}.{name}()"
            case Keys(owner):
                own = self.names[owner]
                return f"(*{own if is_plain(base) else f'{self.constant(elements)}({own})'},)"
            case Names(owner):
                own = self.names[owner]
                return f"(*{own}.__dict__, *{own}._parameters, *{own}._buffers, *{own}._modules)"
            case Members(owner):
                return f"members({self.names[owner]})"
            case Defined(owner, name):
                return f"{name!r} in {self.names[owner]}"
        return f"{self.constant(source)}.get(args, kwargs)"

    def _step(self, source: Source, base: Any, name: str, value: Any) -> None:
        """The step that does what `_expression` says."""
        own = self.names.get(getattr(source, "owner", source), "")
        match source:
            case Argument(position):
                self.step("argument", name, "", position)
            case Root():
                self.step("constant", name, "", value)
            case Keyword(keyword):
                self.step("argument", name, "", len(self.args) + [*self.kwargs].index(keyword))
            case Cell(Root(function), variable):
                self.step("cell", name, "", function.__closure__[function.__code__.co_freevars.index(variable)])
            case Attribute(_, attribute):
                if isinstance(base, nn.Module) and attribute not in base.__dict__ and not hasattr(type(base), attribute):
                    for table in _TABLES:
                        if attribute in base.__dict__[table]:
                            self.step("absent", f"{own}.__dict__", "", attribute)
                            return self.step("item", name, self._table(own, table), attribute)
                if isinstance(base, nn.Module) and attribute in base.__dict__:
                    return self.step("field", name, f"{own}.__dict__", attribute, own)
                self.step("attribute", name, own, attribute)
            case Item(_, key):
                if type(base) in _CONTAINERS and type(key) is int and key >= 0:
                    return self.step("item", name, self._table(own, "_modules"), str(key))
                self.step("item", name, own, key)
            case Size():
                self.step("size", name, own)
            case TypeOf():
                self.step("type", name, own)
            case Method(_, method):
                self.step("method", name, own, method)
            case Keys():
                self.step("keys", name, own)
            case Defined(_, variable):
                self.step("defined", name, own, variable)
            case Result():
                self.step("result", name, own)
            case Names() | Members():
                self.listed[name] = own  # compared without making a tuple
            case _:
                self.step("get", name, "", source.get)

    def _table(self, own: str, table: str) -> str:
        """The variable for a module's dictionary of parameters, buffers or modules."""
        name = f"{own}.{table}"
        if name not in self.slots:
            self.step("item", name, f"{own}.__dict__", table)
        return name

    def _module(self, source: Source, name: str, m: nn.Module) -> None:
        self.owners.append((source, m))
        expected = module_entry(m)
        self.step("dict", f"{name}.__dict__", name)
        if len(expected) == 2:
            self.step("module", f"{name}.__dict__", name, type(m))
        else:
            self.step("equal", "", name, (module_entry, expected))
        if len(expected) == 2:
            self.check(
                f"type({name}) is not {self.constant(type(m))} or {name}._forward_hooks or {name}._forward_pre_hooks"
                f" or 'forward' in {name}.__dict__"
            )
        else:
            self.check(f"module_entry({name}) != {self.constant(expected)}")

    def equal(self, name: str, expected: Entry, value: Any) -> None:
        """Compares the entry of a variable with an expected one, by the shortest way that decides it."""
        if value is None or value is True or value is False:
            self.check(f"{name} is not {value}")
            self.step("is", "", name, value)
        elif type(value) is tuple and all(type(v) is str for v in value):
            self.check(f"{name} != {self.constant(value)}")
            if name not in self.listed:
                self.step("same", "", name, value)
            elif f"{self.listed[name]}.__dict__" in self.slots:
                self.step("names", f"{self.listed[name]}.__dict__", "", value)
            else:
                self.step("members", "", self.listed[name], (value, ADDED))
        elif plain(value):
            self.step("same", "", name, value)
            self.check(f"{name} is not {self.constant(value)} and entry({name}) != {self.constant(expected)}")
        elif expected[0] == "object" and len(expected) == 3 and opaque(value):
            self.check(f"{self.constant(expected[2].held)}() is not {name}")
            self.step("held", "", name, expected[2].held)
        else:
            self.check(f"entry({name}) != {self.constant(expected)}")
            self.step("equal", "", name, (entry, expected))

    def tensor(self, name: str, e: Entry, fingerprint: bytes | None) -> None:
        """Compares a tensor's metadata; on a CPU the dispatch keys already name the device."""
        if fingerprint is None:
            self.step("equal", "", name, (tensor_entry, e))
        else:
            self.step("tensor", "", name, fingerprint)
        if isinstance(e[6], torch.layout):
            return self.check(f"tensor_entry({name}) != {self.constant(e)}")
        device = "" if e[4].type == "cpu" else f" or {name}.device != {self.constant(e[4])}"
        self.check(
            f"type({name}) is not {self.constant(e[1])} or {name}.shape != {self.constant(e[2])}"
            f" or {name}.dtype is not {self.constant(e[3])}{device} or {name}.requires_grad is not {e[5]}"
            f" or {name}.stride() != {self.constant(e[6])} or keys({name}) != {self.constant(e[7])}"
        )

    def table(self) -> tuple[tuple, ...]:
        """The steps; where all names in a module are compared, an attribute cannot hide a parameter unseen."""
        named = {step[1] for step in self.steps if step[0] == "names"}
        return tuple([step for step in self.steps if step[0] != "absent" or step[1] not in named])

    def build(self, result: str) -> tuple[Callable[[tuple, dict], Any], str]:
        """The finished function and its text; the function keeps no sample value alive."""
        body = "\n        ".join([*self.lines, f"return {result}"])
        text = f"def match(args, kwargs):\n    try:\n        {body}\n    except Exception:\n        return None\n"
        namespace = {"entry": entry, "tensor_entry": tensor_entry, "keys": _keys, "module_entry": module_entry}
        namespace |= {"members": Members.of, **self.env}
        exec(code_of(text, "<guards>"), namespace)
        return namespace.pop("match"), text  # popped, so that function and namespace form no cycle
