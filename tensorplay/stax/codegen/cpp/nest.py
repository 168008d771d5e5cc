"""From a kernel to a C++ function: which loops, in which order, on how many threads.

In: a `Kernel` and the target.  Out: a `Function`: text, parameters, checks.
Always: results do not depend on which thread runs what; every store of a full point stands in the last pass, behind
all its loads, since the memory plan may put an output where an input dies.

Structures: `points` (no reduction; lanes along the best dimension), `rows` (a row at a time, in passes, results in
registers), `columns` (lanes across rows: a tile of columns, results in arrays of L1), `split` (few results, long
reductions: parts of the reduction on threads, combined in order), `scan`. Where lanes do not pay, the same
structures run on scalars.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...dtypes import TABLE
from ...schedule.plan import Kernel
from ..target import Target
from . import folds as F
from .body import aligned
from .columns import TILE, tiles
from .points import PART, points
from .rows import rows
from .scan import scan
from .shape import Fold, Result, shape_of
from .split import CHUNKS, split
from .writer import Writer, limit

SHARES = 256  # parts that a launch is cut into, about
LEAST_NS = 2_000  # the least work of a part


@dataclass(frozen=True)
class Function:
    """A C++ function without its name, which the unit puts in front of `parameters`."""

    parameters: str  # "(const f32 *in0, f32 *out0, int threads)"
    body: str
    buffers: tuple[str, ...]  # in parameter order
    types: tuple[str, ...]  # "const f32 *"
    checks: tuple[tuple[str, str], ...]
    structure: str
    parts: int = 1  # of a kernel of a launch, which takes some of them: the parameters end with begin and end
    flat: tuple[int, int] | None = None  # or, in elements, with low and high: how many a part has, and all have


def function_of(
    kernel: Kernel, target: Target, written_inputs: Sequence[str] = (), dry: bool = False
) -> Function:
    """The function of a kernel; `dry`: only its checks, for a kernel that writes the caller's tensors."""
    writer = Writer(shape_of(kernel, written_inputs), kernel, target)
    writer.body.dry = dry
    return write(writer)


def of_launch(kernels: Sequence[Kernel], target: Target, written_inputs: Sequence[str] = ()) -> tuple[list[Function], str]:
    """The functions of kernels that run as one parallel region, cut into parts of like length, and on how many threads."""
    writers = [Writer(shape_of(k, written_inputs), k, target) for k in kernels]
    total = sum(w.ns for w in writers)
    for w in writers:
        w.share = max(total / SHARES, LEAST_NS)
    return [write(w) for w in writers], limit(total)


def write(w: Writer) -> Function:
    """Chooses the structure, lets it write, and puts the function together."""
    shape = w.shape
    if any(v.args[1] == 0 for v in shape.dims):
        structure = "empty"
    elif shape.scan:
        structure = "scan"
        scan(w)
    elif not shape.rdims:
        structure = "points"
        points(w)
    else:
        structure = reduction(w)
    body = w.body
    types = []
    for name in body.arguments:
        const = "" if name in body.written else "const "
        types.append(f"{const}{TABLE[body.dtypes[name]].name} *")
    arguments = [f"{t}{p}" for t, p in zip(types, body.arguments.values(), strict=True)]
    lines = [*w.prologue(), *w.root.lines]
    if body.checks:
        lines = ["int status = 0, *const code = &status;", *lines, "return status;"]
    tail = ["i64 low", "i64 high"] if w.flat else ["i64 begin", "i64 end"] if w.share else ["int threads"]
    return Function(
        f"({', '.join([*arguments, *tail])})",
        aligned("  " + line for line in lines),
        tuple(body.arguments),
        tuple(types),
        tuple(body.checks),
        structure,
        w.parts,
        w.flat,
    )


def reduction(w: Writer) -> str:
    """Writes a kernel with reductions; gives the structure that it chose."""
    shape = w.shape
    if shape.empty_reduction:
        nothing(w)
        return "empty reduction"
    many = math.prod(v.args[1] for v in shape.dims)
    length = math.prod(v.args[1] for v in shape.rdims)
    spread = many
    if w.columns and w.v is not None:
        spread = many // w.v.args[1] * math.ceil(w.v.args[1] / TILE)
    indexed = any(f.kind in F.INDEXED for f in shape.folds)
    few = spread < 16 and many <= 2048 and length >= 8 * PART and not indexed
    if few and not w.serial() and many * CHUNKS * 8 * max(1, len(shape.folds)) <= 1 << 20:
        split(w)
        return "split"
    if w.columns:
        tiles(w)
        return "columns"
    rows(w)
    return "rows"


def nothing(w: Writer) -> None:
    """An empty reduction: identities, and what follows from them."""
    block, opened = w.over(w.shape.dims, True)
    for fold in w.shape.folds:
        for r in fold.results:
            w.register(block, fold, r, over_nothing(fold, r))
    w.row_stores(block)
    w.finish(opened)


def over_nothing(fold: Fold, r: Result) -> str:
    """The text of a result over no elements."""
    if fold.kind in ("argmax", "argmin") or (r is not fold.results[0] and fold.kind in F.INDEXED):
        return "(i64)0"
    if fold.kind in F.INDEXED:
        return f"({F.ctype(fold.body.dtype)})0"
    return F.identity(fold)
