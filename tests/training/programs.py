"""Training programs that run once eagerly and once compiled: what they see must be the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tensorplay as tp
from tensorplay.compiled import compiled_of

Compile = Callable[[Any], Any]


def leaf(*size: int, seed: int = 0, grad: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(size))
    return torch.randn(size, generator=generator, dtype=dtype).requires_grad_(grad)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def grads(*modules: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for m in modules for p in m.parameters()]


def caught(f: Callable[[], Any]) -> Any:
    """The result, or the type of the error and its first words."""
    try:
        return f()
    except Exception as error:
        return type(error).__name__, " ".join(str(error).split()[:6])


def see(x: Any) -> Any:
    """What a program observes of its values, as it is now."""
    if isinstance(x, torch.Tensor):
        return x.dtype, tuple(x.shape), x.stride(), x.requires_grad, x.detach().clone()
    if isinstance(x, (list, tuple)):
        return [see(v) for v in x]
    if isinstance(x, dict):
        return {k: see(v) for k, v in x.items()}
    return x


def differ(a: Any, b: Any, tolerance: float, path: str = "") -> str:
    """Where two observations differ first; '' where they agree."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        exact = not (a.is_floating_point() or a.is_complex())
        close = torch.equal(a, b) if exact else torch.allclose(a, b, tolerance, tolerance, equal_nan=True)
        return "" if close else f"{path}: {a.flatten()[:4]} against {b.flatten()[:4]}"
    if type(a) is not type(b) or (isinstance(a, (list, tuple, dict)) and len(a) != len(b)):
        return f"{path}: {a!r:.200} against {b!r:.200}"
    if isinstance(a, dict):
        return differ(list(a.items()), list(b.items()), tolerance, path)
    if isinstance(a, (list, tuple)):
        found = (differ(x, y, tolerance, f"{path}.{k}") for k, (x, y) in enumerate(zip(a, b, strict=True)))
        return next(filter(None, found), "")
    return "" if a == b else f"{path}: {a!r} against {b!r}"


def agree(program: Callable[[Compile], Any], falls_back: str = "", tolerance: float = 1e-5) -> list[Any]:
    """Runs `program` with a compiler that does nothing and with ours; what `tp.compile` gave, in order.

    falls_back: a word of the reason why the program may not run natively; '' compiles strictly.
    """
    made = []

    def compiled(f: Any) -> Any:
        made.append(tp.compile(f, strict_native=not falls_back))
        return made[-1]

    want = see(program(lambda f: f))
    with warnings.catch_warnings():
        if falls_back:
            warnings.simplefilter("ignore", tp.FallbackWarning)
        got = see(program(compiled))
    found = differ(got, want, tolerance)
    assert not found, found
    reasons = [f.reason for cf in made for f in compiled_of(cf).fallbacks]
    assert any(falls_back in r for r in reasons) if falls_back else not reasons, reasons
    return made
