"""Which rows of a planned step sample, and for whom: chunks that end their prompt and decode rows, by their owners."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from core.batch.build import Segment, StepPlan, build_batch
from core.batch.schedule_batch import ForwardMode, HistoryWrites, ScheduleBatch
from core.memory.req_to_token_pool import TableWrites
from core.types.arrays import Ints
from tests.unit.core.sampling.batches import Row, batch_of

NONE: Ints = np.empty(0, np.int64)
GENERATIONS = np.arange(100, 110)
"""By row."""


def step(segments: list[Segment], rows: list[int], lens: list[int]) -> ScheduleBatch:
    decodes = np.array(rows, np.int64), np.array(lens, np.int64)
    plan = StepPlan(7, segments, *decodes, decodes[1] - 2, cast(TableWrites, None), NONE, HistoryWrites(), False)
    return build_batch(
        plan,
        GENERATIONS,
        sampling=lambda rows, lens: cast(Any, SimpleNamespace(rows=rows, lens=lens)),
        pin=lambda parts: torch.from_numpy(np.concatenate(parts)),
        companions=lambda *_: {},
    )


def test_a_prompt_that_goes_on_samples_nothing_and_shifts_nobody() -> None:
    middle, last = Segment(4, 8, np.arange(3), final=False), Segment(2, 0, np.arange(5), final=True)
    batch = step([middle, last], [9, 1], [20, 30])
    assert batch.mode is ForwardMode.MIXED and (batch.num_extend, batch.num_decode) == (2, 2)
    assert batch.rows.tolist() == [4, 2, 9, 1] and batch.seq_lens.tolist() == [11, 5, 21, 31]
    assert batch.sample_rows.tolist() == [2, 9, 1]
    assert batch.sample_generations.tolist() == [102, 109, 101], "tokens are for the owners of their own rows"
    assert cast(Any, batch.sampling).lens.tolist() == [5, 21, 31]
    assert batch.num_tokens == 10
    assert batch.prefix_lens.tolist() == [8, 0, 20, 30] and batch.lower_lens.tolist() == [18, 28]


def test_a_batch_is_as_long_as_its_rows_whatever_their_options_bring() -> None:
    """Bias entries, for one, are as many as the clients like."""
    rows = [Row(torch.zeros(8), bias=((1, 2.0), (2, 2.0), (3, 2.0))), Row(torch.zeros(8))]
    assert len(batch_of(rows)) == 2 and len(batch_of([])) == 0
