"""A step that verifies drafts makes one copy from the host to the device: guesses, and options of all their places."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from core.batch.grammar_batch import GrammarSeed
from core.batch.spec_plan import NO_DRAFTS, SpecPlan, TextSeed
from core.executor.grid_speculator import GridSpeculator
from core.executor.verification import Attempt
from core.speculation.drafter import Ran
from core.speculation.guesses import Guesses
from core.types.arrays import Ints
from tests.support.fakes.grid_attention import GridAttention
from tests.support.fakes.step_grammar import StepGrammar
from tests.unit.core.executor.test_captured_companions import ints
from tests.unit.core.executor.test_decode_graphs import SumModel, World
from tests.unit.core.executor.test_one_upload import OPTIONS, ROWS, compare, histories, needs_triton, sampling

MOST = 3


class Fixed:
    """A `Guesser` that says the same of every row."""

    def begin(self, batch: Any) -> None: ...

    def hear(self, ran: Ran) -> None: ...

    def guess(self, rows: Ints, most: int) -> Guesses:
        return Guesses(np.tile(np.arange(most), (len(rows), 1)), np.full(len(rows), most))


class GridWorld(World):
    """One whose steps verify drafts."""

    verification = staticmethod(lambda state: GridSpeculator(Fixed(), state, MOST))

    def made(self) -> tuple[SumModel, dict[str, Any]]:
        model = SumModel()
        model.attention = GridAttention()  # type: ignore[assignment]
        return model, {}


def drafting(world: Any, kind: str, drafts: list[int], **changes: Any) -> Any:
    """A step of `ROWS`, which have five tokens each, with so many drafts."""
    world.start(ROWS, [4, 5, 6], 4)
    seeds = tuple(TextSeed(row, "", np.arange(5)) for row in ROWS)
    plan = SpecPlan(ints(drafts), np.full(3, 16), NO_DRAFTS, seeds)
    given = {"sampling": sampling(ROWS, kind), "history_writes": histories(ROWS, kind), **changes}
    return world.batch(ROWS, spec=plan, fresh_rows=ints([]), extend_lens=1 + ints(drafts), **given)


@needs_triton
@pytest.mark.parametrize("replays", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_step_with_drafts_makes_one_upload(kind: str, replays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    several, world = compare(monkeypatch, GridWorld, replays, lambda world: drafting(world, kind, [3, 0, 1]))
    options = {"greedy": 0, "penalised": 2, "all": 4}.get(kind, 1 + (kind == "sampled"))
    assert several == 1 + (not replays) + options
    lens = world.map.buffer("new_seq_lens_buf")[ROWS].tolist()
    assert all(5 <= length <= 5 + most for length, most in zip(lens, [3, 0, 1], strict=True))


@needs_triton
@pytest.mark.parametrize("replays", [False, True], ids=["launched", "replayed"])
def test_a_mask_beside_drafts_follows_alone(replays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a constrained row, whose first place has a mask, and which tries no drafts."""

    def batch(world: World) -> Any:
        options = dataclasses.replace(sampling(ROWS, "all"), constrained=ints([1]))
        seeds = (GrammarSeed(ROWS[1], 1, StepGrammar(), ints([])),)
        return drafting(world, "all", [2, 2, 2], sampling=options, grammar_seeds=seeds)

    compare(monkeypatch, GridWorld, replays, batch, late=StepGrammar.words // 2)


@needs_triton
def test_a_step_without_drafts_uploads_the_options_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind one with drafts, whose options were those of places."""

    def batch(world: World) -> Any:
        world.runner.launch(drafting(world, "all", [3, 3, 3])).result()
        world.runner.grids.replays = 0  # type: ignore[union-attr]
        return drafting(world, "all", [0, 0, 0])

    several, _ = compare(monkeypatch, GridWorld, True, batch)
    assert several == 5


def test_an_attempt_travels_as_the_grid_reads_it() -> None:
    """Room, limits, guesses row after row, how long these are, and what the host knew; padding is zeros."""
    guesses = Guesses(ints([[7, 8], [9, 6]]), ints([2, 1]))
    attempt = Attempt(3, ints([1, 2]), ints([40, 50]), guesses, ints([4, 5]))
    assert [each.tolist() for each in attempt.arrays] == [[1, 2], [40, 50], [7, 8, 9, 6], [2, 1], [4, 5]]
    assert [each.tolist() for each in attempt.padded(3)] == [
        *([1, 2, 0], [40, 50, 0], [7, 8, 9, 6, 0, 0], [2, 1, 0], [4, 5, 0])
    ]
