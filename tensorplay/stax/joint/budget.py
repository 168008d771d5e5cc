"""How much forward may keep: the options `partition` and `memory_budget` (row 5.09).

In: the options of tp.compile.  Out: `chosen(options)`, which picks the saved values of a region.
Always: random operators never run twice; library operators only where the budget asks for it, first those that take
least time for the bytes that they free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from .partition import Region, default, minimum

Choose = Callable[[Region], list[fx.Node]]


def chosen(options: dict[str, Any]) -> Choose:
    """The choice that the options ask for."""
    name = options.get("partition", "minimum")
    if name not in ("minimum", "default"):
        raise ValueError(f"options['partition'] is 'minimum' or 'default', not {name!r}")
    return default if name == "default" else minimum
