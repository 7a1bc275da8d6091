"""Buffers in huge pages are ordinary tensors, and Linux is asked for what it can give."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from core.device.huge_pages import BYTES, zeros_in_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CPU = torch.device("cpu")


def huge_kib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("AnonHugePages")).split()[1])


@pytest.mark.skipif(not SETTING.exists() or "[never]" in SETTING.read_text(), reason="this system has no huge pages")
def test_a_large_buffer_takes_huge_pages() -> None:
    before = huge_kib()
    buffer = zeros_in_huge_pages((64, BYTES), torch.uint8, CPU)
    buffer[:, ::4096] = 1
    # Half of it at least: memory may be too scattered for all.
    assert huge_kib() - before >= buffer.nbytes / 1024 / 2


@pytest.mark.parametrize("shape", [(0, 3), (5,), (BYTES + 1,)])
def test_it_is_what_torch_zeros_gives(shape: tuple[int, ...]) -> None:
    buffer = zeros_in_huge_pages(shape, torch.float32, CPU)
    assert buffer.shape == shape and buffer.dtype == torch.float32
    assert not buffer.any()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
def test_large_pages_are_asked_for_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Memory(mmap.mmap):
        """Writes down what is asked of it."""

        def madvise(self, option: int, *place: int) -> None:
            asked.append(option)
            super().madvise(option, *place)

    monkeypatch.setattr(mmap, "mmap", Memory)
    for size, wanted in ((BYTES - 1, []), (BYTES, [mmap.MADV_HUGEPAGE])):
        assert not zeros_in_huge_pages((size,), torch.uint8, CPU).any()
        assert asked == wanted
