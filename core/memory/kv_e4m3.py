"""Keys and values as eight-bit floats (e4m3), each head of a token times a power of two of its own.

The power is the one that puts the head's largest number into [128, 256): nothing saturates, whatever a model's keys
are, and smaller numbers keep four digits for thirteen powers of two below. Eight-bit floats round by ratios, so a scale
that is no power of two would gain nothing; this one takes a byte, and multiplying by it never rounds. That one byte is
an exponent is as in the E8M0 scales of the OCP Microscaling formats. Measured in decision 51.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

from core.memory.kv_format import Codes, KVFormat

LARGEST: Final = 448.0
"""The largest number of e4m3; its NaN is code 127, and there is no infinity."""
BELOW: Final = 7
"""The scale's exponent is so much less than that of the largest number."""
SIGNLESS: Final = 0x7FFFFFFF


def encode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [..., D] and uint8 [...]: codes of `values`, floats [..., D], and exponents of their scales, biased by 127.

    Rounds to nearest, to even halfway. A number that is not finite becomes NaN, and so makes its row fail.
    """
    wide = values.float().contiguous()
    largest = (wide.view(torch.int32) & SIGNLESS).amax(-1)
    exponents = ((largest >> 23) - BELOW).clamp_(min=1)
    # The inverse of a power of two is one too, and a product with it rounds nothing.
    scaled = wide * ((254 - exponents) << 23).view(torch.float32)[..., None]
    scaled = torch.where(scaled.abs() <= LARGEST, scaled, torch.nan)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), exponents.to(torch.uint8)


def decode(codes: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., D] in `dtype` from what `encode` made, in new memory. Exponent 0, of a slot never written, makes zeros."""
    # A table: four times as fast on a CPU as PyTorch's conversion.
    numbers = _numbers(codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)
    scales = (exponents.to(torch.int32) << 23).view(torch.float32)
    return numbers.mul_(scales[..., None]).to(dtype)


@cache
def _numbers(device: torch.device) -> torch.Tensor:
    """float32[256]: the number of each code."""
    # Made inside inference mode it could not be used outside later.
    with torch.inference_mode(False):
        return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


FP8_E4M3: Final = KVFormat("fp8_e4m3", Codes(torch.uint8, torch.uint8, encode, decode))
