"""How a pool stores keys and values: as they are computed, or as codes with a scale for each token and KV head.

A format is what turns one into the other, on any device, by operations on tensors. It is the definition: a kernel that
reads or writes codes by itself finds and leaves the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Codes:
    """Numbers as codes: the type of a code, that of a scale, and the way there and back."""

    code: torch.dtype
    scale: torch.dtype
    encode: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """codes [..., D] and scales [...] of floats [..., D]. What is not finite comes back as NaN, never as a number."""
    decode: Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
    """[..., D] in the given dtype from codes [..., D] and scales [...]; zeros stand for zeros."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A way to store keys and values, by the name that `--kv-cache-dtype` has for it."""

    name: str
    codes: Codes | None = None
    """None: numbers are stored in the dtype that the model computes in."""

    def element(self, dtype: torch.dtype) -> torch.dtype:
        """Type of what is stored for one number of `dtype`."""
        return dtype if self.codes is None else self.codes.code

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of one head of a token."""
        return 0 if self.codes is None else self.codes.scale.itemsize


PLAIN = KVFormat("auto")
"""As they are computed."""
