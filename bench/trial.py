"""One sample of the operator database, eagerly and compiled: what is compared, and how near it has to be.

In: an operator and a sample of `op_db`, and a back end.  Out: a record with the outcome ("ok" or "wrong"), why parts ran
on torch, and how many kernels and library calls there were.
Always: both runs start from the same generator state on clones of the sample's inputs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

import tensorplay as tp
from tensorplay.compiled import compiled_of
from tensorplay.errors import FallbackWarning

UNDEFINED = re.compile(r"(new_)?empty(_like|_strided|_permuted)?$")  # values that no two calls share: only metadata counts
EITHER_ZERO = re.compile(r"(clamp(_min|_max)?|f?max(imum)?|f?min(imum)?|a(max|min)|aminmax|nn\.functional\.softshrink)(\..*)?$")  # eager's vector and scalar code differ
LARGE = 1 << 16  # elements of an enlarged sample


@dataclasses.dataclass(frozen=True)
class Bound:
    """How far a float may be from eager's: `relative` of its own size and `scale` of its tensor's largest (at least 1)."""

    relative: float
    scale: float


BOUNDS = {
    torch.float32: Bound(2e-5, 2e-6),  # sums in another order, functions within 4 units in the last place
    torch.bfloat16: Bound(2**-6, 2**-8),  # one rounding instead of one an operator
    torch.float64: Bound(1e-12, 1e-14),
}
GRADIENTS = {  # sums over more terms, quotients of differences
    torch.float32: Bound(1e-4, 1e-4),
    torch.bfloat16: Bound(2**-4, 2**-4),
    torch.float64: Bound(1e-11, 1e-11),
}


def equal(got: torch.Tensor, want: torch.Tensor, zeros: bool = True, bounds: dict[torch.dtype, Bound] = BOUNDS) -> bool:
    """Integers exactly; floats within their bound, NaN, infinities and the signs of `zeros` as eager."""
    if not (want.is_floating_point() or want.is_complex()):
        return torch.equal(got, want)
    if want.is_complex():
        return equal(torch.view_as_real(got.resolve_conj()), torch.view_as_real(want.resolve_conj()), zeros, bounds)
    bound = bounds.get(want.dtype, bounds[torch.bfloat16])
    g, w = got.double(), want.double()
    finite = w.isfinite()
    scale = max(1.0, w[finite].abs().max().item() if finite.any() else 0.0)
    near = (g - w).abs() <= bound.relative * w.abs() + bound.scale * scale
    if zeros:
        near &= (g != 0) | (w != 0) | (g.signbit() == w.signbit())
    same = torch.where(finite, near, (g == w) | (g.isnan() & w.isnan()))
    return bool(same.all())


def compare(got: object, want: object, values: bool = True, zeros: bool = True, bounds: dict[torch.dtype, Bound] = BOUNDS) -> bool:
    """Same structure, metadata and, where asked for, values and signs of zeros."""
    if isinstance(want, torch.Tensor):
        if not isinstance(got, torch.Tensor) or got.shape != want.shape or got.dtype != want.dtype or got.layout != want.layout:
            return False
        if want.layout != torch.strided or want.is_quantized:
            return compare(got.to_dense(), want.to_dense(), values, zeros, bounds)
        if want.numel() and got.stride() != want.stride():
            return False
        return not values or want.is_meta or equal(got.flatten(), want.flatten(), zeros, bounds)  # arithmetic has up to 64 dimensions
    if isinstance(want, (tuple, list)):
        return type(got) is type(want) and len(got) == len(want) and all(compare(g, w, values, zeros, bounds) for g, w in zip(got, want))
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(compare(got[k], w, values, zeros, bounds) for k, w in want.items())
    return type(got) is type(want) and (got == want or got != got)


def nearer(got: object, want: object, exact: object) -> bool:
    """Whether each float is as near to the exact value as twice what eager's is away from it, and a rounding of the largest."""
    mine, its, true = ([t for t in tree_leaves(v) if isinstance(t, torch.Tensor)] for v in (got, want, exact))
    if not [t.shape for t in mine] == [t.shape for t in its] == [t.shape for t in true]:
        return False
    unit = torch.finfo(torch.bfloat16 if any(t.dtype == torch.bfloat16 for t in its) else torch.float32).eps
    for g, w, e in zip(mine, its, true):
        if not w.is_floating_point():
            if not equal(g, w):
                return False
            continue
        g, w, e = g.double(), w.double(), e.double()
        known = e.isfinite() & w.isfinite()
        scale = e[known].abs().max().clamp(min=1) if known.any() else 1.0
        allowed = 2 * (w - e)[known].abs().max() if known.any() else 0.0
        if not bool(((g == w) | (g.isnan() & w.isnan()) | ((g - e).abs() <= allowed + unit * scale)).all()):
            return False
    return True


def metadata(x: object) -> object:
    """Shapes, strides, dtypes and layouts in place of tensors."""
    return tree_map(lambda t: (tuple(t.shape), t.stride() if t.layout == torch.strided else t.layout, t.dtype) if isinstance(t, torch.Tensor) else t, x)


def cloned(x: object) -> object:
    if not isinstance(x, torch.Tensor):
        return x
    made = copy.deepcopy(x.detach()) if x.layout == torch.strided else x.detach().clone()
    return made.requires_grad_(x.requires_grad)


class Trial:
    """One sample, run eagerly and compiled, without gradients."""

    bounds = BOUNDS

    def __init__(self, op: Any, sample: Any, backend: Any) -> None:
        self.op, self.sample, self.caught = op, sample, []
        self.compiled = tp.compile(self.function, backend=backend)

    def function(self, x: object, *args: object, **kwargs: object) -> object:
        return self.op.op(x, *args, **kwargs)

    def answer(self, function: Callable[..., object], leaves: tuple) -> object:
        with torch.no_grad():
            return function(leaves[0], *leaves[1], **leaves[2])

    def run(self, function: Callable[..., object]) -> tuple:
        """What the function gave, what it left in its arguments, and the generator's state."""
        leaves = tree_map(cloned, (self.sample.input, tuple(self.sample.args), dict(self.sample.kwargs)))
        torch.default_generator.manual_seed(0)  # torch.manual_seed queues a traceback for each device that is not there
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                out = ("value", self.answer(function, leaves))
            except Exception as failure:
                out = ("error", type(failure).__name__, str(failure).splitlines()[:1])
        self.caught += caught
        return out, leaves, torch.default_generator.get_state()

    def difference(self, got: tuple, want: tuple, values: bool = True, zeros: bool = True) -> str:
        """Why one run is not as good as the other; '' where it is."""
        (out, leaves, state), (expected, kept, drawn) = got, want
        shown = f"eager {expected!r:.300} compiled {out!r:.300}"
        if out[0] == "error" or expected[0] == "error":
            return "" if out == expected else shown  # class and first line
        if not torch.equal(state, drawn):
            return f"generator: {shown}"
        for what, mine, its in (("result", out[1], expected[1]), ("arguments", leaves, kept)):
            if not compare(mine, its, False):
                return f"{what}: eager {metadata(its)!r:.300} compiled {metadata(mine)!r:.300}"
            if values and not compare(mine, its, True, zeros, self.bounds):
                exact = self.exact()[what == "arguments"]
                if exact is None or not nearer(mine, its, exact):
                    return f"{what}: {shown}"
        return ""

    def exact(self) -> tuple[object, object]:
        """Result and arguments of the function in float64, None where it has none."""
        sample = self.sample

        def doubled(x: object) -> object:
            if not isinstance(x, torch.Tensor):
                return torch.float64 if x in (torch.bfloat16, torch.float32) else x
            made = copy.deepcopy(x.detach())
            return made.double().requires_grad_(x.requires_grad) if x.dtype in (torch.bfloat16, torch.float32) else made

        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            leaves = tree_map(doubled, (sample.input, tuple(sample.args), dict(sample.kwargs)))
            torch.default_generator.manual_seed(0)
            return self.answer(self.function, leaves), leaves
        return None, None

    def result(self) -> dict[str, object]:
        asked = not UNDEFINED.match(self.op.name), not EITHER_ZERO.match(self.op.name)
        want = self.run(self.function)
        detail = ""
        for _ in range(2):
            detail = detail or self.difference(self.run(self.compiled), want, *asked)
        return {"outcome": "wrong" if detail else "ok", "detail": detail} | self.how()

    def how(self) -> dict[str, object]:
        """What ran on torch and why, and what was compiled."""
        about = tp.explain(self.compiled)
        warned = {str(w.message) for w in self.caught if issubclass(w.category, FallbackWarning)}
        reasons = {f.reason for f in about.fallbacks} or warned
        reasons = sorted(r[:200] for r in reasons if not any(other.endswith(f": {r}") for other in reasons))
        return {"fallbacks": reasons, "kernels": len(about.kernels), "calls": len(about.externs)}


class GradientTrial(Trial):
    """One sample with the gradients of every input; a sample whose eager gradients change from run to run is no sample."""

    bounds = GRADIENTS

    def answer(self, function: Callable[..., object], leaves: tuple) -> object:
        """Outputs, and gradients for random tangents."""
        given = [t for t in tree_leaves(leaves) if isinstance(t, torch.Tensor)]
        outs = [t for t in tree_leaves(function(leaves[0], *leaves[1], **leaves[2])) if isinstance(t, torch.Tensor)]
        live = [t for t in outs if t.requires_grad]
        if live:
            torch.default_generator.manual_seed(1)
            torch.autograd.backward(live, [torch.randn_like(t) for t in live])
        return [t.detach() for t in outs], [t.requires_grad for t in outs], [t.grad for t in given]

    def result(self) -> dict[str, object]:
        first = self.run(self.function)
        if first[0][0] == "error" or not any(first[0][1][1]) or self.difference(self.run(self.function), first, zeros=False):
            return {"outcome": "skipped", "detail": "eager raises, has no gradient, or gives others each time"}
        detail = ""
        for _ in range(2):
            detail = detail or self.difference(self.run(self.compiled), first, not UNDEFINED.match(self.op.name), zeros=False)
        versions = compiled_of(self.compiled).versions
        trained = bool(versions) and hasattr(versions[-1].program, "partition")
        return {"outcome": "wrong" if detail else "ok", "trained": trained, "detail": detail} | self.how()


def enlarged(sample: Any) -> Any | None:
    """The sample with every dimension longer than 1 several times as long, so that whole vectors are filled; None: too large."""
    for factor in (7, 4):
        sizes = []

        def grow(x: object) -> object:
            if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
                return x
            y = x.repeat([factor if n > 1 else 1 for n in x.shape])  # noqa: B023
            sizes.append(y.numel())  # noqa: B023
            return y

        found = sample.transform(grow)
        if max(sizes, default=0) <= LARGE:
            return found
    return None


def inputs_of(op: Any, kind: str, dtype: torch.dtype, backward: bool = False) -> Iterator[Any]:
    """The database's samples; larger ones; strided ones; more sizes and special values; or what the operator must refuse."""
    if kind == "errors":
        if dtype == torch.float32 and op.error_inputs_func is not None:  # they choose their own dtypes
            yield from (e.sample_input for e in op.error_inputs("cpu"))
    elif kind == "reference":
        yield from op.reference_inputs("cpu", dtype, requires_grad=backward)
    else:
        for sample in op.sample_inputs("cpu", dtype, requires_grad=backward):
            found = sample.noncontiguous() if kind == "noncontiguous" else enlarged(sample) if kind == "enlarged" else sample
            if found is not None:
                yield found
