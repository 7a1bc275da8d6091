"""Behind which pages all pools can go on, where each alone knows some."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from core.memory.companion import resumed_by
from core.types.arrays import Ints


class Pool:
    """Can go on behind so many pages."""

    def __init__(self, *ends: int) -> None:
        self._ends = ends

    def resumable(self, pages: Ints) -> int:
        assert len(pages), "there are some"
        return max((end for end in self._ends if end <= len(pages)), default=0)


@pytest.mark.parametrize(
    ("pools", "found"),
    [
        ([Pool(2, 5, 9)], 5),
        ([Pool(2, 5, 9), Pool(1, 2, 3, 7)], 2),
        ([Pool(6), Pool(4), Pool(2)], 0),
        ([Pool(1, 3, 6), Pool(1, 4), Pool(1, 5)], 1),
        ([Pool()], 0),
    ],
)
def test_all_pools_agree_on_the_longest(pools: list[Any], found: int) -> None:
    assert resumed_by(pools, np.arange(10, 17)).tolist() == list(range(10, 10 + found))
    assert resumed_by(pools, np.arange(0)).tolist() == []
