"""Which way a launch reads codes: what a kernel is compiled for."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

ARITHMETIC: Final = 1
INSTRUCTIONS: Final = 2
"""See `core.attention.triton.e4m3.numbers_of`."""
CAPABILITY: Final = (8, 9)
"""Of GPUs with instructions for eight-bit floats."""


def codes_of(keys: torch.Tensor) -> int:
    """0 for keys as they were computed; for codes, uint8, how they become numbers on their device."""
    return _way(keys.device) if keys.dtype is torch.uint8 else 0


@cache
def _way(device: torch.device) -> int:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY:
        return INSTRUCTIONS
    return ARITHMETIC
