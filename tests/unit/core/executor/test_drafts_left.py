"""Which rows have drafts left, so that a step behind which none are wanted takes back those and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from core.batch.hidden import NO_HIDDEN
from core.batch.result import StepResult
from core.batch.spec_plan import Aim, SpecPlan
from core.executor.speculator import MOST_UNHEARD, Speculator
from core.speculation.drafter import Drafts, Ran
from tests.support.fakes.adversaries import always_right
from tests.support.fakes.fixed_depth import FixedDepth
from tests.unit.core.executor.test_speculator import MOST, ChangingDepth, World


def test_what_rows_have_left_is_taken_back_row_by_row() -> None:
    """Also where another row's step came between, which left nothing or took its own back."""
    drafter: Any = SimpleNamespace(
        needs_hidden=NO_HIDDEN,
        runs_model=False,
        draft=lambda ran, aim: Drafts(np.ones((len(ran.rows), MOST), np.int64), np.full(len(ran.rows), MOST)),
        hear=lambda ran: None,
    )
    speculator = Speculator(drafter, World(always_right, FixedDepth(MOST)).runner.state)

    def step(rows: list[int], most: int) -> list[int] | None:
        spec = SpecPlan(np.zeros(1, np.int64), np.array([99]), Aim(most))
        batch: Any = SimpleNamespace(sample_rows=np.array(rows), spec=spec)
        forward: Any = None
        found = speculator.drafted(batch, forward, torch.full((len(rows),), 7), torch.full((len(rows),), 5), None)
        return found["draft_len"].tolist() if found else None

    assert step([2, 3], MOST) == [MOST, MOST]
    assert step([2], 0) == [0]
    assert step([2], 0) is None
    assert step([3], 0) == [0]
    assert step([2, 3], 0) is None


def test_what_a_row_has_left_outlives_a_step_in_which_another_row_finds_nothing() -> None:
    found = iter([MOST, 0])
    drafter: Any = SimpleNamespace(
        needs_hidden=NO_HIDDEN,
        runs_model=False,
        draft=lambda ran, aim: Drafts(np.ones((1, MOST), np.int64), np.array([next(found)])),
        hear=lambda ran: None,
    )
    speculator = Speculator(drafter, World(always_right, FixedDepth(MOST)).runner.state)

    def step(row: int, most: int) -> list[int] | None:
        batch: Any = SimpleNamespace(
            sample_rows=np.array([row]), spec=SpecPlan(np.zeros(1, np.int64), np.array([99]), Aim(most))
        )
        forward: Any = None
        columns = speculator.drafted(batch, forward, torch.tensor([7]), torch.tensor([5]), None)
        return columns["draft_len"].tolist() if columns else None

    assert step(2, MOST) == [MOST]
    assert step(3, MOST) is None
    assert step(2, 0) == [0]


def test_steps_without_drafts_are_heard_of_before_drafts_are_made_and_before_rows_have_new_owners() -> None:
    heard: list[object] = []

    def hear(ran: Ran) -> None:
        assert ran.counts.tolist() == [1] * len(ran.rows)
        heard.extend(zip(ran.rows.tolist(), ran.lens.tolist(), ran.tokens.tolist(), strict=True))

    def draft(ran: Ran, aim: Aim) -> Drafts:
        heard.append("drafts")
        return Drafts(np.ones((len(ran.rows), MOST), np.int64), np.zeros(len(ran.rows), np.int64))

    drafter: Any = SimpleNamespace(
        needs_hidden=NO_HIDDEN,
        runs_model=False,
        draft=draft,
        hear=hear,
        begin=lambda batch: heard.append("begins") if len(batch.fresh_rows) else None,
    )
    speculator = Speculator(drafter, World(always_right, FixedDepth(MOST)).runner.state)

    def step(rows: list[int], token: int, most: int = 0, fresh: tuple[int, ...] = ()) -> None:
        spec = SpecPlan(np.zeros(1, np.int64), np.array([99]), Aim(most))
        batch: Any = SimpleNamespace(sample_rows=np.array(rows), fresh_rows=np.array(fresh, np.int64), spec=spec)
        forward: Any = None
        speculator.begin(batch)
        lens, tokens = torch.full((len(rows),), token - 1), torch.full((len(rows),), token)
        speculator.drafted(batch, forward, lens, tokens, None)

    step([2, 3], 5)
    step([3], 6)
    assert heard == []
    step([2], 7, MOST)
    assert heard == [(2, 4, 5), (3, 4, 5), (3, 5, 6), "drafts"]
    heard.clear()
    step([3], 8)
    step([], 9)
    step([3], 10, fresh=(3,))
    assert heard == [(3, 7, 8), "begins"]
    heard.clear()
    for token in range(11, 11 + MOST_UNHEARD):
        step([2], token)
    assert len(heard) == MOST_UNHEARD, "and never more of them wait"


def test_a_step_behind_which_no_drafts_are_wanted_takes_no_time_to_make_them() -> None:
    took: list[bool] = []

    class Noting(ChangingDepth):
        def observe(self, result: StepResult) -> None:
            took.append(result.drafting > 0)
            self.count = 0

    world = World(always_right, Noting(MOST))
    world.ask()
    world.drain()
    # Two are planned before the first result is known.
    assert took[0] and not any(took[2:])
