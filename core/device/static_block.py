"""Device memory at a fixed address, filled by one transfer per step. Captured graphs read their inputs there."""

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
        """As `fill`, with `others` of any dtype behind, in the same transfer: as many of them as there is room for.

        The parcel finds them. The rest are uploaded when they are asked for.
        """
        words = [words_of(each) for each in others]
        room = len(self.memory) - sum(map(len, arrays))
        count = int(np.searchsorted(np.cumsum([len(each) for each in words]), room, side="right"))
        views = self.fill([*arrays, *words[:count]])
        behind = zip(views[len(arrays) :], others, strict=False)
        return views[: len(arrays)], Parcel(self._staging, others[:count], [view_of(*each) for each in behind])
