"""Every C++ compiler that is installed takes the generated code, on every vector width."""

import shutil

import pytest
import torch

import tensorplay as tp
from tensorplay.testing import tiers

COMPILERS = [c for c in ("g++", "clang++") if shutil.which(c)]


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("tier", tiers())
def test_a_compiler_takes_the_code(compiler, tier, tmp_path, monkeypatch):
    monkeypatch.setenv("TP_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)

    def f(x, i):
        return torch.relu(x).exp().sum(-1), x.t().softmax(0), x.half() * 2, x[i].copysign(x[:2]), i // 3, x.var(0)

    x, i = torch.randn(7, 33), torch.tensor([1, 5])
    torch.testing.assert_close(tp.compile(f, strict_native=True, options={"cpu_isa": tier})(x, i), f(x, i))
