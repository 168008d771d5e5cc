"""Few results of long reductions: two stages give what one gives, whatever the sizes, and only where it pays."""

import pytest
import torch

from tensorplay.stax.codegen.target import Target
from tensorplay.stax.expr import load, var
from tensorplay.stax.loops.interpret import interpret, interpret_plan
from tensorplay.stax.loops.nodes import Compute, Loops, Reduction
from tensorplay.stax.loops.verify import verify
from tensorplay.stax.schedule import stages
from tensorplay.stax.schedule.schedule import schedule
from tests.loops.programs import B1, F32, I64, buffer, tensor, whole


def rows(kind, dtype, n, *sizes):
    x, i = buffer("x", dtype, (n, *sizes)), var("i0", n)
    over = tuple(var(f"r{k}", size) for k, size in enumerate(sizes))
    out = buffer("o", dtype, (n,))
    body = load("x", x.at((i, *over)), dtype)
    return Loops((x,), (Compute((out,), (out.at((i,)),), Reduction(kind, (i,), over, body)),), (whole(out),))


@pytest.mark.parametrize("sizes", [(1, 7, 13), (3, 64, 2), (2, 5, 50), (1, 128), (1, 129)])
@pytest.mark.parametrize("kind, dtype", [(k, d) for k in ("sum", "prod", "amax", "amin") for d in (F32, I64)] + [("any", B1), ("all", B1)])
def test_two_stages_equal_one(kind, dtype, sizes, monkeypatch):
    monkeypatch.setattr(stages, "LEAST", 16)
    monkeypatch.setattr(stages, "PROGRAMS", 8)
    loops = rows(kind, dtype, *sizes)
    staged = verify(stages.in_stages(loops))
    assert len(staged.nodes) == 2 and staged.nodes[1].rvars[0].args[1] > 1
    x = tensor(loops.inputs[0], 2)
    (got,), (want,) = interpret(staged, [x]), interpret(loops, [x])
    torch.testing.assert_close(got, want, equal_nan=True)


def test_only_a_device_of_many_programs_splits_and_only_what_is_long():
    long = rows("sum", F32, 2, 1 << 20)
    assert len(schedule(long, Target(device="cuda")).kernels) == 2
    assert len(schedule(long, Target()).kernels) == 1
    for same in (rows("sum", F32, 2, 4096), rows("sum", F32, 64, 1 << 16), rows("argmax", F32, 2, 1 << 20)):
        assert stages.in_stages(same) is same
    x = torch.ones(2, 1 << 20)
    assert interpret_plan(schedule(long, Target(device="cuda")), [x])[0].tolist() == [1 << 20, 1 << 20]
