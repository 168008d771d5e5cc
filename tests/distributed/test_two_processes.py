"""Two gloo processes: compiled modules inside DistributedDataParallel and FSDP2, and collectives inside functions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch without gloo"
)
PROGRAMS = (  # named here, since importing them imports half of torch
    "wrapped_compiled_module", "unused_parameters", "accumulation_without_synchronization",
    "sharded_layers_compiled_under_their_hooks", "functional_all_reduce", "functional_gather_and_scatter",
    "gradients_of_collectives", "all_reduce_of_a_value", "all_reduce_of_an_input", "all_gather_and_broadcast",
    "asynchronous_all_reduce", "one_process_compiles", "sharded_in_low_precision_with_evaluation_between",
    "buckets_and_a_static_graph", "gradients_of_gathering", "groups_lists_and_small_tensors",
)  # fmt: skip
EAGER = {
    "compiled_wrapper": "DistributedDataParallel(tp.compile(module))",
    "compiled_sharded_module": "layer.forward = tp.compile(layer.forward)",
    "sharded_compiled_layers": "layer.forward = tp.compile(layer.forward)",
    "branch_on_what_arrived": "a branch depends on",
    "barrier": "barrier exchanges data with other processes",
    "distributed_tensors": "DTensor",
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gloo")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "tests.distributed.programs"]
    workers = [
        subprocess.Popen([*command, str(k), str(folder / "store"), str(folder / f"{k}.json")], env=environment, stderr=subprocess.PIPE)
        for k in range(2)
    ]
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=240)
            assert worker.returncode == 0, errors.decode()
    finally:
        for worker in workers:
            worker.kill()
    return [json.loads((folder / f"{k}.json").read_text()) for k in range(2)]


def test_every_program_is_named(reports):
    assert set(reports[0]) == {*PROGRAMS, *EAGER}


@pytest.mark.parametrize("name", (*PROGRAMS, *EAGER))
def test_as_eager(reports, name):
    for found in (report[name] for report in reports):
        assert "error" not in found, found["error"]
        tolerance = 3e-2 if "low_precision" in name else 1e-5
        torch.testing.assert_close(found["got"], found["want"], rtol=tolerance, atol=tolerance / 10)
        if name in EAGER:
            assert found["reasons"] and all(EAGER[name] in reason for reason in set(found["reasons"])), found["reasons"]
        else:
            assert not found["reasons"]
