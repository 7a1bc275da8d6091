"""Copies of host arrays to the device, through pinned memory where the device can copy from it asynchronously.

Every upload allocates from PyTorch's caching host allocator, which hands a pinned block out again only after the
copies that read it have finished. So no buffer can be overwritten while a copy still reads it (bug class D33).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from core.types.arrays import Ints

WORD = 8
"""Bytes at whose multiples packed arrays begin."""
SMALLEST = 64
"""Bytes of the smallest pinned block that is touched before it is needed."""
AT_ONCE = 8
"""Blocks of one size that may be in use at a time: a few transfers of each of the steps in flight."""


class Staging:
    """Makes pinned copies of host arrays and sends them. On the CPU uploads copy nothing: tensors share the arrays."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pins = device.type == "cuda"

    def pinned(self, ids: Sequence[Ints]) -> torch.Tensor:
        """int64[sum of lengths]: the arrays one after another, in pinned memory where there is any."""
        flat = torch.empty(sum(len(part) for part in ids), dtype=torch.int64, pin_memory=self.pins)
        np.concatenate(ids, out=flat.numpy())
        return flat

    def touch_sizes(self, largest: int) -> None:
        """Have pinned blocks of all sizes up to `largest` bytes at hand: to get one from the driver may take a
        millisecond, in which it waits for the device too.

        The caching allocator rounds sizes up to powers of two, and keeps what is given back.
        """
        if self.pins:
            sizes = [SMALLEST << power for power in range((largest // SMALLEST).bit_length())]
            # All at once, or each would be given the same block.
            held = [self.pinned([np.empty(size // WORD, np.int64)]) for size in sizes for _ in range(AT_ONCE)]
            del held

    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Device views of arrays of any dtype, in order; one transfer for all of them, on the current stream.

        The arrays must not change afterwards: on the CPU the views share their memory.
        """
        if not self.pins:
            return [torch.from_numpy(array) for array in arrays]
        words = [words_of(array) for array in arrays]
        packed = self.pinned(words).to(self.device, non_blocking=True)
        parts = packed.split([len(each) for each in words])
        return [view_of(part, array) for part, array in zip(parts, arrays, strict=True)]


def words_of(array: np.ndarray) -> Ints:
    """int64[n]: the bytes of `array`, and what fills its last word. So each begins where views of any dtype may."""
    if array.dtype == np.int64:
        return array.reshape(-1)
    words = np.zeros(-(-array.nbytes // WORD), np.int64)
    words.view(np.uint8)[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return words


def view_of(words: torch.Tensor, array: np.ndarray) -> torch.Tensor:
    """`words`, which `words_of` made of `array`, in its dtype and shape."""
    if array.dtype != np.int64:
        words = words.view(torch.uint8)[: array.nbytes].view(torch.from_numpy(array).dtype)
    return words.view(array.shape)
