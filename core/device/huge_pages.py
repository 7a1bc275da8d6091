"""Large buffers of the CPU in pages of 2 MiB, where Linux gives them.

Attention reads a KV page here and a KV page there, and with 4 KiB to a page of memory almost each of them misses the
address cache: decode over 64 rows was 1.3 to 1.7 times as fast with large ones, on a virtual machine, where a miss
costs most.
"""

from __future__ import annotations

import contextlib
import mmap
from math import prod

import torch

BYTES = 2 << 20
"""Of one huge page; smaller buffers are left alone."""


def zeros_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As `torch.zeros`; a large one on the CPU takes memory only where it is touched. Large pages are a wish."""
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    # Said before anything is touched: nothing gathers small pages into large ones later on, or only slowly.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
