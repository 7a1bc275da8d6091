"""Memory that is given back is the system's, and zeros or the old contents when it is taken again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from core.device.given_back import GivenBack
from core.device.huge_pages import BYTES, zeros_in_huge_pages

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes pages back from under an address")
SIZE = 16 * BYTES
CPU = torch.device("cpu")


def resident() -> int:
    """Bytes of this process that are in memory."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Rss")).split()[1]) * 1024


@LINUX
@pytest.mark.parametrize("huge", [True, False], ids=["huge", "plain"])
def test_the_system_has_it_back(huge: bool) -> None:
    zeros = zeros_in_huge_pages((SIZE,), torch.uint8, CPU) if huge else torch.zeros(SIZE, dtype=torch.uint8)
    zeros.fill_(7)
    before, address = resident(), zeros.data_ptr()
    given = GivenBack([zeros[: SIZE // 2], zeros])
    assert SIZE - 2 * 4096 <= given.nbytes <= SIZE, "a storage counts once, whatever views it"
    assert before - resident() >= SIZE * 0.9
    given.restore()
    assert zeros.data_ptr() == address
    # What shares a memory page with others stays as it is.
    assert not zeros[4096:-4096].any()
    zeros.fill_(3)
    assert zeros.min() == zeros.max() == 3


@LINUX
def test_what_lies_beside_it_stays() -> None:
    """The first and the last page may hold more than the tensor."""
    whole = torch.full((SIZE,), 7, dtype=torch.uint8)
    inside = torch.frombuffer(whole.numpy()[1000 : SIZE - 1000], dtype=torch.uint8)
    given = GivenBack([inside])
    assert SIZE - 3 * 4096 <= given.nbytes < SIZE - 2000
    assert (whole[:1000] == 7).all() and (whole[-1000:] == 7).all()


def test_what_is_kept_on_the_cpu_stays_where_it_is() -> None:
    kept = torch.arange(SIZE, dtype=torch.float32)
    given = GivenBack([kept], keep=True)
    assert given.nbytes == 0
    given.restore()
    assert torch.equal(kept, torch.arange(SIZE, dtype=torch.float32))


@pytest.mark.parametrize("size", [0, 1, 4096])
def test_what_fills_no_page_is_left(size: int) -> None:
    small = torch.full((size,), 7, dtype=torch.uint8)
    given = GivenBack([small])
    assert given.nbytes in (0, 4096)
    if not given.nbytes:
        assert (small == 7).all()
