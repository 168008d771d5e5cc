"""Kernels that need nothing of each other start as one parallel region, whatever their extents."""

import re

import pytest
import torch

import tensorplay as tp
from tensorplay.stax.codegen.target import Target
from tensorplay.stax.loops.verify import IRError
from tensorplay.stax.schedule.plan import Launch
from tensorplay.stax.schedule.schedule import schedule
from tensorplay.stax.schedule.verify import verify_plan
from tensorplay.testing import K

SHAPES = [(64, 128), (128,), (300, 7), (), (3, 5, 7), (256, 256), (1, 513)]


def adamw(ps, gs, ms, vs):
    for p, g, m, v in zip(ps, gs, ms, vs, strict=True):
        m.lerp_(g, 0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        p.addcdiv_(m, v.sqrt() + 1e-8, value=-1e-3)


def lists(dtype=torch.float32):
    return [[torch.rand(s).to(dtype) for s in SHAPES] for _ in range(4)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_step_over_a_list_is_one_kernel(dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        given = lists(dtype)
        want = [[t.double() for t in ts] for ts in given]
        compiled = tp.compile(adamw, strict_native=True)
        with torch.no_grad():
            compiled(*given), adamw(*want)
    finally:
        torch.set_num_threads(before)
    for got, exact in zip(given, want, strict=True):
        torch.testing.assert_close(got, [t.to(dtype) for t in exact], **({} if dtype is torch.float32 else {"rtol": 2**-7, "atol": 1e-3}))
    (kernel,) = K(compiled)
    assert kernel.model_bytes == sum(t.nbytes for t in given[0]) * 7
    assert len(re.findall(r"^static void", kernel.source, re.M)) == 2, "one function for all extents, one for a single element"


def test_neighbours_join_and_what_orders_them_is_named():
    def f(x, y, z):
        return torch.relu(x) + 1, y * 2, (z * 3).sum()

    c = tp.compile(f, strict_native=True)
    x, y, z = torch.randn(5, 7), torch.randn(11), torch.rand(1000, 3)  # nothing cancels: the order of a sum costs no digits
    torch.testing.assert_close(c(x, y, z), f(x, y, z))
    plan = tp.explain(c).plan
    assert [len(g) for g in plan.together] == [2, 1]
    assert "are one launch" in str(plan) and "reduces or scans" in str(plan)


def test_a_launch_of_dependent_kernels_is_refused():
    def f(x):
        y = x.t().contiguous() + 1
        return y, y.view(-1)[:5] * 2, x.cumsum(0)

    c = tp.compile(f, strict_native=True)
    c(torch.randn(40, 30))
    plan = tp.explain(c).plan
    names = [k.name for k in plan.kernels]
    assert len(names) > 1 and verify_plan(plan) is plan
    wrong = type(plan)(plan.loops, plan.steps, plan.memory, (), 0, (Launch(tuple(reversed(names))),))
    with pytest.raises(IRError, match="launches hold"):
        verify_plan(wrong)


def test_results_of_one_launch_never_share_memory():
    """Two kernels of a launch run at the same time: what one reads for the last time, the other may not write over."""

    def f(x, y):
        a, b = x.cumsum(0), y.cumsum(0)  # scans stand alone, so a and b lie in the arena
        c, d = a * 2 + b[:1], b.exp()
        return c.cumsum(0), d.cumsum(0)

    c = tp.compile(f, strict_native=True)
    x, y = torch.randn(300, 20), torch.randn(500, 20)
    torch.testing.assert_close(c(x, y), f(x, y), rtol=1e-4, atol=1e-3, equal_nan=True)
    plan = tp.explain(c).plan
    verify_plan(plan)
    at = plan.memory.arena
    for together in plan.together:
        for kernel in together:
            for other in together:
                if kernel is not other:
                    mine = {range(at[w], at[w] + plan.loops.buffers[w].nbytes) for w in kernel.writes if w in at}
                    theirs = {range(at[r], at[r] + plan.loops.buffers[r].nbytes) for r in other.reads if r in at}
                    assert not any(a.start < b.stop and b.start < a.stop for a in mine for b in theirs)
    assert schedule(plan.loops, Target()).launches
