"""Vectors of the texts of a step: of one kind or several, whole or over chunks, among tokens of other requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from core.batch.pooling_batch import PooledSegment, PoolingBatch
from core.device.staging import Staging
from core.executor.pooling import Pooler
from core.memory.req_to_token_pool import ReqToTokenPool
from core.types.io import Pooling

WIDTH, ROWS = 6, 5
CPU = torch.device("cpu")
STAGING = Staging(CPU)
KINDS = (Pooling.MEAN, Pooling.CLS, Pooling.LAST)


class Head:
    """Sums of the first and the last token of a text: as many labels as asked for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def label(self, hidden: torch.Tensor, starts: Sequence[int], ends: Sequence[int]) -> torch.Tensor:
        sums = [hidden[start].float().sum() + hidden[end - 1].float().sum() for start, end in zip(starts, ends)]
        return torch.stack(sums)[:, None] * torch.arange(1, self.count + 1)


def pooler(labels: int | None = None) -> Pooler:
    return Pooler(ReqToTokenPool(ROWS, 64, CPU), None if labels is None else Head(labels))


def batch(*segments: PooledSegment) -> PoolingBatch:
    rows = np.array([each.row for each in segments if each.final])
    return PoolingBatch(segments, rows, np.ones_like(rows))


def whole(row: int, start: int, end: int, pooling: Pooling) -> PooledSegment:
    return PooledSegment(row, start, end, 0, pooling, final=True)


def pooled(text: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """[H] of [n, H]."""
    wide = text.double()
    return {Pooling.MEAN: wide.mean(0), Pooling.CLS: wide[0], Pooling.LAST: wide[-1]}[pooling].float()


def equal(found: torch.Tensor, want: Sequence[torch.Tensor]) -> None:
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, torch.stack(list(want)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pooling", KINDS)
def test_texts_of_one_kind_among_other_tokens(pooling: Pooling, dtype: torch.dtype) -> None:
    """The first of these texts begins behind two tokens of another request, and three more stand behind the last."""
    hidden, places = torch.randn(30, WIDTH).to(dtype), ((2, 3), (3, 11), (15, 27))
    segments = [whole(row, *place, pooling) for row, place in enumerate(places, 1)]
    want = [pooled(hidden[start:end], pooling) for start, end in places]
    equal(pooler().pool(hidden, batch(*segments), STAGING), want)


@pytest.mark.parametrize("labels", [None, 2, WIDTH, WIDTH + 3])
def test_several_kinds_in_one_step_keep_their_order(labels: int | None) -> None:
    hidden = torch.randn(20, WIDTH)
    kinds = [Pooling.LAST, Pooling.MEAN, Pooling.CLS, Pooling.MEAN]
    kinds += [] if labels is None else [Pooling.LABELS]
    segments = [whole(row, 4 * row - 4, 4 * row, kind) for row, kind in enumerate(kinds, 1)]
    found = pooler(labels).pool(hidden, batch(*segments), STAGING)
    assert found.shape == (len(kinds), max(WIDTH, labels or 0))
    equal(found[:4, :WIDTH], [pooled(hidden[4 * at : 4 * at + 4], kind) for at, kind in enumerate(kinds[:4])])
    assert not found[:4, WIDTH:].any()
    if labels is not None:
        equal(found[4:, :labels], Head(labels).label(hidden, [16], [20]))
        assert not found[4:, labels:].any()


@pytest.mark.parametrize("labels", [2, WIDTH + 3])
def test_labels_alone_are_as_wide_as_vectors(labels: int) -> None:
    hidden = torch.randn(9, WIDTH)
    segments = [whole(1, 0, 4, Pooling.LABELS), whole(2, 4, 9, Pooling.LABELS)]
    found = pooler(labels).pool(hidden, batch(*segments), STAGING)
    assert found.shape == (2, max(WIDTH, labels))
    equal(found[:, :labels], list(Head(labels).label(hidden, [0, 4], [4, 9])))
    assert not found[:, labels:].any()


@pytest.mark.parametrize("pooling", KINDS)
def test_chunks_of_a_prompt_make_one_vector(pooling: Pooling) -> None:
    """Row 1 has three chunks. In the second step a text of its own is behind it, in the third one is before it."""
    pools, text, other = pooler(), torch.randn(12, WIDTH), torch.randn(5, WIDTH)
    first = batch(PooledSegment(1, 0, 4, 0, pooling, final=False))
    assert pools.pool(text[:4], first, STAGING).shape == (0, WIDTH)
    second = batch(PooledSegment(1, 0, 5, 4, pooling, final=False), whole(2, 5, 10, pooling))
    equal(pools.pool(torch.cat([text[4:9], other]), second, STAGING), [pooled(other, pooling)])
    third = batch(whole(2, 0, 5, pooling), PooledSegment(1, 5, 8, 9, pooling, final=True))
    want = [pooled(other, pooling), pooled(text, pooling)]
    equal(pools.pool(torch.cat([other, text[9:]]), third, STAGING), want)


def test_a_prompt_that_begins_again_begins_afresh() -> None:
    pools, text = pooler(), torch.randn(6, WIDTH)
    for rows in (text + 1, text):
        pools.pool(rows[:3], batch(PooledSegment(1, 0, 3, 0, Pooling.MEAN, final=False)), STAGING)
    last = batch(PooledSegment(1, 0, 3, 3, Pooling.MEAN, final=True))
    equal(pools.pool(text[3:], last, STAGING), [pooled(text, Pooling.MEAN)])


def test_what_is_no_number_stays_with_its_text() -> None:
    hidden = torch.randn(9, WIDTH)
    hidden[4] = torch.nan
    segments = [whole(row, 3 * row - 3, 3 * row, Pooling.MEAN) for row in (1, 2, 3)]
    found = pooler().pool(hidden, batch(*segments), STAGING)
    assert found.isnan().any(1).tolist() == [False, True, False]


def test_labels_that_no_prompt_ends_for_are_none() -> None:
    part = PooledSegment(1, 0, 3, 0, Pooling.LABELS, final=False)
    assert pooler(2).pool(torch.randn(3, WIDTH), batch(part), STAGING).shape == (0, WIDTH)
