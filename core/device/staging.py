"""Copies of host arrays to the device, through pinned memory where the device can copy from it asynchronously.

Every upload allocates from PyTorch's caching host allocator, which hands a pinned block out again only after the
copies that read it have finished. So no buffer can be overwritten while a copy still reads it (bug class D33).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from core.types.arrays import Ints

ALIGNMENT = 16
"""Packed arrays begin at multiples of this many bytes, where views of any dtype are legal."""


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

    def upload(self, arrays: Sequence[Ints]) -> list[torch.Tensor]:
        """Device views of int64 arrays, in order; one transfer for all of them, on the current stream.

        The arrays must not change afterwards: on the CPU the views share their memory.
        """
        if not self.pins:
            return [torch.from_numpy(array) for array in arrays]
        packed = self.pinned(arrays).to(self.device, non_blocking=True)
        return list(packed.split([len(array) for array in arrays]))

    def upload_floats(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Like `upload` for arrays of any dtype, in one transfer too; used only by batches that sample at random."""
        tensors = [torch.from_numpy(array) for array in arrays]
        return (
            tensors
            if not self.pins
            else unpack_bytes(tensors, self.packed_bytes(tensors).to(self.device, non_blocking=True))
        )

    def packed_bytes(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """uint8[n]: the tensors' bytes one after another, each beginning at a multiple of `ALIGNMENT`."""
        packed = torch.empty(sum(_room(each) for each in tensors), dtype=torch.uint8, pin_memory=self.pins)
        for own, tensor in zip(unpack_bytes(tensors, packed), tensors, strict=True):
            own.copy_(tensor)
        return packed


def unpack_bytes(tensors: Sequence[torch.Tensor], packed: torch.Tensor) -> list[torch.Tensor]:
    """Views into `packed` (of `Staging.packed_bytes`), of the dtypes and shapes of `tensors`."""
    views, start = [], 0
    for tensor in tensors:
        views.append(packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _room(tensor)
    return views


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
