"""Which rows of a planned step sample, and for whom: chunks that end their prompt and decode rows, by their owners."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from core.batch.build import Segment, StepPlan, build_batch
from core.batch.schedule_batch import ForwardMode, HistoryWrites, ScheduleBatch
from core.batch.spec_plan import Aim, SpecPlan
from core.memory.companion import Writes
from core.memory.req_to_token_pool import TableWrites
from core.types.arrays import Ints
from tests.unit.core.sampling.batches import Row, batch_of

NONE: Ints = np.empty(0, np.int64)
GENERATIONS = np.arange(100, 110)
"""By row."""


def step(
    segments: list[Segment],
    rows: list[int],
    lens: list[int],
    spec: SpecPlan | None = None,
    companions: Callable[..., Writes] = lambda *_: {},
    doubt: int = 2,
) -> ScheduleBatch:
    decodes = np.array(rows, np.int64), np.array(lens, np.int64)
    rest = (cast(TableWrites, None), NONE, HistoryWrites(), False)
    plan = StepPlan(7, segments, *decodes, decodes[1] - doubt, *rest, spec=spec)
    return build_batch(
        plan,
        GENERATIONS,
        sampling=lambda rows, lower, upper: cast(Any, SimpleNamespace(rows=rows, lower=lower, upper=upper)),
        pin=lambda parts: torch.from_numpy(np.concatenate(parts)),
        companions=companions,
    )


def test_a_prompt_that_goes_on_samples_nothing_and_shifts_nobody() -> None:
    middle, last = Segment(4, 8, np.arange(3), final=False), Segment(2, 0, np.arange(5), final=True)
    batch = step([middle, last], [9, 1], [20, 30])
    assert batch.mode is ForwardMode.MIXED and (batch.num_extend, batch.num_decode) == (2, 2)
    assert batch.rows.tolist() == [4, 2, 9, 1] and batch.seq_lens.tolist() == [11, 5, 21, 31]
    assert batch.sample_rows.tolist() == [2, 9, 1]
    assert batch.sample_generations.tolist() == [102, 109, 101], "tokens are for the owners of their own rows"
    sampling = cast(Any, batch.sampling)
    assert sampling.lower.tolist() == sampling.upper.tolist() == [5, 21, 31]
    assert batch.num_tokens == 10
    assert batch.prefix_lens.tolist() == [8, 0, 20, 30] and batch.lower_lens.tolist() == [18, 28]


def test_a_row_with_drafts_is_bounded_by_all_that_may_be_accepted() -> None:
    """Rows of 18 to 20 and 28 to 30 tokens; the first verifies up to 4 drafts, and the second ends at 31 tokens."""
    told: list[list[list[int]]] = []

    def companions(*columns: Ints | None) -> Writes:
        told.append([[] if column is None else column.tolist() for column in columns])
        return {}

    spec = SpecPlan(np.array([4, 2]), np.array([90, 31]), Aim(4))
    batch = step([], [9, 1], [20, 30], spec, companions)
    assert batch.mode is ForwardMode.DECODE and batch.verifies and batch.spec is spec
    assert batch.extend_lens.tolist() == [5, 3] and batch.num_tokens == 8
    sampling = cast(Any, batch.sampling)
    assert sampling.lower.tolist() == [19, 29] and sampling.upper.tolist() == [25, 31]
    assert told == [[[9, 1], [18, 28], [1, 1], [6, 2]]], "what is computed for sure, and what may come on top of it"
    assert not step([], [9, 1], [20, 30], SpecPlan(np.array([0, 0]), spec.limits, 4)).verifies
    assert not step([], [9, 1], [20, 30]).verifies


@pytest.mark.parametrize("chunks", [0, 1])
def test_lengths_that_are_exact_say_what_bounds_without_a_doubt_say(chunks: int) -> None:
    """Companions must hear that nothing is ahead: None would tell them that no drafts were in doubt before either."""
    told: list[list[list[int]]] = []

    def companions(*columns: Ints | None) -> Writes:
        assert all(column is not None and column.dtype == np.int64 for column in columns)
        told.append([column.tolist() for column in columns if column is not None])
        return {}

    segments, found = [Segment(4, 8, np.arange(3), final=True)][:chunks], []
    for exact in (False, True):
        spec = SpecPlan(np.array([0, 0]), np.array([90, 31]), Aim(4), exact=exact)
        batch = step(segments, [9, 1], [20, 30], spec, companions, doubt=0)
        sampling = cast(Any, batch.sampling)
        columns = (batch.prefix_lens, batch.extend_lens, batch.lower_lens, sampling.lower, sampling.upper)
        found.append([column.tolist() for column in columns])
    assert found[0] == found[1] and told[0] == told[1]
    assert told[1] == [[4, 9, 1][1 - chunks :], [8, 20, 30][1 - chunks :], [3, 1, 1][1 - chunks :], [0] * (2 + chunks)]


def test_a_batch_is_as_long_as_its_rows_whatever_their_options_bring() -> None:
    """Bias entries, for one, are as many as the clients like."""
    rows = [Row(torch.zeros(8), bias=((1, 2.0), (2, 2.0), (3, 2.0))), Row(torch.zeros(8))]
    assert len(batch_of(rows)) == 2 and len(batch_of([])) == 0
