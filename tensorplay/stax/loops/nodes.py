"""Loop-level IR: tensors as functions from index to value (section 6).

In: nothing (this file only declares).  Out: `Loops`, what lowering produces and scheduling consumes.
Always: nodes are frozen and topologically ordered; every buffer is defined once (an input, a constant, or one
output of one node); a node reads buffers only through `load` expressions or, in an `Extern`, through `Ref`s.
The one exception to single assignment is a *write-back*: a `Compute` whose output is an input's buffer. It stands
behind every reader of that input's old value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..expr import Expr, linear, loads


def row_major(size: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    out, step = [], 1
    for n in reversed(size):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))


def dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the strides are a permutation of row-major ones: no gap and no overlap."""
    step = 1
    for st, n in sorted((st, n) for n, st in zip(size, stride, strict=True) if n != 1):
        if st != step:
            return False
        step *= n
    return True


@dataclass(frozen=True, slots=True)
class Spec:
    """Metadata of one tensor value of a graph: what `node.meta['spec']` holds after its sample value is released.

    `offset` is the storage offset in elements, meaningful between a view and its base in one graph.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int = 0

    @staticmethod
    def of(t: torch.Tensor) -> Spec:
        return Spec(tuple(t.shape), tuple(t.stride()), t.dtype, t.device, t.storage_offset())

    @property
    def numel(self) -> int:
        n = 1
        for s in self.size:
            n *= s
        return n


@dataclass(frozen=True, slots=True)
class Buffer:
    """A strided block of memory. Element i lies at `linear(i, stride)` elements from the buffer's pointer.

    The pointer of an input is `tensor.data_ptr()`, so that a storage offset never shows.
    """

    name: str
    dtype: torch.dtype
    device: torch.device
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def at(self, point: Sequence[Expr]) -> Expr:
        """The linear offset of a point, in elements."""
        return linear(point, self.stride)

    @property
    def span(self) -> int:
        """Elements from the first to the last one that the layout reaches; 0 when empty."""
        if 0 in self.size:
            return 0
        return 1 + sum((n - 1) * st for n, st in zip(self.size, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        return self.span * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Ref:
    """A strided view of a buffer: an argument of a library call, or an output of the graph."""

    buffer: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0  # elements from the buffer's pointer
    number: bool = False  # the one element as a Python number


@dataclass(frozen=True, slots=True)
class Pointwise:
    """out[vars] = body."""

    vars: tuple[Expr, ...]
    body: Expr


# kind -> number of results. `sum` and `prod` accumulate in the body's dtype; amax and amin propagate NaN; argmax,
# argmin give the first index (int64) of the extreme along the flattened rvars, NaN counting as the extreme;
# max_index and min_index give the value and that index; welford gives the mean and the sum of squared deviations.
REDUCTIONS = {
    "sum": 1, "prod": 1, "amax": 1, "amin": 1, "any": 1, "all": 1, "argmax": 1, "argmin": 1,
    "max_index": 2, "min_index": 2, "welford": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reduction:
    """out[vars] = kind over rvars of body. An empty range gives the identity (0, 1, -inf, inf, False, True)."""

    kind: str
    vars: tuple[Expr, ...]
    rvars: tuple[Expr, ...]
    body: Expr


# kind -> number of results; inclusive, along one variable
SCANS = {"sum": 1, "prod": 1, "logaddexp": 1, "max_index": 2, "min_index": 2}


@dataclass(frozen=True, slots=True)
class Scan:
    """out[vars] = kind of body over all values of vars[axis] up to and including this one."""

    kind: str
    vars: tuple[Expr, ...]
    axis: int
    body: Expr


Loop = Pointwise | Reduction | Scan


@dataclass(frozen=True, slots=True)
class Compute:
    """One loop and where its results go: element `vars` of outputs[k] is stored at linear offset at[k].

    The value is cast to the output buffer's dtype by the store.
    """

    outputs: tuple[Buffer, ...]
    at: tuple[Expr, ...]
    loop: Loop
    origins: tuple[str, ...] = ()  # names of the operator-graph nodes that it came from

    @property
    def name(self) -> str:
        return self.outputs[0].name

    @property
    def vars(self) -> tuple[Expr, ...]:
        return self.loop.vars

    @property
    def rvars(self) -> tuple[Expr, ...]:
        return self.loop.rvars if isinstance(self.loop, Reduction) else ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the buffers that the body and its indices load, each once, in order of appearance."""
        return tuple(dict.fromkeys(n.name for n in loads(self.loop.body, *self.at)))

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(b.name for b in self.outputs)


@dataclass(frozen=True, slots=True)
class Extern:
    """A call of a library operator (or, where no row exists, a fallback) through torch.

    `args` and `kwargs` hold `Ref`s where the operator takes tensors. `outputs` has one entry for each tensor
    result, None where the operator returns None or a result that nobody reads.
    """

    outputs: tuple[Buffer | None, ...]
    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    library: bool = True  # False: a fallback, counted and named in tp.explain
    reason: str = ""  # of a fallback
    ordered: bool = False  # draws random numbers or has an effect: runs even if unread, in order with its like
    origins: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return next((b.name for b in self.outputs if b is not None), self.target.__name__)

    @property
    def refs(self) -> tuple[Ref, ...]:
        return tuple(_refs((self.args, tuple(v for _, v in self.kwargs))))

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(r.buffer for r in self.refs))

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(b.name for b in self.outputs if b is not None)


def _refs(x: Any) -> Iterator[Ref]:
    if isinstance(x, Ref):
        yield x
    elif isinstance(x, (tuple, list)):
        for y in x:
            yield from _refs(y)


Node = Compute | Extern


@dataclass(frozen=True)
class Loops:
    """A whole graph at loop level.

    `outputs` follow the operator graph's flat outputs: a `Ref` to a buffer (to an input's, where eager returns a
    view of that input or the input itself), or a Python value such as None.
    """

    inputs: tuple[Buffer, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Ref | Any, ...]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)  # by buffer name; never written
    lines: dict[str, str] = field(default_factory=dict)  # operator-graph node -> 'file:line' of the user's source

    @property
    def buffers(self) -> dict[str, Buffer]:
        """Every buffer by name."""
        found = {b.name: b for b in self.inputs}
        for name, t in self.constants.items():
            found[name] = Buffer(name, t.dtype, t.device, tuple(t.shape), tuple(t.stride()))
        for node in self.nodes:
            for b in node.outputs:
                if b is not None:
                    found.setdefault(b.name, b)
        return found

    @property
    def written_inputs(self) -> tuple[str, ...]:
        """Inputs that the graph writes back to."""
        names = {b.name for b in self.inputs}
        return tuple(dict.fromkeys(w for node in self.nodes for w in node.writes if w in names))

    def __str__(self) -> str:
        from .text import show

        return show(self)
