"""A compiled function is first called, and called, from many threads at once (promise P21)."""

import os
import random
import threading
import time

import pytest
import torch

import tensorplay as tp
from tensorplay.testing import C, N

THREADS = 8


def together(work, count=THREADS):
    """Runs work(k) in `count` threads that start at once; raises what one of them raised."""
    errors, gate = [], threading.Barrier(count)

    def run(k):
        try:
            gate.wait()
            work(k)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(count)]
    [t.start() for t in threads], [t.join() for t in threads]
    if errors:
        raise errors[0]


def test_ten_thousand_calls_with_32_shapes_compile_each_shape_once():
    built = []

    def back_end(graph, samples):
        built.append(samples[0].shape)
        time.sleep(0.001)  # so that others arrive meanwhile
        return graph.forward

    cf = tp.compile(lambda x, k: x * 2 + k, backend=back_end, recompile_limit=64)

    def work(seed):
        r = random.Random(seed)
        for _ in range(1250):
            n = r.randrange(1, 33)
            x = torch.full((n,), float(n))
            assert cf(x, 1).tolist() == [2.0 * n + 1] * n

    together(work)
    counters = tp.explain(cf).counters
    assert C(cf) == N(cf) == 32 == len(built) == len(set(built))
    assert counters["hits"] + counters["misses"] >= 10_000 and counters["misses"] <= 32 * THREADS


def test_native_code_runs_in_many_threads():
    def f(x, w):
        return (torch.relu(x + w) * 2).sum(-1)

    cf = tp.compile(f, strict_native=True)

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(150):
                x, w = torch.randn(2 + seed % 2, 16, generator=generator), torch.randn(16, generator=generator)
                assert torch.allclose(cf(x, w), f(x, w), atol=1e-5)

    together(work)
    assert C(cf) == 2


def test_intermediates_of_concurrent_calls_do_not_mix():
    """Each call in progress has memory of its own, also where library operators run between kernels."""

    def f(x):
        y = torch.softmax(x, -1) @ x
        return torch.softmax(y, 0) + y.sum(0)

    cf = tp.compile(f, strict_native=True)

    def work(seed):
        x = torch.randn(12, 12, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            want = f(x)
            for _ in range(150):
                assert torch.allclose(cf(x), want, atol=1e-5)

    together(work)
    assert C(cf) == 1


def test_state_of_each_thread_is_its_own():
    """Grad mode, autocast and inference mode of one thread never serve a call of another."""
    cf, w = tp.compile(lambda x: x @ x, backend="eager"), torch.randn(3, 3, requires_grad=True)

    def work(k):
        for _ in range(100):
            if k % 3 == 0:
                assert cf(w).requires_grad
            elif k % 3 == 1:
                with torch.no_grad():
                    assert not cf(w).requires_grad
            else:
                with torch.autocast("cpu", torch.bfloat16):
                    assert cf(w).dtype is torch.bfloat16

    together(work)
    assert C(cf) == 3


def test_state_that_changes_while_others_call():
    """A call computes with one state or with another, never with a mixture."""
    box = {"a": 1.0, "b": 1.0}
    cf = tp.compile(lambda x: (x * box["a"], x * box["b"]), backend="eager", recompile_limit=64)
    x, stop = torch.ones(2), threading.Event()

    def work(k):
        if k == 0:
            for n in range(200):
                box["a"] = float(n % 4)
            stop.set()
        while not stop.is_set():
            a, b = cf(x)
            assert a[0].item() in (0.0, 1.0, 2.0, 3.0) and b[0].item() == 1.0

    together(work, 4)
    assert C(cf) <= 64


def test_a_call_that_calls_itself():
    def back_end(graph, samples):
        def run(x):
            if x.shape[0] > 1:
                cf(x[1:].clone())
            return graph(x)

        return run

    cf = tp.compile(lambda x: x + 1, backend=back_end)
    for _ in range(3):
        assert cf(torch.zeros(4)).tolist() == [1.0] * 4
    assert C(cf) == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_calls_what_its_parent_compiled():
    cf, x = tp.compile(lambda x: torch.relu(x + 1) * 2, strict_native=True), torch.ones(1000)
    with torch.no_grad():
        cf(x)
        child = os.fork()
        if child == 0:
            os._exit(0 if cf(x).sum() == 4000 and cf(x).sum() == 4000 else 1)
        assert os.waitpid(child, 0)[1] == 0
