"""A bounded part of the operator database through native code; bench/opinfo.py runs all of it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from bench.levels import Batch
from bench.opinfo import DTYPES, TOGETHER
from bench.trial import Trial

STRIDE = 8  # every eighth operator, others for each dtype
SAMPLES = 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_equal_eager(dtype: str) -> None:
    wanted = getattr(torch, dtype)
    chosen = []
    for op in op_db[DTYPES.index(dtype) * 2 :: STRIDE]:
        if op.supports_dtype(wanted, "cpu"):
            torch.manual_seed(0)
            chosen += [(op, sample) for sample in itertools.islice(op.sample_inputs("cpu", wanted), SAMPLES)]
    wrong = []
    for first in range(0, len(chosen), TOGETHER):
        batch = Batch()
        trials = [Trial(op, sample, batch) for op, sample in chosen[first : first + TOGETHER]]
        for trial in trials:
            trial.run(trial.compiled)
        batch.build()
        for trial in trials:
            found = trial.result()
            if found["outcome"] != "ok":
                wrong.append(f"{trial.op.name} {trial.sample}: {found['detail']}")
    assert not wrong, "\n".join(wrong)
