"""Host memory that stays for the life of an engine and that the device copies to and from by itself."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from core.errors import ConfigError
from core.machine import available_memory


def host_bytes(owner: object, nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8[nbytes], pinned where `device` is CUDA until `owner` is gone.

    Registered and not asked of PyTorch's allocator, which rounds pinned memory up to a power of two: 40 GiB would take
    64 (SGLang and vLLM register theirs too). Raises ConfigError where the machine, or the container, has no such room:
    pinned pages are not given back, so a start that took them would be killed later.
    """
    check_room(nbytes)
    try:
        held = torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise ConfigError(f"host_cache_bytes: {nbytes} bytes cannot be allocated") from error
    if device.type == "cuda":
        runtime: Any = torch.cuda.cudart()
        failed = int(runtime.cudaHostRegister(held.data_ptr(), nbytes, 0))
        if failed:
            raise ConfigError(f"host_cache_bytes: {nbytes} bytes cannot be pinned (CUDA error {failed})")
        weakref.finalize(owner, _unpin, runtime, held)
    return held


def check_room(nbytes: int) -> None:
    """Raises ConfigError where the machine, or the container, has no room for so many bytes."""
    if nbytes > (free := available_memory()):
        raise ConfigError(f"host_cache_bytes: {nbytes} bytes are needed, {free} of the machine's memory are available")


def _unpin(runtime: Any, held: torch.Tensor) -> None:
    runtime.cudaHostUnregister(held.data_ptr())
