"""Device memory at a fixed address that one transfer per step fills: what captured graphs take their inputs from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.device.staging import Staging
from core.types.arrays import Ints


class StaticBlock:
    """int64[size] on the device. Forward stream only: a step's transfer follows all that earlier steps read here.

    So it needs no second buffer and no event. What leaves the forward stream must not be a view of it.
    """

    def __init__(self, size: int, staging: Staging) -> None:
        self.memory = torch.zeros(size, dtype=torch.int64, device=staging.device)
        self._staging = staging

    def fill(self, arrays: Sequence[Ints]) -> list[torch.Tensor]:
        """Put `arrays` (int64) one after another at the beginning; views of them, in order. One transfer, no wait."""
        lengths = [len(array) for array in arrays]
        used = self.memory[: sum(lengths)]
        used.copy_(self._staging.pinned(arrays), non_blocking=True)
        return list(used.split(lengths))
