"""Which slots a drafter forgets: all that a row got to write to, from the least place that it may write at next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core.memory.req_to_token_pool import TableWrites
from core.speculation.new_slots import new_slots


@pytest.mark.parametrize(("position", "is_new"), [(7, False), (8, True), (10, True), (11, True), (12, True)])
def test_a_decode_row_may_write_from_the_least_that_it_may_have(position: int, is_new: bool) -> None:
    """8 to 11 tokens, by how many drafts in flight prove right: what is behind the eighth is the row's to write."""
    writes = TableWrites(np.array([3]), np.array([position]), np.array([40]), page_size=1)
    batch: Any = SimpleNamespace(
        table_writes=writes,
        num_extend=1,
        rows=np.array([5, 3]),
        prefix_lens=np.array([20, 11]),
        lower_lens=np.array([8]),
    )
    assert new_slots(batch).tolist() == ([40] if is_new else [])
