"""Guards: the key's components one by one, each with the place that it stands for (definition 2.3).

In: two keys of the same structure.  Out: the guards that tell them apart, none where the keys are equal.
Always: a guard is the projection of the key onto one position, so all guards hold exactly where the keys are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .signature import Entry, Identity, show

GATES = "control-flow gate outcomes match the traced branch"


@dataclass(frozen=True)
class Guard:
    """One component of the key: where it stands, what a call must show there, and what it showed."""

    path: str
    condition: str
    expected: Any
    actual: Any = None

    def __str__(self) -> str:
        return self.condition


_NAMED = ("attribute", "keyword")
MISSING = ("missing",)  # the entry of a value that can no longer be read


def differences(path: str, expected: Any, actual: Any, *, compact: bool = False) -> list[Guard]:
    """The guards of `expected` that `actual` fails, in the order of the entry.

    `compact` names a scalar by its path alone (`k == 2`); otherwise by its position in the entry.
    """
    found: list[Guard] = []
    stack = [(path, expected, actual)]
    while stack:
        where, a, b = stack.pop()
        if a is b or (type(a) is type(b) and a == b):
            continue
        if type(a) is Identity:
            found.append(Guard(where, f"{where} is {a!r}, the same object", a, b))
        elif not isinstance(a, tuple) or not isinstance(b, tuple):
            found.append(Guard(where, f"{where} == {show(a)}", a, b))
        elif b == MISSING:
            found.append(Guard(where, f"{where} can be read", True, False))
        elif a and b and isinstance(a[0], str) and a[0] != b[0]:
            found.append(Guard(where, f"{where} is a {_word(a)}", _word(a), _word(b)))
        elif compact and a and a[0] == "value":
            found.append(Guard(where, f"{where} == {show(a[2])}", a[2], b[2]))
        elif len(a) != len(b):
            found.append(Guard(f"len({where})", f"len({where}) == {len(a)}", len(a), len(b)))
        elif a and a[0] in _NAMED and a[:2] == b[:2]:
            stack.append((f"{where}.{a[1]}" if a[0] == "attribute" else f"{where}[{a[1]!r}]", a[2], b[2]))
        else:
            stack.extend((_place(where, k, a[k]), a[k], b[k]) for k in reversed(range(len(a))))
    return found


def guards(path: str, expected: Any, *, compact: bool = False) -> list[Guard]:
    """Every guard of an entry, leaf by leaf."""
    found: list[Guard] = []
    stack = [(path, expected)]
    while stack:
        where, a = stack.pop()
        if type(a) is Identity:
            found.append(Guard(where, f"{where} is {a!r}, the same object", a))
        elif not isinstance(a, tuple):
            found.append(Guard(where, f"{where} == {show(a)}", a))
        elif compact and a and a[0] == "value":
            found.append(Guard(where, f"{where} == {show(a[2])}", a[2]))
        elif a and a[0] in _NAMED:
            stack.append((f"{where}.{a[1]}" if a[0] == "attribute" else f"{where}[{a[1]!r}]", a[2]))
        else:
            skip = 1 if a and isinstance(a[0], str) else 0  # the word that opens an entry shows in its other parts
            stack.extend((_place(where, k, a[k]), a[k]) for k in reversed(range(skip, len(a))))
    return found


def _place(where: str, k: int, part: Any) -> str:
    """The path of part k of an entry; an attribute or keyword adds its own name later."""
    return where if isinstance(part, tuple) and part and part[0] in _NAMED else f"{where}[{k}]"


def _word(entry: Entry) -> str:
    return entry[1].__name__ if entry[0] in ("items", "dict", "value", "object") else entry[0]
