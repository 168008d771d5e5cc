"""The straight line: what it refuses."""

import pytest
import torch

from tensorplay.errors import UnsupportedError
from tensorplay.stax.pipeline import stax


def test_tensors_of_another_device_are_refused_before_any_kernel_runs():
    graph = torch.fx.symbolic_trace(lambda x: x * 2)
    with pytest.raises(UnsupportedError, match="meta"):
        stax(graph, [torch.ones(3, device="meta")])
