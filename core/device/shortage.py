"""Allocations that failed for lack of memory: how to tell them from other failures, and how to describe them.

Every allocator raises before it changes anything. A kernel whose output could not be allocated was not launched, so the
device state is as it was before.
"""

from __future__ import annotations

import re

import torch

from core.machine import free_memory

MEMORY_ERRORS = (RuntimeError, MemoryError)
"""Classes to catch before `is_out_of_memory`: `torch.OutOfMemoryError` is a RuntimeError, numpy's a MemoryError."""

_CPU_ALLOCATOR = "DefaultCPUAllocator"
_PINNED = "CUDA error: out of memory"
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+ (?:bytes|[KMGTPE]i?B))|Unable to allocate ([\d.]+ [KMGTPE]?i?B)")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` only says that memory ran out: on the device, on the host, or pinned memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # PyTorch has no class of its own for its CPU allocator and for pinned memory: their messages tell.
    return isinstance(error, RuntimeError) and any(text in str(error) for text in (_CPU_ALLOCATOR, _PINNED))


def shortage(error: BaseException, device: torch.device) -> str:
    """How much memory was wanted and how much there is, in one line for an operator."""
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
