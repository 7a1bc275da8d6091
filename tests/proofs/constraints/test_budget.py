"""Constraints that are dear to follow end, each by its own budget or by that of all, and their neighbours go on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import numpy as np
import pytest

from core.batch.grammar_batch import GrammarSeed, GrammarStatus
from core.engine.async_engine import AsyncEngine
from core.errors import InvalidRequest, Overloaded, SlipstreamError
from core.executor.grammar_work import TOGETHER, Follower, GrammarWork
from core.sampling.grammar.budget import SHARED_RATE, SharedBudget, burst_seconds, free_seconds
from core.text.tokenizer import Tokenizer
from core.types.constraint import Constraint, ConstraintKind
from core.types.grammar import Matcher, Words
from core.types.io import FinishReason
from service.bench.emulated import expected_output
from tests.proofs.constraints.asks import BACKENDS
from tests.proofs.constraints.test_endings import PROMPT, ask, plant
from tests.proofs.constraints.test_grammars import EOS, WIDTH, set_up
from tests.support.fakes.step_grammar import StepGrammar, StepMatcher, follows
from tests.unit.core.engine.emulation import running

AMBIGUOUS = 'root ::= s\ns ::= s s | [a-z ] | ""'
"""40 bytes; the work of a token grows with the cube of those before it."""
WORK = 0.004
"""Processor time of a step that is dear, less than an output may take at once."""


class Clock:
    """Stands still unless it is told to go on."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_time_that_passes_comes_back_once() -> None:
    """However many steps look at it: all outputs together have a share of the time, and no more."""
    clock = Clock()
    shared = SharedBudget(1000, clock)
    shared.spend(shared.left)
    clock.now = burst_seconds(1000)
    for _ in range(5):
        shared.refill()
    assert shared.left == pytest.approx(SHARED_RATE * clock.now)


class Dear(StepMatcher):
    """Burns processor time for every token or mask, once it has `after` tokens."""

    def __init__(self, grammar: DearGrammar) -> None:
        super().__init__()
        self._grammar = grammar

    def _burn(self, seconds: float) -> None:
        end = time.thread_time() + seconds
        self._grammar.worked += 1
        while time.thread_time() < end:
            pass

    def fill(self, words: Words) -> bool:
        if self._grammar.masks and len(self.taken) >= self._grammar.after:
            self._burn(WORK)
        return super().fill(words)

    def accept(self, token: int) -> bool:
        if not self._grammar.masks and len(self.taken) >= self._grammar.after:
            self._burn(WORK)
        return super().accept(token)


class DearGrammar(StepGrammar):
    """Counts the times that its matchers worked."""

    def __init__(self, after: int = 0, masks: bool = True) -> None:
        self.after, self.masks = after, masks
        self.worked = 0

    def matcher(self) -> Matcher:
        return Dear(self)


class Rows:
    """`count` rows of each grammar, which take the first token that is allowed in each step."""

    def __init__(self, work: GrammarWork, *grammars: StepGrammar, count: int) -> None:
        self.work = work
        nothing = np.empty(0, np.int64)
        seeds = [GrammarSeed(1, 1, grammar, nothing) for grammar in grammars for _ in range(count)]
        self.followers = [work.seated(seed) for seed in seeds]
        self.words: Words = np.zeros((0, 0), np.int32)
        self.fill()

    def fill(self) -> None:
        self.words = np.zeros((len(self.followers), StepGrammar.words), np.int32)
        self.work.fill(self.followers, self.words)

    def step(self) -> None:
        live = [(f, row) for f, row in zip(self.followers, self.words, strict=True) if f.failed is None]
        self.followers = [follower for follower, _ in live]
        tokens = [int(np.unpackbits(row.view(np.uint8), bitorder="little").argmax()) for _, row in live]
        self.work.accept(self.followers, tokens)
        self.fill()


def of(followers: Sequence[Follower], grammar: StepGrammar) -> list[GrammarStatus | None]:
    return [each.failed for each in followers if each.grammar is grammar]


@pytest.mark.parametrize("masks", [True, False], ids=["masks", "tokens"])
def test_one_row_ends_when_its_budget_is_used_up(masks: bool) -> None:
    dear, quick, clock = DearGrammar(after=3, masks=masks), StepGrammar(), Clock()
    rows = Rows(GrammarWork(clock), dear, quick, count=1)
    (failing,) = [each for each in rows.followers if each.grammar is dear]
    failing.suspected = True
    for _ in range(40):
        rows.step()
        failing.suspected = True
        clock.now += 1.0  # what all of them share is never used up
    assert failing.failed is GrammarStatus.TOO_COMPLEX
    burst = burst_seconds(StepGrammar.words) / (WORK - free_seconds(StepGrammar.words))
    assert dear.worked <= burst + 2
    assert of(rows.followers, quick) == [None]


def test_the_work_of_one_step_is_bounded_however_many_rows_want_it() -> None:
    dear, quick = DearGrammar(after=2), StepGrammar()
    rows = Rows(GrammarWork(Clock()), dear, quick, count=64)
    worked = []
    for _ in range(6):
        for follower in rows.followers:
            follower.suspected = True  # the wall is not to be relied on here
        before = dear.worked
        rows.step()
        worked.append(dear.worked - before)
    # The first dear step of a row cannot be foreseen; from then on nobody works for what there is no time for.
    assert worked[:2] == [0, 64] and sum(worked[2:]) <= 1 + burst_seconds(StepGrammar.words) / WORK
    assert of(rows.followers, quick) == [None] * 64
    assert not of(rows.followers, dear), "they have made room"


def test_a_slow_call_has_the_rest_asked_one_by_one() -> None:
    dear = DearGrammar(after=1)
    # By the thread's own clock: to that of the wall, a call that a busy machine holds up for 2 ms is slow as well.
    rows = Rows(GrammarWork(time.thread_time), dear, count=3 * TOGETHER)
    for follower in rows.followers:
        follower.suspected = False
    rows.step()
    assert dear.worked == 3 * TOGETHER, "it could not be foreseen"
    rows.step()
    rest = dear.worked - 3 * TOGETHER
    assert TOGETHER <= rest < TOGETHER + 2 + burst_seconds(StepGrammar.words) / WORK, "only of those in the first call"


def test_those_who_took_least_are_served_first() -> None:
    spent, fresh = DearGrammar(), DearGrammar()
    rows = Rows(GrammarWork(Clock()), spent, fresh, count=1)
    first, last = (next(each for each in rows.followers if each.grammar is grammar) for grammar in (spent, fresh))
    for follower in (first, last):
        follower.suspected, follower.budget.left = True, 0.02
    first.budget.left, rows.work._shared.left = 0.01, 0.0005
    rows.step()
    assert first.failed is GrammarStatus.CROWDED and last.failed is None


def test_outputs_that_are_known_already_are_charged_too() -> None:
    dear, outputs = DearGrammar(masks=False), list[int]()
    matcher = StepMatcher()
    while len(outputs) < 200:
        words = np.zeros(StepGrammar.words, np.int32)
        matcher.fill(words)
        outputs.append(int(np.unpackbits(words.view(np.uint8), bitorder="little").argmax()))
        assert matcher.accept(outputs[-1])
    seated = GrammarWork(Clock()).seated(GrammarSeed(1, 1, dear, np.array(outputs)))
    assert seated.failed is GrammarStatus.TOO_COMPLEX
    assert dear.worked <= 2 + burst_seconds(StepGrammar.words) / (WORK - free_seconds(StepGrammar.words))


def test_a_row_that_is_quick_again_goes_back_to_the_others() -> None:
    grammar = StepGrammar()
    rows = Rows(GrammarWork(Clock()), grammar, count=2)
    for follower in rows.followers:
        follower.suspected = True
    rows.step()
    assert not any(each.suspected for each in rows.followers)


async def ended(engine: AsyncEngine, constraint: Constraint, tokens: int) -> SlipstreamError | None:
    try:
        await ask(engine, constraint, tokens)
    except SlipstreamError as error:
        return error
    return None


async def test_callers_are_told_whose_fault_it_is(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, max_running_requests=40) as engine:
        dear = plant(engine, DearGrammar(after=2), "dear")
        free = asyncio.create_task(ask(engine, None, 40))
        fine = asyncio.create_task(ask(engine, plant(engine, StepGrammar(), "fine"), 40))
        found = await asyncio.gather(*(ended(engine, dear, 40) for _ in range(32)))
        assert (await free)[0] == expected_output(list(PROMPT), 40, tokenizer.vocab_size)
        tokens, end = await fine
        assert follows(tokens) and len(tokens) == 40 and end.reason is FinishReason.LENGTH
        assert not any(engine.stats.assert_failures.values())
    kinds = {type(error) for error in found}
    assert kinds <= {InvalidRequest, Overloaded} and Overloaded in kinds
    reasons = {error.reason for error in found if error is not None}
    assert reasons <= {"INVALID_REQUEST", "GRAMMAR_WORK"}


async def test_what_costs_too_much_alone_is_its_callers_error(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as engine:
        error = await ended(engine, plant(engine, DearGrammar(after=2), "dear"), 40)
    assert isinstance(error, InvalidRequest), error
    assert [violation.field for violation in error.violations] == ["constraint.regex"]


HOSTILE = {
    "ambiguous": Constraint(ConstraintKind.EBNF, AMBIGUOUS),
    "three ways": Constraint(ConstraintKind.EBNF, 'root ::= s\ns ::= s s s | s s | [a-z ] | ""'),
    "quantifiers": Constraint(ConstraintKind.REGEX, "((([a-z ]{0,9}){0,9}){0,9}){0,9}"),
    "many ways": Constraint(ConstraintKind.REGEX, "(a|b|[a-z ])*(a|[a-c])*[a-z ]{30}"),
    "max items": Constraint(
        ConstraintKind.JSON_SCHEMA, json.dumps({"type": "array", "maxItems": 9999, "items": {"type": "string"}})
    ),
    "ambiguous members": Constraint(
        ConstraintKind.JSON_SCHEMA,
        json.dumps(
            {
                "$ref": "#/$defs/a",
                "$defs": {
                    "a": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}} for _ in range(12)]},
                },
            }
        ),
    ),
    "pattern properties": Constraint(
        ConstraintKind.JSON_SCHEMA,
        json.dumps({"patternProperties": {f"^{a}.*{b}$": {"type": "string"} for a in "abcdefgh" for b in "xyz"}}),
    ),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", HOSTILE)
def test_what_a_hostile_constraint_gets_is_bounded(name: str, kind: str) -> None:
    """By the library itself: 300 tokens of it take no more than is free for them, a burst and one call."""
    backend, vocabulary = set_up(name, EOS)
    try:
        grammar = backend.compile(HOSTILE[kind])
    except Exception as error:  # what cannot be compiled costs nothing here
        print(f"{name}: {kind}: {error}")
        return
    work = GrammarWork(Clock())
    follower = work.seated(GrammarSeed(1, 1, grammar, np.empty(0, np.int64)))
    rng, steps, began = np.random.default_rng(0), 0, time.thread_time()
    dearest = 0.0
    while follower.failed is None and steps < 300:
        follower.suspected = True
        at, words = time.thread_time(), np.zeros((1, vocabulary.words), np.int32)
        if not work.fill([follower], words)[0]:
            break
        allowed = np.flatnonzero(np.unpackbits(words[0].view(np.uint8), bitorder="little"))
        allowed = allowed[allowed != EOS]
        if not len(allowed):
            break
        follower.suspected = True
        work.accept([follower], [int(rng.choice(allowed))])
        dearest = max(dearest, time.thread_time() - at)
        steps += 1
    took = time.thread_time() - began
    print(f"{name}: {kind}: {steps} tokens in {took * 1e3:.1f} ms, the dearest {dearest * 1e3:.1f}, {follower.failed}")
    own = 5e-4 * (steps + 1)
    assert took < burst_seconds(WIDTH // 32) + (steps + 1) * free_seconds(WIDTH // 32) + dearest + own


@pytest.mark.parametrize("kind", ["ambiguous", "three ways"])
def test_no_single_call_is_long(kind: str) -> None:
    """A budget cannot end a call that has begun. The library refuses a row of more items than 300 before it works."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    backend, vocabulary = set_up("llguidance", EOS)
    matcher = backend.compile(HOSTILE[kind]).matcher()
    rng, steps = np.random.default_rng(0), 0
    while matcher.failure is None and steps < 60:
        words = np.zeros(vocabulary.words, np.int32)
        matcher.fill(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        steps += len(allowed) > 0 and matcher.accept(int(rng.choice(allowed[allowed != EOS])))
    assert matcher.failure is not None and steps < 60
    assert matcher.gave_up
