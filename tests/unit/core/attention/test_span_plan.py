"""The host-planned step: who is gathered together, how much padding that costs, what masks are left out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.attention.span import AttentionSpan
from core.attention.span_plan import CHUNK_ROWS, SpanPlan, build_span_plan
from core.memory.kv_pool import KVLayerSpec
from tests.support.fakes.paged_steps import PagedRows, Part

WIDTH = 42
PAGED = PagedRows((KVLayerSpec(0, 1, 1, 1),), num_rows=40, max_len=WIDTH)


def plan(parts: Sequence[Part], num_extend: int, span: AttentionSpan | None = None) -> SpanPlan:
    return build_span_plan(PAGED.batch(parts, num_extend), span or AttentionSpan(), torch.float32)


def test_few_decode_rows_stay_in_order_in_one_chunk() -> None:
    found = plan([Part(3, 9, 1), Part(1, 2, 1)], 0)
    assert found.in_order
    (chunk,) = found.decodes
    assert (chunk.rows, chunk.length) == (2, 10)
    assert chunk.slots.view(2, 10)[1].tolist() == [*PAGED.table[1, :3].tolist(), *[0] * 7]


def test_equal_lengths_need_no_mask() -> None:
    (chunk,) = plan([Part(3, 9, 1), Part(1, 9, 1)], 0).decodes
    assert chunk.mask is None
    # A window cuts both to the same length, wherever they stand.
    (chunk,) = plan([Part(3, 9, 1), Part(1, 30, 1)], 0, AttentionSpan(window=5)).decodes
    assert (chunk.length, chunk.mask) == (5, None)


def test_many_decode_rows_share_chunks_with_rows_of_their_length() -> None:
    lengths = [1, 40] * 16
    found = plan([Part(row + 1, length - 1, 1) for row, length in enumerate(lengths)], 0)
    assert not found.in_order
    assert sorted(int(t) for chunk in found.decodes for t in chunk.tokens) == list(range(32))
    assert [(chunk.rows, chunk.length) for chunk in found.decodes] == [(CHUNK_ROWS, 1)] * 2 + [(CHUNK_ROWS, 40)] * 2
    assert all(chunk.mask is None for chunk in found.decodes)


def test_prefill_segments_of_one_token_are_decoded() -> None:
    found = plan([Part(1, 0, 5), Part(2, 7, 1), Part(3, 11, 1)], 2)
    assert [(piece.start, piece.end) for piece in found.prefills] == [(0, 5)]
    assert [chunk.tokens.tolist() for chunk in found.decodes] == [[5, 6]]
    assert not found.in_order


def test_fresh_prefill_reads_nothing_back_and_needs_no_mask() -> None:
    (piece,) = plan([Part(1, 0, 16)], 1, AttentionSpan(window=16)).prefills
    assert piece.slots is None
    assert piece.mask is None
    (piece,) = plan([Part(1, 0, 17)], 1, AttentionSpan(window=16)).prefills
    assert piece.mask is not None
    assert int(piece.mask.isinf().sum()) == 17 * 16 // 2 + 1, "what is to come, and one key that is too old"


def test_continued_prefill_gathers_only_what_its_first_query_sees() -> None:
    (piece,) = plan([Part(1, 30, 4)], 1, AttentionSpan(window=8)).prefills
    assert piece.slots is not None
    assert piece.slots.tolist() == PAGED.table[1, 23:34].tolist()


def test_a_short_row_at_the_end_of_the_table_stays_inside_it() -> None:
    """Its chunk of keys begins at 40 of 42, and it is padded to the 8 keys of its neighbour."""
    (chunk,) = plan([Part(1, 7, 1), Part(2, 41, 1)], 0, AttentionSpan(chunk=8)).decodes
    assert chunk.slots.view(2, 8)[1].tolist() == [*PAGED.table[2, 40:42].tolist(), *[0] * 6]


def test_slots_are_translated_to_the_pool_of_the_batch_and_padding_stays_padding() -> None:
    batch = PAGED.batch([Part(1, 20, 3), Part(2, 8, 1), Part(3, 30, 1)], 1)
    plain = build_span_plan(batch, AttentionSpan(window=5), torch.float32)
    batch.page_map = torch.arange(batch.kv_pool.num_pages + 1, dtype=torch.int32).flip(0)
    batch.page_map[0] = 0
    found = build_span_plan(batch, AttentionSpan(window=5), torch.float32)
    for old, new in (
        (plain.prefills[0].slots, found.prefills[0].slots),
        (plain.decodes[0].slots, found.decodes[0].slots),
    ):
        assert old is not None and new is not None and new.dtype == old.dtype == torch.int32
        assert new.tolist() == [int(batch.page_map[slot]) for slot in old.tolist()]
        assert new.tolist() != old.tolist()
    assert batch.pool_slots(torch.zeros(3, dtype=torch.int64)).tolist() == [0, 0, 0]
