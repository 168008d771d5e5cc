"""A bounded part of the property test of random programs; bench/fuzz.py runs as many as you like."""

import warnings

import pytest

import tensorplay as tp

from .programs import check


@pytest.mark.parametrize("block", range(4))
def test_random_programs_equal_eager_at_the_loops_level(block: int) -> None:
    from bench.levels import Interpreted

    for seed in range(50 * block, 50 * block + 50):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = check(seed, lambda f, **options: tp.compile(f, backend=Interpreted, recompile_limit=64, **options))
        assert found is None, found


def test_random_programs_equal_eager_through_native_kernels() -> None:
    for seed in range(10_000, 10_012):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = check(seed, lambda f, **options: tp.compile(f, recompile_limit=64, **options))
        assert found is None, found
