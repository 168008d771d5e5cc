"""Reductions followed by passes over the same elements, on permuted operands: native kernels against eager."""

from __future__ import annotations

import warnings

import pytest
import torch

import tensorplay as tp

from .passes import differs, program


@pytest.mark.parametrize("first", [0, 48, 132])
def test_random_reductions_and_passes_equal_eager(first: int) -> None:
    from bench.levels import Batch

    batch, todo, threads = Batch(), [], torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(first, first + 24):
            p = program(seed)
            want = p.run(p.function)
            compiled = tp.compile(p.function, backend=batch)
            p.run(compiled)
            todo.append((seed, p, compiled, want))
        batch.build()
        try:
            for t in (1, 2):
                torch.set_num_threads(t)
                for seed, p, compiled, want in todo:
                    found = differs(p, p.run(compiled), want)
                    assert found is None, f"seed {seed} on {t} threads: {found}"
        finally:
            torch.set_num_threads(threads)
