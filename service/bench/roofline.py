"""What a device can do at most, measured here and now, and what a dense decoder asks of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

REPEATS = 20
WARM_UPS = 3
CUDA_BYTES, CPU_BYTES = 4 << 30, 64 << 20
"""Bytes that are copied to measure the bandwidth, on a GPU, where they are far more than any cache holds, and a CPU."""
CUDA_SIDE, CPU_SIDE = 8192, 256
"""Rows and columns of the matrices whose product measures the arithmetic."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes and floating point operations per second, the best of several tries."""

    bytes_per_second: float
    stated_bytes_per_second: float | None
    """The bandwidth that the device reports for its memory; None if it reports none."""
    flops_per_second: float

    @property
    def roof(self) -> float:
        """Bytes per second: the larger of the measured and the reported bandwidth, of which shares are taken."""
        return max(self.bytes_per_second, self.stated_bytes_per_second or 0.0)


@dataclass(frozen=True, slots=True)
class Demands:
    """What one forward pass of a dense decoder reads and computes."""

    weight_bytes: int
    """Bytes that every step reads: all weights but the rows of the embedding that are not looked up."""
    kv_bytes_per_token: int
    linear_flops_per_token: int
    """Operations of all matrices but the output matrix, for one token."""
    attention_flops_per_pair: int
    """Operations of one query with one key, in all layers and heads together."""

    @classmethod
    def of(cls, module: Any, kv_bytes_per_token: int) -> Demands:
        """The demands of a transformers module, counted from its parameters and its configuration."""
        config = module.config.get_text_config()
        embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
        weights = sum(each.numel() for each in module.parameters())
        looked_up = 0 if head is embedding else embedding.numel()
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        pairs = 4 * config.num_hidden_layers * config.num_attention_heads * width
        read = weights - looked_up
        return cls(read * embedding.element_size(), kv_bytes_per_token, 2 * (read - head.numel()), pairs)

    def decode_bytes(self, batch: int, context: float) -> float:
        """Bytes that one decode step of `batch` rows with `context` tokens each reads."""
        return self.weight_bytes + batch * context * self.kv_bytes_per_token

    def prefill_flops(self, tokens: int) -> float:
        """Operations of one causal prompt. The output matrix is left out, since one row goes through it."""
        return tokens * self.linear_flops_per_token + tokens * tokens / 2 * self.attention_flops_per_pair


def measure_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """Measure a copy of a large block (read once, written once), and a square matrix product in `dtype`."""
    cuda = device.type == "cuda"
    source = torch.ones((CUDA_BYTES if cuda else CPU_BYTES) // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    seconds = _best(lambda: target.copy_(source), device)
    bandwidth = 2 * source.nbytes / seconds
    side = CUDA_SIDE if cuda else CPU_SIDE
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    flops = 2 * side**3 / _best(lambda: a @ b, device)
    return Peaks(bandwidth, _stated(device), flops)


def _stated(device: torch.device) -> float | None:
    """Bytes per second by the clock (kHz, two transfers a cycle) and width (bits) that the device reports."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    clock, width = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    return 2 * clock * 1000 * width / 8 if clock and width else None


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the quickest of REPEATS runs."""
    for _ in range(WARM_UPS):
        work()
    best = float("inf")
    for _ in range(REPEATS):
        _settle(device)
        began = time.perf_counter()
        work()
        _settle(device)
        best = min(best, time.perf_counter() - began)
    return best


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
