"""What a step's readers would upload one after another, sent beside the step's own inputs in one transfer.

A transfer takes the host several microseconds to submit, whatever its size, and a step has up to a dozen readers:
companions, sampling options, attention. The step asks each beforehand which arrays it is going to upload. Those arrays
are told by identity: a reader that uploads another one gets what it asked for, by a transfer of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from core.device.staging import Staging
from core.types.arrays import Ints


class Parcel(Staging):
    """A staging with some arrays on the device already, for one step. Forward stream only."""

    def __init__(self, staging: Staging, arrays: Sequence[np.ndarray], views: Sequence[torch.Tensor]) -> None:
        """`views[i]`: `arrays[i]` on the device. They must not change while the step runs."""
        self.device, self.pins = staging.device, staging.pins
        self._staging = staging
        # The arrays are kept: the identity of one that is gone may become that of another.
        self._arrived = {id(array): (array, view) for array, view in zip(arrays, views, strict=True)}

    def pinned(self, ids: Sequence[Ints]) -> torch.Tensor:
        """As the staging that it was made from."""
        return self._staging.pinned(ids)

    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """As `Staging.upload`, with a transfer only for those of `arrays` that are not there yet."""
        missing = [array for array in arrays if id(array) not in self._arrived]
        sent = iter(self._staging.upload(missing) if missing else ())
        return [self._arrived[id(array)][1] if id(array) in self._arrived else next(sent) for array in arrays]
