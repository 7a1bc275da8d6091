"""How many pages the KV pool gets: from the configuration, else from the memory at hand."""

from __future__ import annotations

import torch

from core.config import MemoryConfig
from core.errors import ConfigError
from core.machine import available_memory, free_memory

# On a CPU all pools together take this share of the free memory, and at most CPU_LIMIT bytes.
CPU_SHARE = 0.25
CPU_LIMIT = 2 * 2**30
CUDA_SHARE = 0.85
"""Share of the memory left after the weights; the rest is for activations, graphs and fragmentation."""


def num_pages(
    config: MemoryConfig, bytes_per_token: int, context_length: int, device: torch.device, reserved_bytes: int = 0
) -> int:
    """Pages of the KV pool: `max_total_tokens` where configured, else what memory holds, up to what rows can use.

    `bytes_per_token`: bytes of one token in all layers; 0 for a model without attention, whose pages take no memory.
    `reserved_bytes`: left free for other pools, recurrent states for instance.

    Raises ConfigError when not even one page fits.
    """
    tokens = config.max_total_tokens
    if tokens is None:
        tokens = config.max_running_requests * context_length
        if bytes_per_token:
            tokens = min(max(0, free_bytes(device, config.machine_share) - reserved_bytes) // bytes_per_token, tokens)
    check_configured(config, tokens * bytes_per_token + reserved_bytes, device)
    pages = tokens // config.page_size
    if pages < 1:
        raise ConfigError(f"max_total_tokens: the memory at hand holds {tokens} tokens, less than one page")
    return pages


def check_configured(config: MemoryConfig, nbytes: int, device: torch.device) -> None:
    """Raises ConfigError where the machine has no room for pools of `nbytes` bytes, whose size was configured.

    On a CPU, which would be out of memory only once tokens fill them. A GPU says so when they are allocated.
    """
    if config.max_total_tokens is None or device.type != "cpu" or nbytes <= (free := available_memory()):
        return
    raise ConfigError(
        f"max_total_tokens: {config.max_total_tokens} tokens take {nbytes} bytes, {free} of the machine's memory are "
        "available"
    )


def free_bytes(device: torch.device, machine_share: float = 1.0) -> int:
    """Bytes that all pools together may take of the memory that is free on `device` now.

    `machine_share`: part of a machine without accelerator that this engine has; other engines have the rest.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * CUDA_SHARE)
    return min(int(free_memory() * CPU_SHARE * machine_share), CPU_LIMIT)
