"""Sequences of calls, with changes of the program's state between them, run eagerly and compiled.

A case is a function that returns (function, steps, *looks): a step is a tuple of arguments, or a callable that changes
something; each look is called after every call, for what the call left behind.
"""

import contextlib
import io
import random
import warnings

import numpy as np
import torch

import tensorplay as tp
from tensorplay.compiled import compiled_of

CASES = {}


def case(f):
    """Enters a case under its name, in the table of its module."""
    CASES.setdefault(f.__module__, {})[f.__name__] = f
    return f


def T(*values):
    return torch.tensor(values, dtype=torch.float32)


def same(a, b, tolerance=0.0):
    """Equal in type, metadata and value; floats up to a tolerance, where one is given."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if type(a) is not type(b) or (a.dtype, a.shape, a.layout, a.requires_grad) != (
            b.dtype,
            b.shape,
            b.layout,
            b.requires_grad,
        ):
            return False
        if a.layout is not torch.strided:
            return torch.equal(a.detach().to_dense(), b.detach().to_dense())
        a, b = torch.nan_to_num(a.detach()), torch.nan_to_num(b.detach())
        return torch.equal(a, b) or bool(tolerance and a.is_floating_point() and torch.allclose(a, b, tolerance, tolerance))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y, tolerance) for x, y in zip(a, b))
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k], tolerance) for k in a)
    if hasattr(a, "__dict__") and not isinstance(a, type):
        return type(a).__qualname__ == type(b).__qualname__ and same(a.__dict__, b.__dict__, tolerance)
    return type(a) is type(b) and (a == b or (a != a and b != b))


def outcomes(make, wrap, step):
    """What every call gave or raised, what it left behind, and the state of the generator at the end."""
    found = []
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    f, steps, *looks = make()
    g = wrap(f)
    for item in steps:
        if callable(item):
            item()
            continue
        try:
            found.append(step(g, *item))
        except Exception as error:
            found.append((type(error).__name__, (str(error).splitlines() or [""])[0]))
        found += [look() for look in looks]
    return [*found, torch.get_rng_state()[:32].tolist()], g


def call(f, *args):
    return f(*args)


def check(make, backend="eager", step=call, tolerance=0.0):
    """Runs a case both ways; returns the compiled function."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as first:
        warnings.simplefilter("ignore")
        want, _ = outcomes(make, lambda f: f, step)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as second:
        warnings.simplefilter("ignore")
        got, compiled = outcomes(make, lambda f: tp.compile(f, backend=backend, recompile_limit=16), step)
    for k, (a, b) in enumerate(zip(want, got, strict=True)):
        assert same(a, b, tolerance), (k, a, b, compiled_of(compiled).fallbacks)
    assert first.getvalue() == second.getvalue()
    reasons = [fallback.reason for fallback in compiled_of(compiled).fallbacks]
    assert not any(reason.startswith("capture failed") for reason in reasons), reasons
    return compiled_of(compiled)
