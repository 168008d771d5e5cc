"""Random programs of reductions and passes over the same elements, on operands of different layouts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 17, 33)
MOST = 20_000  # elements
UNARY = ("{}", "{}.tanh()", "{}.exp().clamp(max=9)", "{}.sigmoid()", "{} / (1 + {}.abs())", "{}.abs()", "{} * 0.5")
BINARY = ("{} * {}", "{} + {}", "{} - {}", "torch.maximum({}, {})", "{} * {}.sigmoid()", "torch.where({}, {}, 0.5)", "torch.where({} > 0, {}, 1.5)")
WHOLE = ("{v}.sum({d})", "{v}.mean({d})", "{v}.amax({d})", "{v}.var({d}, correction=0)", "torch.linalg.vector_norm({v}, dim={d})", "({v} > 0).any({d}).to({v}.dtype)",
         "{v}.logsumexp({d})", "{v}.amin({d})", "({v} > 0).sum({d})", "{v}.argmax().to({v}.dtype)")  # fmt: skip
ALONG = ("{v}.softmax({k})", "{v}.log_softmax({k})", "torch.nn.functional.softmin({v}, {k})", "{v} - {v}.amax({k}, keepdim=True)")
TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-9, torch.bfloat16: 6e-2, torch.float16: 1e-2}


@dataclass
class Program:
    """One program: its text, its function, its inputs, and whether it is differentiated."""

    text: str
    function: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    trains: bool

    def exact(self) -> list[torch.Tensor]:
        """The results in double precision."""
        return self.run(self.function, tuple(t.double() if t.is_floating_point() else t for t in self.inputs))

    def run(self, f: Callable[..., Any], inputs: tuple[torch.Tensor, ...] = ()) -> list[torch.Tensor]:
        """The results of `f`, and the gradients."""
        inputs = inputs or self.inputs
        if self.trains:
            inputs = tuple(t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs)
        out = list(f(*inputs))
        if self.trains:
            roots = [t for t in out if t.requires_grad]
            weights = [torch.linspace(0.5, 1.5, t.numel(), dtype=torch.float64).view(t.shape).to(t.dtype) for t in roots]
            leaves = [t for t in inputs if t.requires_grad]
            if roots:
                out += [g for g in torch.autograd.grad(roots, leaves, weights, allow_unused=True) if g is not None]
        return [t.detach() for t in out]


def layout(rng: random.Random, x: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    """The same values, dense in this or some order of the dimensions, or every other element of such."""
    rank = x.dim()
    if order is None and rng.random() < 0.3 and rank in (4, 5):
        return x.contiguous(memory_format=torch.channels_last if rank == 4 else torch.channels_last_3d)
    if order is None:
        order = rng.sample(range(rank), rank) if rng.random() < 0.7 else list(range(rank))
    back = [order.index(k) for k in range(rank)]
    dense = x.permute(order)
    if rng.random() < 0.1:
        return dense.repeat_interleave(2, -1)[..., ::2].permute(back)
    return dense.contiguous().permute(back)


def program(seed: int) -> Program:
    """The program of a number."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rank = rng.choice((2, 3, 3, 4, 4, 4, 5))
    while True:
        shape = [rng.choice(SIZES) for _ in range(rank)]
        if math.prod(shape) <= MOST:
            break
    dtype = rng.choice((torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16))
    names, inputs, common = list("xabcdm"), [], rng.sample(range(rank), rank)  # most operands lie in one order
    for name in names:
        size = [n if name == "x" or rng.random() < 0.7 else 1 for n in shape]
        t = torch.randn(size)
        inputs.append(layout(rng, t > 0 if name == "m" else t.to(dtype), common if name != "x" and rng.random() < 0.7 else None))
    lines: list[str] = []
    values, full = ["x", "a", "b", "c", "d"], ["x"]

    def new(text: str) -> str:
        name = f"v{len(lines)}"
        lines.append(f"    {name} = {text}")
        values.append(name)
        return name

    def pointwise(last: str) -> str:
        first = UNARY[rng.randrange(len(UNARY))] if rng.random() < 0.6 else "{}"
        made = new(first.format(*[last] * first.count("{}")))
        for _ in range(rng.randint(1, 5)):
            second = rng.choice(BINARY)
            other = "m" if "where({}," in second else rng.choice(values if rng.random() < 0.4 else "abcd")
            made = new(second.format(*((other, made) if other == "m" or rng.random() < 0.3 else (made, other))))
        full.append(made)
        return made

    reduced: list[str] = []
    for _ in range(rng.randint(1, 3)):
        v = pointwise(rng.choice(full[-2:]))
        if rng.random() < 0.35:
            v = new(rng.choice(ALONG).format(v=v, k=rng.randrange(rank)))
            full.append(v)
        if rng.random() < 0.8:
            some = sorted(rng.sample(range(rank), rng.randint(1, rank)))
            d = f"{tuple(range(rank)) if rng.random() < 0.5 else tuple(some)}, keepdim=True"
            text = rng.choice(WHOLE)
            if dtype is not torch.float32 and "argmax" in text:
                text = WHOLE[0]
            reduced.append(new(text.format(v="x" if "argmax" in text else v, d=d)))
        pointwise(rng.choice(("x", v)))
        if reduced:
            full.append(new(f"{full[-1]} * {reduced[-1]}" if rng.random() < 0.7 else f"{full[-1]} - {reduced[-1]} * {rng.choice(full)}"))
    results = list(dict.fromkeys([full[-1], *rng.sample(reduced, min(len(reduced), 1)), rng.choice(full[1:])]))
    text = "\n".join([f"def f({', '.join(names)}):", *lines, f"    return {', '.join(results)},"])
    space: dict[str, Any] = {"torch": torch}
    exec(text, space)
    return Program(text, space["f"], tuple(inputs), rng.random() < 0.25)


def differs(p: Program, got: list[torch.Tensor], want: list[torch.Tensor]) -> str | None:
    """What differs between two runs of a program, or None; strides of gradients are not compared."""
    if len(got) != len(want):
        return f"{len(got)} results for {len(want)}\n{p.text}"
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        if (g.dtype, g.shape, p.trains or g.stride()) != (w.dtype, w.shape, p.trains or w.stride()):
            return f"result {k}: {g.dtype} {tuple(g.shape)} {g.stride()} for {w.dtype} {tuple(w.shape)} {w.stride()}\n{p.text}"
        a, b = g.double(), w.double()
        same = (a == b) | (a.isnan() & b.isnan())
        scale = b.nan_to_num(0.0, 0.0, 0.0).abs().amax() if b.numel() else 1.0
        room = TOLERANCE.get(w.dtype, 0) * (1 + scale)
        off = ~same & ~((a - b).abs() <= room)
        if p.inputs[0].dtype.itemsize == 2 and off.any():  # eager rounds after every operator: as near to the exact value will do
            exact = p.exact()[k]
            off &= ~((a - exact).abs() <= room + 2 * (b - exact).abs().nan_to_num(math.inf).amax())
        if off.any():
            sizes = ", ".join(f"{n} {tuple(t.shape)} {t.stride()} {t.dtype}" for n, t in zip("xabcdm", p.inputs, strict=True))
            return f"result {k}: {int(off.sum())} of {off.numel()} differ, by up to {(a - b).abs()[off].max():.4g}\n{p.text}\n{sizes}"
    return None
