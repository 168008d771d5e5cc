"""Graphs to run passes on, and the comparison that sees what a caller sees: values, types, aliases, written inputs."""

import itertools

import torch
from torch import fx

import tensorplay as tp
from tensorplay.capture.gates import Trait
from tensorplay.capture.trees import spec, tensors
from tensorplay.capture.watch import storage_key
from tensorplay.testing import CAP, eq


def captured(f, *args):
    """The captured graph of f on these arguments."""
    cf = tp.compile(f, backend="eager")
    cf(*copies(args))
    return CAP(cf)


class _Sampled(fx.Interpreter):
    def run_node(self, n):
        taken = tensors([self.env[a] for a in n.all_input_nodes])
        before = [t._version for t in taken]
        result = super().run_node(n)
        lies = frozenset(map(storage_key, tensors(result)))
        writes = frozenset(storage_key(t) for t, v in zip(taken, before, strict=True) if t._version != v)
        n.meta["spec"], n.meta["trait"] = spec(result), Trait(lies, writes, False, lies)
        return result


def traced(f, *args):
    """f by torch.fx.symbolic_trace, which sees how operators were written, with the sample values of one run."""
    module = fx.symbolic_trace(f)
    _Sampled(module, garbage_collect_values=False).run(*copies(args))
    return module


def copies(args):
    """Copies that keep layout and shared memory."""
    storages = {}
    out = []
    for t in args:
        key = storage_key(t)
        if key not in storages:
            storages[key] = t.detach().untyped_storage().clone()
        out.append(torch.empty(0, dtype=t.dtype).set_(storages[key], t.storage_offset(), t.shape, t.stride()))
    return [c.requires_grad_(t.requires_grad) for c, t in zip(out, args, strict=True)]


def observed(f, args):
    """What a caller sees of one call: results and inputs after it, and which of them share memory; or the error."""
    args = copies(args)
    torch.manual_seed(0)
    try:
        results = f(*args)
    except (RuntimeError, IndexError, TypeError) as error:
        return type(error), str(error)
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    results = [r for r in results if isinstance(r, torch.Tensor)]
    seen = [*results, *args]
    shared = [storage_key(a) == storage_key(b) for a, b in itertools.combinations(seen, 2)]
    identical = [a is b for a, b in itertools.combinations(results, 2)]
    layout = [(t.dtype, t.shape, t.stride()) for t in seen]
    return [t.detach().clone() for t in seen], shared, identical, layout


def same(a, b):
    if isinstance(a[0], type) or isinstance(b[0], type):
        return a == b
    return len(a[0]) == len(b[0]) and all(map(eq, a[0], b[0])) and a[1:] == b[1:]


def difference(a, b):
    """Where two observations differ, for a test's message."""
    return f"{a}\n---- instead of\n{b}"
