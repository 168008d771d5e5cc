"""What a version limit says: which component of the key varies, and what helps.

In: the failing guards of a miss, for each version.  Out: one sentence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from .key.guards import GATES, Guard

_SHAPE = re.compile(r"\[2\]\[\d+\]$")


def advice(reasons: Sequence[Sequence[Guard]]) -> str:
    """Names the path that differs from the most versions (the first of these in a key's order) and the remedy."""
    count = Counter(path for failing in reasons for path in {g.path: None for g in failing})
    if not count:
        return "raise recompile_limit"
    path, _ = count.most_common(1)[0]
    guard = next(g for failing in reversed(reasons) for g in failing if g.path == path)
    return f"{_named(guard)} varies; {_remedy(guard)}, or raise recompile_limit"


def _named(guard: Guard) -> str:
    return "the outcome of a decision on data" if guard.condition == GATES else guard.path


def _remedy(guard: Guard) -> str:
    if guard.condition == GATES:
        return "keep the number a tensor (tp.graph.gate) or branch with torch.where"
    if type(guard.expected) is int and _SHAPE.search(guard.path):
        return "pad to fewer shapes"
    if isinstance(guard.expected, (int, float)) and not isinstance(guard.expected, bool):
        return "pass the number as a 0-dim tensor"
    if "the same object" in guard.condition:
        return "pass the same object at every call"
    return "call with fewer kinds of arguments"
