"""Where the parts of one transfer come to lie: what graphs read at its fixed place, what is read once where room is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.device.staging import Staging
from core.device.static_block import StaticBlock

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [4, 7, 8, 9], ids=["own", "short", "just", "roomy"])
def test_inputs_lie_at_their_place_and_others_where_there_is_room(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    block, transfers = StaticBlock(size, Staging(CPU)), []
    packs = Staging.pinned
    monkeypatch.setattr(Staging, "pinned", lambda self, ids: (transfers.append(1), packs(self, ids))[1])
    own = [np.array([3, 1]), np.array([5]), np.array([7])]
    others = [np.array([0.5, 1.5, 2.5], np.float32), np.array([[1], [9]])]
    try:
        views, parcel = block.carry(own, others)
    except RuntimeError as error:
        pytest.fail(f"more is laid into static memory than it holds: {error}")
    assert [each.tolist() for each in views] == [[3, 1], [5], [7]] and block.memory[:4].tolist() == [3, 1, 5, 7]
    floats, ints = parcel.upload(others)
    assert floats.tolist() == [0.5, 1.5, 2.5] and ints.tolist() == [[1], [9]] and len(transfers) == 1
    held = block.memory.untyped_storage().data_ptr()
    assert all(each.untyped_storage().data_ptr() == held for each in views)
    assert all((each.untyped_storage().data_ptr() == held) == (size >= 8) for each in (floats, ints))
