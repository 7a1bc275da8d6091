"""How many prompt tokens a step may compute: as configured, else by the memory of the device.

A large device is idle for part of a step of few tokens, and a small one has no memory for the activations of many. The
sizes are SGLang's for such devices, and were not measured here. A step of a CPU is short, so that rows which decode
beside it wait less.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from core.config import SchedulerConfig

BY_MEMORY = ((70 << 30, 8192), (35 << 30, 4096), (0, 2048))
"""(least bytes of a device, prompt tokens in one step on it), by falling size."""


def device_bytes(device: torch.device) -> int | None:
    """Bytes of memory of `device`; None for a CPU, whose memory is not what limits a step."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def sized(config: SchedulerConfig, memory: int | None) -> SchedulerConfig:
    """`config` with a `chunked_prefill_size` for a device of `memory` bytes (see `device_bytes`), unless it has one."""
    if config.chunked_prefill_size is not None or memory is None:
        return config
    return replace(config, chunked_prefill_size=next(tokens for least, tokens in BY_MEMORY if memory >= least))
