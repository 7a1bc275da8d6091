"""Slots are translated by their page and keep their place in it."""

from __future__ import annotations

import pytest
import torch

from core.memory.kv_pool import KVLayerSpec
from tests.support.fakes.paged_steps import PagedRows, Part


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_translated_slot_keeps_its_place_in_the_page(dtype: torch.dtype) -> None:
    batch = PagedRows((KVLayerSpec(0, 1, 1, 1),), num_rows=2, max_len=8, page_size=4).batch([Part(1, 7, 1)], 0)
    slots = torch.tensor([[0, 3, 4], [7, 10, 19]], dtype=dtype)
    assert batch.pool_slots(slots) is slots
    batch.page_map = torch.tensor([0, 3, 1, 2, 4], dtype=torch.int32)
    found = batch.pool_slots(slots)
    assert found.dtype == dtype and found.tolist() == [[0, 3, 12], [15, 6, 19]]
