"""Masks behind drafts: what a matcher that looks ahead writes, where it stops, and what its time is charged to."""

from __future__ import annotations

import time

import numpy as np
import pytest

from core.batch.grammar_batch import GrammarSeed, GrammarStatus
from core.executor import grammar_work
from core.executor.grammar_work import REST, Follower, GrammarWork
from core.sampling.grammar.budget import burst_seconds, free_seconds
from core.types.grammar import Grammar, Matcher, Words
from tests.proofs.constraints.test_budget import Clock
from tests.support.fakes.step_grammar import StepGrammar, StepMatcher, successors

DRAFTS = 5
ALL_ONES = -1


def seated(work: GrammarWork, grammar: Grammar, *outputs: int) -> Follower:
    return work.seated(GrammarSeed(1, 1, grammar, np.array(outputs, np.int64)))


def ahead(work: GrammarWork, follower: Follower, drafts: list[int]) -> tuple[int, Words]:
    """(how many drafts may be verified, the masks of all places)."""
    words = np.full((len(drafts) + 1, StepGrammar.words), ALL_ONES, np.int32)
    words[0] = 0
    assert work.fill([follower], words[:1]).all()
    return work.look_ahead(follower, drafts, words), words


def tokens(words: Words) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    return found


def a_path(count: int, *before: int) -> list[int]:
    taken = list(before)
    for place in range(count):
        taken.append(successors(taken)[place % 3])
    return taken[len(before) :]


@pytest.fixture(autouse=True)
def processor(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Processor time that only `Slow` takes. The real one, on a busy machine, makes five masks dearer than they are."""
    clock = Clock()
    monkeypatch.setattr(time, "thread_time", clock)
    return clock


def test_each_place_has_the_mask_behind_its_drafts() -> None:
    work = GrammarWork(Clock())
    before = a_path(3)
    follower, drafts = seated(work, StepGrammar(), *before), a_path(DRAFTS, *before)
    found, words = ahead(work, follower, drafts)
    assert found == DRAFTS
    for place in range(DRAFTS + 1):
        assert tokens(words[place]) == successors([*before, *drafts[:place]])
    assert isinstance(follower.matcher, StepMatcher) and follower.matcher.taken == before, "it has only looked"


@pytest.mark.parametrize("wrong", range(DRAFTS))
def test_drafts_end_before_one_that_is_not_allowed(wrong: int) -> None:
    work = GrammarWork(Clock())
    follower, drafts = seated(work, StepGrammar()), a_path(DRAFTS)
    drafts[wrong] = next(token for token in range(90) if token not in successors(drafts[:wrong]))
    found, words = ahead(work, follower, drafts)
    assert found == wrong
    assert (words[wrong + 1 :] == ALL_ONES).all(), "what is sampled there has finite logits"
    assert follower.failed is None and follower.matcher.failure is None


class Shy(StepMatcher):
    """Allows nothing behind two tokens, or gives up there."""

    def __init__(self, gives_up: bool) -> None:
        super().__init__()
        self._gives_up = gives_up

    def fill(self, words: Words) -> bool:
        if len(self.taken) < 2:
            return super().fill(words)
        words[0] = 1
        return False

    def accept(self, token: int) -> bool:
        return not (self._gives_up and len(self.taken) == 1) and super().accept(token)

    def fork(self) -> Matcher:
        made = Shy(self._gives_up)
        made.taken = [*self.taken]
        return made


class ShyGrammar(StepGrammar):
    def __init__(self, gives_up: bool) -> None:
        self._gives_up = gives_up

    def matcher(self) -> Matcher:
        return Shy(self._gives_up)


@pytest.mark.parametrize("gives_up", [True, False])
def test_drafts_end_behind_one_that_nothing_follows(gives_up: bool) -> None:
    work = GrammarWork(Clock())
    follower = seated(work, ShyGrammar(gives_up))
    found, words = ahead(work, follower, a_path(DRAFTS))
    assert found == 1 and (words[2:] == ALL_ONES).all()
    assert follower.failed is None, "its own tokens decide that"


class Slow(StepMatcher):
    """Takes `seconds` of processor time for each mask that a fork makes."""

    def __init__(self, processor: Clock, seconds: float) -> None:
        super().__init__()
        self.processor, self.seconds, self.is_fork = processor, seconds, False

    def fill(self, words: Words) -> bool:
        self.processor.now += self.seconds * self.is_fork
        return super().fill(words)

    def fork(self) -> Matcher:
        made = Slow(self.processor, self.seconds)
        made.taken, made.is_fork = [*self.taken], True
        return made


class SlowGrammar(StepGrammar):
    def __init__(self, processor: Clock, seconds: float) -> None:
        self._processor, self._seconds = processor, seconds

    def matcher(self) -> Matcher:
        return Slow(self._processor, self._seconds)


def test_what_takes_long_stops_and_rests(monkeypatch: pytest.MonkeyPatch, processor: Clock) -> None:
    monkeypatch.setattr(grammar_work, "free_seconds", lambda words: 0.002)
    work = GrammarWork(Clock())
    follower = seated(work, SlowGrammar(processor, 0.004))
    assert ahead(work, follower, a_path(DRAFTS))[0] == 1, "what is written may be used"
    found = [ahead(work, follower, a_path(DRAFTS))[0] for _ in range(REST + 1)]
    assert found == [0] * REST + [1]


def test_its_time_is_charged_to_all_rows_and_never_ends_this_one(
    monkeypatch: pytest.MonkeyPatch, processor: Clock
) -> None:
    monkeypatch.setattr(grammar_work, "REST", 0)
    work = GrammarWork(Clock())
    follower = seated(work, SlowGrammar(processor, burst_seconds(StepGrammar.words) / 4))
    own = follower.budget.left
    found = [ahead(work, follower, a_path(1))[0] for _ in range(8)]
    assert 4 <= sum(found) <= 5 and found == sorted(found, reverse=True), "until the budget of all is used up"
    assert follower.budget.left == own and follower.failed is None and not follower.suspected


def test_it_is_charged_beyond_what_is_free_only(processor: Clock) -> None:
    work = GrammarWork(Clock())
    follower = seated(work, SlowGrammar(processor, 0.99 * free_seconds(StepGrammar.words)))
    for _ in range(200):
        assert ahead(work, follower, a_path(1))[0] == 1
    assert work._shared.left == burst_seconds(StepGrammar.words)


@pytest.mark.parametrize("drafts", [[], [89]], ids=["none", "not allowed"])
def test_nothing_is_copied_for_a_row_without_a_draft_to_look_at(
    drafts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 89 not in successors([])
    monkeypatch.delattr(StepMatcher, "fork")
    work = GrammarWork(Clock())
    assert ahead(work, seated(work, StepGrammar()), drafts)[0] == 0


def test_a_suspected_row_has_no_drafts() -> None:
    work = GrammarWork(Clock())
    follower = seated(work, StepGrammar())
    words = np.full((DRAFTS + 1, StepGrammar.words), ALL_ONES, np.int32)
    follower.suspected = True
    assert work.look_ahead(follower, a_path(DRAFTS), words) == 0
    follower.suspected = False
    assert work.look_ahead(follower, a_path(DRAFTS), words) == DRAFTS
    assert follower.failed is not GrammarStatus.FAILED
