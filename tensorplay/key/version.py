"""One compiled version, its key, and the decision whether it may serve a call.

In: what capture found and the call that it was captured on.  Out: `Version`.
Always: `match` accepts a call exactly where `failing` finds no guard that fails; a version keeps no tensor of the
caller alive, and no object either that the key holds by identity (`alive` turns False when one of those dies).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..native import fingerprint, native
from .aliasing import extents, overlaps, same_objects
from .ambient import NAMES, ambient, decided
from .guards import GATES, MISSING, Guard, differences, guards
from .reading import Text, module_entry
from .signature import Entry, Identity, attributes, entry, identities, opaque, plain, show, signature, tensor_entry
from .sources import Argument, Keyword, Method, Source, TypeOf

if TYPE_CHECKING:
    from ..capture.captured import Captured, Gate


_NAMED = (Argument, Keyword)


@dataclass(frozen=True)
class Call:
    """What of a call is in every key, whatever the version: signature, identity pattern, ambient state."""

    sigma: Entry
    aliases: tuple[int, ...]
    ambient: tuple

    @staticmethod
    def of(args: tuple, kwargs: dict[str, Any]) -> Call:
        sigma = signature(args, kwargs)
        return Call(sigma, same_objects(args, kwargs, sigma), ambient())


@dataclass(frozen=True)
class Part:
    """One component of the key that only this version has: a place, the entry that it must show."""

    source: Source
    expected: Entry

    def actual(self, args: tuple, kwargs: dict[str, Any]) -> Entry:
        try:
            value = self.source.get(args, kwargs)
            return module_entry(value) if self.expected[0] == "module" else entry(value)
        except Exception:
            return MISSING


class Version:
    """A program with its key (section 2.2)."""

    def __init__(
        self, call: Call, captured: Captured | None, args: tuple, kwargs: dict[str, Any], replayed: Any = None
    ) -> None:
        """Builds the key from the call that was captured; `captured` is None where the function runs as it stands.

        `replayed` takes the tensors of the placeholders and returns the entries of the gates' values, or raises; its
        `elsewhere` does so for tensors of any signature.
        """
        self.call = call
        self.sigma, self.aliases, self.ambient = call.sigma, call.aliases, call.ambient
        self.served = 0  # calls served by Python
        self.check: Any = None  # the whole key for the extension, where it can decide it
        self.seconds: dict[str, float] = {}
        self.program: Any = None
        self.rewritten: Any = None  # what the front-end passes made of the captured graph, and under which choices
        self.choices: Any = None
        self.distinct = False  # whether `match` alone proves that no two arguments are one tensor
        self.fallback: Any = None  # why the program is not compiled code, where it is not
        self.parts: tuple[Part, ...] = ()
        self.ties: tuple[tuple[Source, Source], ...] = ()
        self.gates: tuple[Gate, ...] = ()
        self.replayed = replayed
        self.match: Callable[[tuple, dict], Any]
        self.captured: Captured | None = None
        self.rows, self.keywords = _rows((*args, *kwargs.values())), tuple(kwargs)  # what the extension compares
        self.steps: tuple = ()
        self.slots = 0
        self.reads: tuple[int, ...] = ()
        if captured is None:
            self.match, self.text = _always, ""
        else:
            self._read(captured, args, kwargs)
            self.captured = replace(captured, samples=(), state=())
        self.held = self._held()

    def _read(self, captured: Captured, args: tuple, kwargs: dict[str, Any]) -> None:
        text = Text(args, kwargs)
        names = [text.read(source) for source in captured.inputs]
        values = [text.values[source] for source in captured.inputs]
        states: dict[Source, Entry] = {}
        for source, value in captured.state:
            if isinstance(source, TypeOf) and text.is_module(source.owner):  # compared when the module was read
                continue
            states[source] = entry(value)
            text.equal(text.read(source), states[source], value)
        if any("as_strided" in str(n.target) for n in captured.graph.graph.nodes):  # reads the offset as a number
            for source, value in zip(captured.inputs, values):
                place = Method(source, "storage_offset")
                states[place] = entry(value.storage_offset())
                text.equal(text.read(place), states[place], value.storage_offset())
        lifted: dict[Source, Entry] = {}
        for source, name, value in zip(captured.inputs, names, values):
            if not isinstance(source, _NAMED):  # those are in sigma
                lifted[source] = tensor_entry(value)
                text.tensor(name, lifted[source], fingerprint(value))
        self.ties = captured.ties
        for a, b in self.ties:
            text.identical(text.read(a), text.read(b))
        listed = "".join(f"{n}, " for n in names)
        if len(names) > 1:
            text.check(f"len({{*map(id, ({listed}))}}) != {len(names)}")
        self.inputs = captured.inputs
        self.written = frozenset(captured.written)
        self.extents = extents(values)
        self.overlaps = overlaps(values, self.extents, self.written) if self.written else ()
        if self.written:
            shared = functools.partial(overlaps, sizes=self.extents, written=self.written)
            text.outcome("overlaps", shared, listed, self.overlaps)
        self.gates = tuple(captured.gates)
        self.gate_entries = tuple(entry(g.value) for g in self.gates)
        if self.gates:
            text.outcome("replayed", self.replayed, listed, self.gate_entries)
        owners = {source: module_entry(m) for source, m in text.owners}
        self.parts = tuple(Part(s, e) for s, e in (*owners.items(), *states.items(), *lifted.items()))
        self.match, self.text = text.build(f"({listed})")
        self.steps = text.table()
        self.slots, self.reads = len(text.slots), tuple(text.slot(name) for name in names)
        flat = (*self.sigma[0], *(e[2] for e in self.sigma[1]))
        named = sum(isinstance(s, _NAMED) for s in captured.inputs)
        self.distinct = not self.aliases and named == sum(e[0] == "tensor" for e in flat)
        self.distinct &= all(e[0] in ("tensor", "value") for e in flat)

    @property
    def hits(self) -> int:
        """Calls that this version served."""
        return self.served + (0 if self.check is None else self.check.hits)

    def prepare(self, fn: Callable[..., Any], answers: tuple | None) -> None:
        """Makes the check for the extension, given what its probes answered when the key was read; `fn` is what runs
        where nothing was captured."""
        if native is None or self.rows is None or self.aliases or answers is None or not decided(answers):
            return
        run, result = getattr(self.program, "trusted", self.program), None
        if self.captured is not None:
            rebuild: Any = self.captured.rebuild
            result = rebuild.plain()
        if self.fallback is not None:
            run, result = self._eager(fn, run, result)
        self.check = native.Check(
            answers, self.rows, self.keywords, self.steps, self.slots, self.reads, bool(self.gates), run, result
        )

    def _eager(self, fn: Callable[..., Any], program: Any, result: Any) -> tuple[Callable[..., Any], Any]:
        """The program and the recipe of a version that is not compiled, which counts its calls."""
        fallback = self.fallback

        def counted(*inputs: Any) -> Any:
            fallback.count += 1
            return () if program is None else program(*inputs)

        return counted, result if program is not None else lambda _, args, kwargs: fn(*args, **kwargs)

    def _held(self) -> list[Identity]:
        return identities((self.sigma, tuple(part.expected for part in self.parts)))

    @property
    def alive(self) -> bool:
        """Whether every object that the key holds by identity still lives; if not, no call can match any more."""
        return all(i.alive for i in self.held)

    @property
    def front(self) -> fx.GraphModule:
        """The graph that the back end received."""
        assert self.captured is not None
        return self.captured.graph if self.rewritten is None else self.rewritten.graph

    def serves(self, call: Call, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
        """The tensors for the placeholders where the call has this version's key, else None."""
        if self.sigma == call.sigma and self.ambient == call.ambient and self.aliases == call.aliases:
            return self.match(args, kwargs)
        return None

    def read(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The tensors for the placeholders."""
        return tuple(source.get(args, kwargs) for source in self.inputs)

    def failing(self, call: Call, args: tuple, kwargs: dict[str, Any]) -> list[Guard]:
        """The guards that do not hold for a call: the components in which its key differs from this version's."""
        found = differences("inputs", self.sigma, call.sigma)
        if self.aliases != call.aliases:
            found.append(Guard("identical arguments", f"arguments that are one tensor == {self.aliases}", self.aliases, call.aliases))
        for name, a, b in zip(NAMES, self.ambient, call.ambient):
            if a != b:
                found.append(Guard(name, f"{name} == {show(a)}", a, b))
        if self.captured is None:
            return found
        for part in self.parts:
            found += differences(str(part.source), part.expected, part.actual(args, kwargs), compact=True)
        known = self.aliases != call.aliases  # says already that arguments are, or are not, one tensor
        for a, b in self.ties:
            if not (known and isinstance(a, _NAMED) and isinstance(b, _NAMED)) and not _identical(a, b, args, kwargs):
                found.append(Guard(str(a), f"{a} is {b}", True, False))
        try:
            inputs: tuple[Any, ...] | None = self.read(args, kwargs)
        except Exception:
            inputs = None
        if inputs is not None:
            distinct = len({*map(id, inputs)})
            if distinct != len(inputs) and not known:
                found.append(Guard("identical tensors", "tensors that the function reads are distinct", len(inputs), distinct))
            found += self._overlap(inputs)
        if self.gates and self._outcomes(inputs) != self.gate_entries:
            found.append(Guard("gates", GATES, tuple(g.value for g in self.gates), self._outcomes(inputs)))
        if inputs is None and not found:
            found.append(Guard("inputs", "every tensor that the function reads can be read", True, False))
        return found

    def _overlap(self, inputs: tuple[Any, ...]) -> list[Guard]:
        if not self.written:
            return []
        try:
            now: Any = overlaps(inputs, self.extents, self.written)
        except Exception:
            now = None
        if now == self.overlaps:
            return []
        return [Guard("overlap", f"written memory shared by {self.overlaps or 'no two inputs'}", self.overlaps, now)]

    def _outcomes(self, inputs: tuple[Any, ...] | None) -> tuple[Entry, ...] | None:
        """The gates' entries on other inputs, by the replay graph on torch; None where they cannot be computed."""
        if inputs is None:
            return None
        try:
            return self.replayed.elsewhere(inputs)
        except Exception:
            return None

    @cached_property
    def guards(self) -> list[Guard]:
        """Every guard of this version."""
        found = guards("inputs", self.sigma)
        found += [Guard(n, f"{n} == {show(a)}", a) for n, a in zip(NAMES, self.ambient)]
        for part in self.parts:
            found += guards(str(part.source), part.expected, compact=True)
        found += [Guard(str(a), f"{a} is {b}", True) for a, b in self.ties]
        if self.gates:
            found.append(Guard("gates", GATES, tuple(g.value for g in self.gates)))
        return found

    def run(self, inputs: Sequence[torch.Tensor], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs the program on the placeholders' tensors and makes the caller's result."""
        run = getattr(self.program, "trusted", self.program)  # the key has compared what it would check
        return self.captured.rebuild(run(*inputs), args, kwargs)  # type: ignore[union-attr]

    def run_at(self, level: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs one level: 'graph', 'ops', 'loops', 'plan' or 'kernels'."""
        assert self.captured is not None
        inputs = self.read(args, kwargs)
        if level == "graph":
            return self.captured.rebuild(self.captured.graph(*inputs), args, kwargs)
        if not hasattr(self.program, "run"):
            why = f": {self.fallback.reason}" if self.fallback is not None else ""
            raise ValueError(f"this version has no level {level!r}, only 'graph'{why}")
        return self.captured.rebuild(self.program.run(level, inputs), args, kwargs)

    def __repr__(self) -> str:
        return f"<version for {self}>"

    def __str__(self) -> str:
        shapes = ", ".join(str(tuple(e[2])) if e[0] == "tensor" else show(e[2]) for e in self.sigma[0] if len(e) > 2)
        gates = "".join(f", {g.kind} at {g.line} is {g.value!r}" for g in self.gates)
        kind = "" if self.fallback is None else f", runs eagerly: {self.fallback.reason}"
        return f"inputs {shapes or 'none'}, {len(self.parts)} values from outside{gates}, {self.hits} hits{kind}"


VALUE, HELD, ITEMS, DICT, OBJECT = range(5)  # what opens a row of the extension's; a tensor's is its fingerprint
DEEPEST = 12  # containers inside each other


def _rows(arguments: tuple) -> tuple | None:
    """How the extension compares arguments; None where it cannot."""
    seen: set[int] = set()  # containers and objects; one that is met twice makes a class of its own
    rows = tuple([_row(x, seen, 0) for x in arguments])
    return None if None in rows else rows


def _row(x: Any, seen: set[int], depth: int) -> Any:
    kind = type(x)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return fingerprint(x)
    if plain(x):
        return VALUE, x
    if kind in (tuple, list, dict) or (isinstance(x, tuple) and not hasattr(x, "__dict__")):
        held = dict(enumerate(x)) if isinstance(x, (tuple, list)) else x
    elif opaque(x):
        e = entry(x)
        return (HELD, e[2].held, kind) if e[0] == "object" and len(e) == 3 and type(e[2].held) is weakref.ref else None
    else:
        held = attributes(x)
    if held is None or id(x) in seen or depth > DEEPEST or not all(map(plain, held)):
        return None
    seen.add(id(x))
    rows = tuple([_row(v, seen, depth + 1) for v in held.values()])
    if None in rows:
        return None
    if isinstance(x, (tuple, list)):
        return ITEMS, kind, rows
    return (DICT, tuple(held), rows) if kind is dict else (OBJECT, weakref.ref(x), kind, tuple(held), rows)


def _always(args: tuple, kwargs: dict[str, Any]) -> tuple:
    return ()


def _identical(a: Source, b: Source, args: tuple, kwargs: dict[str, Any]) -> bool:
    try:
        return a.get(args, kwargs) is b.get(args, kwargs)
    except Exception:
        return False
