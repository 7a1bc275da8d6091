"""Arrays of any dtype and shape go in one transfer and come out as they were."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from core.device.staging import AT_ONCE, SMALLEST, Staging
from core.types.arrays import Ints

CPU = torch.device("cpu")
ARRAYS = (
    np.arange(5),
    np.array([1.5, 2.5, 3.5], np.float32),
    np.empty(0, np.float32),
    np.array([True, False, True]),
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.array([0.25]),
    np.empty((0, 3), np.int32),
    np.arange(10)[::2],
    np.arange(9, dtype=np.int32)[::3],
)


class Packing(Staging):
    """Packs as for a device that copies from pinned memory."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.pins = True
        self.transfers = 0

    def pinned(self, ids: Sequence[Ints]) -> torch.Tensor:
        """As the original, in memory that is not pinned."""
        self.transfers += 1
        return torch.from_numpy(np.concatenate(ids))


@pytest.mark.parametrize("staging", [Staging(CPU), Packing()], ids=["shared", "packed"])
def test_what_is_uploaded_is_what_was_given(staging: Staging) -> None:
    for given, got in zip(ARRAYS, staging.upload(ARRAYS), strict=True):
        assert got.numpy().dtype == given.dtype and got.shape == given.shape
        assert np.array_equal(got.numpy(), given)


def test_one_transfer_takes_all() -> None:
    staging = Packing()
    staging.upload(ARRAYS)
    assert staging.transfers == 1


def test_pinned_blocks_of_every_size_are_at_hand_before_they_are_needed() -> None:
    staging, alive = Packing(), Counter[int]()

    def pinned(ids: Sequence[Ints]) -> torch.Tensor:
        block = torch.empty(sum(map(len, ids)), dtype=torch.int64)
        size = block.nbytes
        alive[size] += 1
        most[size] = max(most[size], alive[size])
        weakref.finalize(block, lambda: alive.subtract([size]))
        return block

    most = Counter[int]()
    staging.pinned = pinned  # type: ignore[method-assign]
    staging.touch_sizes(1 << 12)
    assert most == {SMALLEST << power: AT_ONCE for power in range(7)}, "up to what was asked for, eight of each"
    assert not any(alive.values()), "all were given back"


def test_a_cpu_pins_nothing() -> None:
    staging = Staging(CPU)
    staging.pinned = None  # type: ignore[method-assign, assignment]
    staging.touch_sizes(1 << 12)
    assert not staging.pins
