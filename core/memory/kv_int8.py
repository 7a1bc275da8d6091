"""Keys and values as integers of eight bits, each head of a token times a power of two of its own.

The power is the least with which the head's largest number rounds to 127 at most. Integers divide the range of a head
evenly where eight-bit floats spend bits on small numbers, so their error is a fifth (decision 51). A power of two takes
a byte, as a biased exponent, and multiplying by it never rounds; a code is exact in bfloat16. Compiled decoders of the
CPU read and write the same bytes (`core/models/native/stored.h`).
"""

from __future__ import annotations

from typing import Final

import torch

from core.memory.kv_format import Codes, KVFormat

MOST: Final = 127
GROWN: Final = 128 / 127.5
"""What the largest number is multiplied by, so that with the power below it 127.5 at most is left."""
BELOW: Final = 6
"""The scale's exponent is so much less than that of the number that was grown."""
SIGNLESS: Final = 0x7FFFFFFF
NO_NUMBER: Final = 255
"""The scale of a head that holds what is no number: it makes each of its codes, which are zeros, a NaN."""


def encode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [..., D] and uint8 [...]: codes of `values`, floats [..., D], and exponents of their scales, biased by 127.

    Rounds to nearest, to even halfway. A head with a number that is not finite becomes NaN, and so makes its row fail.
    """
    wide = values.float().contiguous()
    largest = (wide.view(torch.int32) & SIGNLESS).amax(-1)
    exponents = (((largest.view(torch.float32) * GROWN).view(torch.int32) >> 23) - BELOW).clamp_(min=1)
    odd = exponents > NO_NUMBER - 1 - BELOW
    # The inverse of a power of two is one too, and a product with it rounds nothing.
    scaled = wide * ((254 - exponents) << 23).view(torch.float32)[..., None]
    codes = torch.where(odd[..., None], 0.0, scaled.round_().clamp_(-MOST, MOST))
    return codes.to(torch.int8), torch.where(odd, NO_NUMBER, exponents).to(torch.uint8)


def decode(codes: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., D] in `dtype` from what `encode` made, in new memory. Exponent 0, of a slot never written, makes zeros."""
    scales = (exponents.to(torch.int32) << 23).view(torch.float32)
    return codes.float().mul_(scales[..., None]).to(dtype)


INT8: Final = KVFormat("int8", Codes(torch.int8, torch.uint8, encode, decode))
