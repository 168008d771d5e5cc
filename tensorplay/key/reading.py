"""The check of one version as straight-line Python: reads every source once, compares, returns the inputs.

In: the parts of a version's key.  Out: a function `match(args, kwargs)` that returns the tensors for the
placeholders where the call belongs to the version, else None, and its text.
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

from .signature import Entry, _keys, entry, plain, tensor_entry
from .sources import Argument, Attribute, Cell, Item, Keyword, Method, Root, Size, Source, TypeOf

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

    def constant(self, value: Any) -> str:
        if value is None or value is True or value is False:
            return repr(value)
        name = f"c{len(self.env)}"
        self.env[name] = value
        return name

    def check(self, failed: str) -> None:
        self.lines.append(f"if {failed}: return None")

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
                value = base[key]
            case _:
                value = source.get(self.args, self.kwargs)
        name = f"v{len(self.names)}"
        self.lines.append(f"{name} = {self._expression(source, base, value)}  # {str(source).splitlines()[0]}")
        self.names[source], self.values[source] = name, value
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
                    for table in ("_parameters", "_buffers", "_modules"):
                        if name in base.__dict__[table]:
                            return f"{own}.{table}[{name!r}]"
                return f"{own}.{name}" if name.isidentifier() else f"getattr({own}, {name!r})"
            case Item(owner, key):
                own = self.names[owner]
                if type(base) in _CONTAINERS and type(key) is int and key >= 0:
                    return f"{own}._modules[{str(key)!r}]"
                return f"{own}[{repr(key) if type(key) in (int, str, bool) else self.constant(key)}]"
            case Size(owner):
                return f"len({self.names[owner]})"
            case TypeOf(owner):
                return f"type({self.names[owner]})"
            case Method(owner, name):
                return f"{self.names[owner]}.{name}()"
        return f"{self.constant(source)}.get(args, kwargs)"

    def _module(self, source: Source, name: str, m: nn.Module) -> None:
        self.owners.append((source, m))
        expected = module_entry(m)
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
        elif plain(value):
            self.check(f"{name} is not {self.constant(value)} and entry({name}) != {self.constant(expected)}")
        elif expected[0] == "object" and len(expected) == 3:
            self.check(f"{self.constant(expected[2].held)}() is not {name}")
        else:
            self.check(f"entry({name}) != {self.constant(expected)}")

    def tensor(self, name: str, e: Entry) -> None:
        """Compares a tensor's metadata; on a CPU the dispatch keys already name the device."""
        if isinstance(e[6], torch.layout):
            return self.check(f"tensor_entry({name}) != {self.constant(e)}")
        device = "" if e[4].type == "cpu" else f" or {name}.device != {self.constant(e[4])}"
        self.check(
            f"type({name}) is not {self.constant(e[1])} or {name}.shape != {self.constant(e[2])}"
            f" or {name}.dtype is not {self.constant(e[3])}{device} or {name}.requires_grad is not {e[5]}"
            f" or {name}.stride() != {self.constant(e[6])} or keys({name}) != {self.constant(e[7])}"
        )

    def build(self, result: str) -> tuple[Callable[[tuple, dict], Any], str]:
        """The finished function and its text; the function keeps no sample value alive."""
        body = "\n        ".join([*self.lines, f"return {result}"])
        text = f"def match(args, kwargs):\n    try:\n        {body}\n    except Exception:\n        return None\n"
        namespace = {"entry": entry, "tensor_entry": tensor_entry, "keys": _keys, "module_entry": module_entry, **self.env}
        exec(compile(text, "<guards>", "exec"), namespace)
        return namespace.pop("match"), text  # popped, so that function and namespace form no cycle
