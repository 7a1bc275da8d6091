"""Device memory at a fixed address, filled by one transfer per step. Captured graphs read their inputs there.

What else a step sends is read where it lies, and only once. So it may lie elsewhere, and needs no room here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from core.device.parcel import Parcel
from core.device.staging import Staging, view_of, words_of
from core.types.arrays import Ints


class StaticBlock:
    """int64[size] on the device. Forward stream only.

    A step's transfer runs after all reads of earlier steps, so no second buffer and no event is needed. A tensor that
    another stream reads must not be a view of this memory.
    """

    def __init__(self, size: int, staging: Staging) -> None:
        self.memory = torch.zeros(size, dtype=torch.int64, device=staging.device)
        self._staging = staging

    def fill(self, arrays: Sequence[Ints]) -> list[torch.Tensor]:
        """Copy `arrays` (int64) one after another to the beginning, in one transfer without a wait; views, in order."""
        lengths = [len(array) for array in arrays]
        used = self.memory[: sum(lengths)]
        used.copy_(self._staging.pinned(arrays), non_blocking=True)
        return list(used.split(lengths))

    def carry(self, arrays: Sequence[Ints], others: Sequence[np.ndarray]) -> tuple[list[torch.Tensor], Parcel]:
        """As `fill`, with `others` of any dtype behind, in the same transfer. The parcel finds them.

        Where there is no room for all, everything goes to memory of the step's own, and `arrays` from there to this.
        """
        words, count = [words_of(each) for each in others], len(arrays)
        if sum(map(len, [*arrays, *words])) <= len(self.memory):
            views = self.fill([*arrays, *words])
        else:
            views = self._through([*arrays, *words], count)
        behind = zip(views[count:], others, strict=True)
        return views[:count], Parcel(self._staging, others, [view_of(*each) for each in behind])

    def _through(self, arrays: Sequence[Ints], count: int) -> list[torch.Tensor]:
        """As `fill` for the first `count` of `arrays`; the others stay in the memory that the transfer went to."""
        lengths = [len(array) for array in arrays]
        own = sum(lengths[:count])
        sent = self._staging.pinned(arrays).to(self.memory.device, non_blocking=True)
        used = self.memory[:own].copy_(sent[:own])
        return [*used.split(lengths[:count]), *sent[own:].split(lengths[count:])]
