"""Every C++ compiler that is installed takes the generated code, on every vector width; so do cross compilers."""

import shutil
import subprocess

import pytest
import torch

import tensorplay as tp
from tensorplay.stax.artifacts import digest, toolchain
from tensorplay.testing import tiers

COMPILERS = [c for c in ("g++", "clang++") if shutil.which(c)]
CROSS = [c for c in ("aarch64-linux-gnu-g++",) if shutil.which(c)]


def f(x, i):
    return torch.relu(x).exp().sum(-1), x.t().softmax(0), x.half() * 2, x[i].copysign(x[:2]), i // 3, x.var(0), x.bfloat16().erf()


X, INDEX = torch.randn(7, 33), torch.tensor([1, 5])


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("tier", tiers())
def test_a_compiler_takes_the_code(compiler, tier, tmp_path, monkeypatch):
    monkeypatch.setenv("TP_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    torch.testing.assert_close(tp.compile(f, strict_native=True, options={"cpu_isa": tier})(X, INDEX), f(X, INDEX))


@pytest.mark.skipif(not CROSS, reason="no cross compiler is installed")
@pytest.mark.parametrize("compiler", CROSS or [""])
def test_the_portable_tier_is_code_for_other_processors(compiler, tmp_path):
    """Vectors of 16 bytes become the registers of the other machine; it can't run here, but its compiler takes it all."""
    compiled = tp.compile(f, strict_native=True, options={"cpu_isa": "portable"})
    compiled(X, INDEX)
    source = tp.explain(compiled).versions[0].program.source
    file, out = tmp_path / "kernels.cpp", tmp_path / "kernels.s"
    file.write_text(source.text)
    command = [compiler, *toolchain.FLAGS, *source.flags, "-I", str(digest.HEADERS), "-S", str(file), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fadd\tv" in out.read_text(), "vectors run on vector registers"
