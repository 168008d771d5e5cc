"""What a run gave and wrote: whether two runs of a function did the same to one call.

In: the recorder of a run that ended, and the parts of its result.  Out: an `Outcome`.
Always: a run that left state behind (a filled cache) may stand for the call only if the run after it, which found that
state, gave the same values, left the same in every tensor, and drew as many random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .kinds import SCALARS
from .numbers import is_kept
from .values import Values

Tensor = torch.Tensor


@dataclass(frozen=True)
class Outcome:
    """results: the tensors and scalars of the result, and the types of the rest. written: for each tensor of the
    caller (by identity) that has a stand-in, the tensor and the stand-in. generator: the state of the default one."""

    results: tuple[Any, ...]
    written: dict[int, tuple[Tensor, Tensor]]
    generator: Tensor

    def same(self, later: Outcome) -> bool:
        """Whether the later run did what this one did; a tensor without a stand-in in one of them was not written there."""
        pairs = [(self.written.get(i, (t, t))[1], copy) for i, (t, copy) in later.written.items()]
        pairs += [(copy, t) for i, (t, copy) in self.written.items() if i not in later.written]
        pairs.append((self.generator, later.generator))
        return (
            len(self.results) == len(later.results)
            and all(map(_same, self.results, later.results))
            and all(_equal(a, b) for a, b in pairs)
        )


def outcome(parts: list[Any], recorder: Values) -> Outcome:
    """The outcome of a run, once its modes are off. parts: what its result consists of."""
    results = [x if isinstance(x, Tensor) or type(x) in SCALARS else x._value if is_kept(x) else type(x) for x in parts]
    return Outcome(tuple(results), dict(recorder._stand_ins), torch.get_rng_state())


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.stride(), a.requires_grad) == (b.stride(), b.requires_grad) and _equal(a, b)
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _equal(a: Tensor, b: Tensor) -> bool:
    """Equal in every element; NaN equals NaN."""
    if a is b:
        return True
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    with torch.no_grad():
        return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
