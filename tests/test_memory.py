"""Nothing outlives its use: arguments and results die by reference count, a compiled object with its versions (P18)."""

import gc
import resource
import sys
import weakref

import pytest
import torch
from torch import nn

import tensorplay as tp
from tensorplay.compiled import compiled_of


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def blocks():
    """Allocated blocks, and how many objects only the collector could free; it empties Python's free lists too."""
    cycles = gc.collect()
    return sys.getallocatedblocks(), cycles


def example(x, w):
    return (torch.relu(x + w) * 2).sum(-1)


def branchy(x, w):
    return x * 2 if x.sum() > -1e9 else w


@pytest.mark.parametrize("f", [example, branchy])
@pytest.mark.parametrize("backend", ["eager", "stax"])
def test_a_hundred_thousand_calls_leak_nothing(f, backend, no_collector):
    cf, x, w = tp.compile(f, backend=backend), torch.randn(4, 8), torch.randn(4, 8)
    with torch.no_grad():
        for k in range(1000):
            cf(x, w) if k % 2 else cf(x + 1, w)
        before, _ = blocks()
        for k in range(25_000):  # each of four cases: a hundred thousand in all
            cf(x, w) if k % 8 else cf(x + 1, w)
        after, cycles = blocks()
        assert after - before < 200 and cycles < 50


def test_misses_and_refused_calls_leak_nothing(no_collector):
    cf = tp.compile(lambda x, k: x * k, backend="eager", recompile_limit=2)
    x = torch.randn(3)
    with pytest.warns(tp.FallbackWarning):
        for k in range(100):
            cf(x, float(k))
    before, _ = blocks()
    for k in range(2000):
        cf(x, float(k % 50))
    after, cycles = blocks()
    assert after - before < 200 and cycles < 50


@pytest.mark.parametrize("backend", ["eager", "stax"])
def test_arguments_and_results_die_by_reference_count(backend, no_collector):
    cf = tp.compile(lambda x, w: (x + w, (x * w).sum()), backend=backend)
    with torch.no_grad():
        cf(torch.randn(3), torch.randn(3))
        for _ in range(3):
            x, w = torch.randn(3), torch.randn(3)
            out = cf(x, w)
            watched = [weakref.ref(t) for t in (x, w, *out)]
            del x, w, out
            assert [t() for t in watched] == [None] * 4


def test_an_exception_keeps_no_argument(no_collector):
    cf = tp.compile(lambda x: x.reshape(5), backend="eager")
    cf(torch.randn(5))
    x = torch.randn(3)
    watched = weakref.ref(x)
    with pytest.raises(RuntimeError):
        cf(x)
    del x
    gc.collect()  # tracebacks are cycles of their own
    assert watched() is None


@pytest.mark.parametrize("backend", ["eager", "stax"])
def test_deleting_the_compiled_object_frees_module_versions_and_code(backend):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    cm = tp.compile(model, backend=backend)
    with torch.no_grad():
        for n in (1, 2):
            for _ in range(3):
                cm(torch.randn(n, 4))
    versions = tp.explain(cm).versions
    parts = [model, model[0].weight, compiled_of(cm), *versions, *(v.captured.graph for v in versions)]
    parts += [v.program for v in versions if backend == "stax"]
    watched = [weakref.ref(part) for part in parts]
    del model, cm, versions, parts
    gc.collect()
    assert [w() for w in watched] == [None] * len(watched)


def test_swapping_a_tensor_that_was_an_argument():
    """torch refuses to swap tensors that someone holds weakly."""
    cf, x = tp.compile(lambda x: x + 1, backend="eager"), torch.ones(2)
    for _ in range(3):
        cf(x)
    torch.utils.swap_tensors(x, torch.zeros(3))
    assert cf(x).tolist() == [1.0] * 3


def test_a_compiled_function_and_its_module_die_by_reference_count(no_collector):
    def made():
        weight = torch.randn(8)
        return (lambda x: x + weight), weakref.ref(weight)

    for calls in (1, 2):  # the call that captures leaves no cycle either
        f, weight = made()
        cf = tp.compile(f)
        for _ in range(calls):
            cf(torch.randn(8))
        del f, cf
        assert weight() is None
        net = nn.Linear(3, 3)
        watch, cm = weakref.ref(net.weight), tp.compile(net)
        with torch.no_grad():
            for _ in range(calls):
                cm(torch.randn(2, 3))
        del net, cm
        assert watch() is None


@pytest.mark.parametrize("backend", ["eager", "stax"])
def test_programs_that_were_compiled_and_deleted_leave_no_memory(backend):
    """Nothing is collected by hand: the collector's own turns, and those of capture, suffice."""

    def resident():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * resource.getpagesize()

    def compiled_and_deleted(programs, x):
        for _ in range(programs):
            tp.compile(lambda x: (torch.relu(x + 1) * 2).sum(-1), backend=backend)(x)

    x = torch.randn(4, 8)
    compiled_and_deleted(100, x)
    before = resident()
    compiled_and_deleted(300, x)
    assert resident() - before < 1 << 20
