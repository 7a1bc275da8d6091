"""Memory that an allocation did not get: how to tell it from other failures, and what is known of it.

Every allocator raises before it changes anything, so the device goes on as it was: nothing of a kernel that was not
launched for want of its output has happened.
"""

from __future__ import annotations

import re

import torch

from core.machine import free_memory

MEMORY_ERRORS = (RuntimeError, MemoryError)
"""What `is_out_of_memory` can be true of: `torch.OutOfMemoryError` is a RuntimeError, numpy's a MemoryError."""

_CPU_ALLOCATOR = "DefaultCPUAllocator"
_PINNED = "CUDA error: out of memory"
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+ (?:bytes|[KMGTPE]i?B))|Unable to allocate ([\d.]+ [KMGTPE]?i?B)")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on the device, on the host or of what is pinned, and nothing worse."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # PyTorch's CPU allocator, and what pins host memory, have no class of their own.
    return isinstance(error, RuntimeError) and any(text in str(error) for text in (_CPU_ALLOCATOR, _PINNED))


def shortage(error: BaseException, device: torch.device) -> str:
    """How much was wanted, and how much there is, in one line for an operator."""
    found = _WANTED.search(str(error))
    wanted = "an unknown amount" if found is None else (found[1] or found[2])
    if device.type != "cuda":
        return f"wanted {wanted}, {_size(free_memory())} of memory are free"
    free, total = torch.cuda.mem_get_info(device)
    held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    return (
        f"wanted {wanted}, {_size(free)} of {_size(total)} are free, "
        f"PyTorch has reserved {_size(held)} and uses {_size(used)} of that"
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
