"""How fast this device reads memory: what bounds a decode step, which reads every weight once."""

from __future__ import annotations

import time

import torch

CPU_BYTES, CUDA_BYTES = 512 << 20, 4 << 30
"""Far more than caches hold."""
REPEATS = 5


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second, the best of `REPEATS` reads, on as many threads as torch has. Takes up to a second."""
    count = (CUDA_BYTES if device.type == "cuda" else CPU_BYTES) // 4
    block = torch.ones(count, device=device)
    best = min(_seconds(block) for _ in range(REPEATS))
    return block.nbytes / best


def _seconds(block: torch.Tensor) -> float:
    _settle(block.device)
    began = time.perf_counter()
    block.sum()
    _settle(block.device)
    return time.perf_counter() - began


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
