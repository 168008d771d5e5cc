"""What the caller chose about the front end: which optional composites are decomposed, how strict numbers are.

In: the options of tp.compile and what capture found.  Out: a frozen `Choices`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

OPTIONAL = ("softmax", "log_softmax", "group_norm")
NUMERICS = ("default", "strict")


@dataclass(frozen=True)
class Choices:
    """What the passes are told.

    training: gradients flow through the graph, so that composites keep their own derivative.
    strict: only rewrites that are exact on every value. optional: names of table 4.2 that are decomposed on request.
    autocast: operators may change the types of their arguments, so that none is replaced by others.
    """

    training: bool = False
    strict: bool = False
    optional: tuple[str, ...] = ()
    autocast: bool = False

    @staticmethod
    def of(options: Mapping[str, Any] | None, training: bool = False) -> Choices:
        options = options or {}
        asked, numerics = options.get("decompose", ()), options.get("numerics", "default")
        names = (asked,) if isinstance(asked, str) else tuple(asked)
        if unknown := [name for name in names if name not in OPTIONAL]:
            raise ValueError(f"options['decompose'] takes {', '.join(OPTIONAL)}, not {', '.join(map(repr, unknown))}")
        if numerics not in NUMERICS:
            raise ValueError(f"options['numerics'] is {' or '.join(map(repr, NUMERICS))}, not {numerics!r}")
        autocast = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
        return Choices(training, numerics == "strict", names, autocast)
