"""Large fresh memory stands on large pages; small memory is left alone."""

import mmap
import re
from pathlib import Path

import pytest
import torch

import tensorplay as tp
from tensorplay.stax.runtime import pages

SMAPS = Path("/proc/self/smaps")
pytestmark = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or "VmFlags" not in (SMAPS.read_text() if SMAPS.exists() else ""),
    reason="a system without large pages",
)


def advised(tensor):
    """Whether the mapping of a tensor's memory is marked for large pages."""
    at, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in SMAPS.read_text().splitlines():
        if (found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            inside = int(found[1], 16) <= at < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return False


def test_large_results_of_one_entry_and_of_host_code():
    x = torch.randn(4096, 4096)  # malloc maps blocks above 32 MiB one by one
    y = tp.compile(lambda x: x * 2, strict_native=True)(x)
    assert advised(y) and torch.equal(y, x * 2)

    def host(x):
        return x * 2, x[:2] @ x[:, :2]

    y, z = tp.compile(host, strict_native=True)(x)
    assert advised(y) and not advised(x)
    torch.testing.assert_close((y, z), host(x))


def test_only_whole_pages_of_the_tensor_itself_are_advised(monkeypatch):
    asked = []
    monkeypatch.setattr(pages, "_ADVISE", lambda start, size, what: asked.append((start, size)))
    small, large = torch.empty(pages.LARGE // 2, dtype=torch.uint8), torch.empty(3 * pages.LARGE + 5, dtype=torch.uint8)
    pages.advise(small), pages.advise(large)
    ((start, size),) = asked
    assert start % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
    assert large.data_ptr() <= start and start + size <= large.data_ptr() + large.nbytes
