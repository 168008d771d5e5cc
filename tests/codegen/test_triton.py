"""The Triton printer: example 1.1 as a golden file, kernel shapes, and programs run by Triton's interpreter."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tensorplay.errors import UnsupportedError
from tensorplay.stax import expr as ex
from tensorplay.stax.codegen.target import Target
from tensorplay.stax.codegen.triton.emit import emit
from tensorplay.stax.expr import const, load, make, var
from tensorplay.stax.loops.nodes import Compute, Loops, Pointwise, Reduction, Scan
from tensorplay.stax.schedule.schedule import schedule
from tests.loops.programs import B1, F32, I64, Programs, buffer, whole
from tests.loops.test_text import example

CUDA = Target(device="cuda")
GOLDEN = Path(__file__).parent.parent / "golden" / "example_1_1.triton.py"
ROOT = Path(__file__).parent.parent.parent


def text(loops):
    source = emit(schedule(loops, CUDA), CUDA)
    ast.parse(source.text)
    return source.text


def test_example_is_the_golden_kernel():
    """Listing 1.2: one persistent kernel, no mask along the row, add, maximum, mul, sum in that order."""
    source = emit(schedule(example(), CUDA), CUDA)
    assert source.text == GOLDEN.read_text()
    assert source.language == "triton" and source.entries == ("segment_0",) and list(source.kernels) == ["k0"]
    marks = [line.split("  # ")[1] for line in source.text.splitlines() if "  # " in line and " = " in line]
    assert [m for m in marks if m in ("add", "maximum", "mul", "sum")] == ["add", "maximum", "mul", "sum"]
    assert "r0_mask" not in source.text and "PropagateNan.ALL" in source.text and "other=0.0" in source.text


def rows(n, kind="sum", dtype=F32):
    x, i, r = buffer("x", dtype, (64, n)), var("i0", 64), var("r0", n)
    width = 2 if kind in ("welford", "max_index") else 1
    outs = tuple(buffer(f"o{k}", I64 if "arg" in kind or (k and "index" in kind) else dtype, (64,)) for k in range(width))
    node = Compute(outs, (i,) * width, Reduction(kind, (i,), (r,), load("x", x.at((i, r)), dtype)))
    return Loops((x,), (node,), tuple(map(whole, outs)))


@pytest.mark.parametrize("n, kind, masked", [(128, "persistent", False), (100, "persistent", True),
                                              (8192, "looped", False), (100_000, "looped", True)])  # fmt: skip
def test_rows_are_held_or_walked_and_masked_only_at_their_end(n, kind, masked):
    out = text(rows(n))
    assert f"# {kind} reduction" in out and ("r0_mask" in out) == masked
    assert ("for r0_offset in range(0, r0_numel, R0_BLOCK):" in out) == (kind == "looped")


@pytest.mark.parametrize("kind", ["sum", "prod", "amax", "amin", "argmax", "argmin", "max_index", "welford"])
@pytest.mark.parametrize("n", [0, 100, 100_000])
def test_every_reduction_has_text(kind, n):
    assert "tl.store" in text(rows(n, kind))


def running(kind, axis, *size):
    x, point = buffer("x", F32, size), tuple(var(f"i{k}", n) for k, n in enumerate(size))
    outs = tuple(buffer(f"o{k}", I64 if k else F32, size) for k in range(2 if "index" in kind else 1))
    node = Compute(outs, tuple(o.at(point) for o in outs), Scan(kind, point, axis, load("x", x.at(point), F32)))
    return Loops((x,), (node,), tuple(map(whole, outs)))


@pytest.mark.parametrize("kind", ["sum", "prod", "max_index", "min_index"])
def test_scans_carry_from_block_to_block(kind):
    out = text(running(kind, 1, 3, 10_000))
    assert "# looped scan: x 3, r0 10000" in out and "carry" in out and "tl.associative_scan" in out
    out = text(running(kind, 1, 3, 100))
    assert "# persistent scan" in out and "carry" not in out
    assert "XBLOCK=32" in text(running(kind, 0, 1000, 512))


def test_a_row_that_is_walked_again_is_held_where_it_fits():
    x, i, r = buffer("x", F32, (64, 16384)), var("i0", 64), var("r0", 16384)
    o, y = buffer("o", F32, (64,)), buffer("y", F32, (64, 16384))
    total = Compute((o,), (i,), Reduction("sum", (i,), (r,), load("x", x.at((i, r)), F32)))
    share = make("div", (load("x", x.at((i, r)), F32), load("o", i, F32)), F32)
    both = Loops((x,), (total, Compute((y,), (y.at((i, r)),), Pointwise((i, r), share))), (whole(y),))
    assert "# persistent reduction: x 64, r0 16384" in text(both)
    assert "# looped reduction" in text(rows(16384))


def test_columns_are_read_along_memory():
    x, i, r = buffer("x", F32, (1000, 512)), var("i0", 512), var("r0", 1000)
    node = Compute((buffer("o", F32, (512,)),), (i,), Reduction("sum", (i,), (r,), load("x", x.at((r, i)), F32)))
    assert "XBLOCK=64" in text(Loops((x,), (node,), (whole(node.outputs[0]),)))


def point(body, n=10):
    i = var("i0", n)
    inputs = (buffer("x", F32, (n,)), buffer("j", I64, (n,)))
    return text(Loops(inputs, (Compute((buffer("o", body.dtype, (n,)),), (i,), Pointwise((i,), body)),), (whole(buffer("o", body.dtype, (n,))),)))


def test_reads_under_a_condition_and_through_an_index_are_guarded():
    i = var("i0", 10)
    x, j = load("x", i, F32), load("j", i, I64)
    shifted = ex.masked(ex.in_range(ex.add(i, -1), 0, 10), load("x", ex.add(i, -1), F32), const(0.0, F32))
    out = point(shifted)
    assert re.search(r"tl.load\(in_ptr0 \+ \(x0 - 1\), xmask & tmp\d+, other=0.0\)", out)
    out = point(make("add", (load("x", ex.index(j, 10), F32), x), F32))
    assert re.search(r"tl.device_assert\(\(\(tmp\d >= 0\) & \(tmp\d < 10\)\) \| ~\(xmask\)", out) and "debug=True" in out


def test_signs_of_zero_and_special_literals_survive():
    x = load("x", var("i0", 10), F32)
    assert "* -1.0" in point(make("neg", (x,), F32))
    assert "tl.full([1], 0.0, tl.float32) * -1.0" in point(make("add", (x, const(-0.0, F32)), F32))
    assert "float('-inf')" in point(make("add", (x, const(-float("inf"), F32)), F32))


def test_large_offsets_are_wide_and_small_ones_are_not():
    i = var("i0", 2**31)
    x = buffer("x", torch.int8, (2**31,))
    node = Compute((buffer("o", torch.int8, (2**31,)),), (i,), Pointwise((i,), load("x", i, torch.int8)))
    assert "tl.program_id(0).to(tl.int64)" in text(Loops((x,), (node,), (whole(node.outputs[0]),)))
    assert "int64" not in text(example())


def test_what_has_no_text_is_refused():
    x, i = buffer("x", F32, (8,)), var("i0", 8)
    node = Compute((buffer("o", F32, (8,)),), (i,), Scan("logaddexp", (i,), 0, load("x", i, F32)))
    with pytest.raises(UnsupportedError, match="scan logaddexp"):
        text(Loops((x,), (node,), (whole(node.outputs[0]),)))
    r = var("r0", 8)
    flags = Compute((buffer("o", I64, ()),), (ex.integer(0),), Reduction("argmax", (), (r,), load("b", r, B1)))
    with pytest.raises(UnsupportedError, match="bool"):
        text(Loops((buffer("b", B1, (8,)),), (flags,), (whole(flags.outputs[0]),)))


def test_long_chains_have_linear_text():
    x = load("x", var("i0", 10), F32)
    for _ in range(2000):
        x = make("add", (x, x), F32)
    assert len(point(x).splitlines()) < 5000


def test_random_programs_have_text():
    for seed in range(100):
        try:
            text(Programs(seed).loops())
        except UnsupportedError as error:
            assert "scan" in str(error)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_random_programs_equal_the_interpreter_of_loops():
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.codegen.triton_interpreted", "0", "60"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
