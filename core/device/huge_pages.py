"""Large buffers of the CPU in pages of 2 MiB, where Linux gives them.

Attention reads a KV page here and a KV page there, and with 4 KiB to a page of memory almost each of them misses the
address cache: decode over 64 rows was 1.3 to 1.7 times as fast with large ones, on a virtual machine, where a miss
costs most.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

import torch

BYTES = 2 << 20
"""Of one huge page; smaller buffers are left alone."""


def empty_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As `torch.empty`: uninitialised. Large pages are a wish: where nobody grants it, nothing is different."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and tensor.nbytes >= BYTES:
        _advise(tensor.data_ptr(), tensor.nbytes)
    return tensor


def _advise(address: int, length: int) -> None:
    # Pages must not have been touched yet: nothing gathers small ones into large ones later on, or only slowly.
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + length - first) // mmap.PAGESIZE * mmap.PAGESIZE
    advise = _madvise()
    if advise is not None and length > 0:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_HUGEPAGE))


@cache
def _madvise() -> ctypes._NamedFuncPointer | None:
    """The C library's function, None where it or the advice does not exist."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)
