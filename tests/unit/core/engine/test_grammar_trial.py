"""A trial bounds the work of a compile: a process without a core says nothing against the constraint."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import numpy as np
import pytest

from core.engine.grammar import bounded_work
from core.engine.grammar import trial as grammar_trial
from core.engine.grammar.trial import GrammarTrial, TrialFailed, cpu_seconds
from core.errors import Overloaded, RequestFailed
from core.sampling.grammar import trial as other_end
from core.sampling.grammar.registry import GrammarError
from core.sampling.grammar.vocabulary import Vocabulary
from core.types.constraint import Constraint, ConstraintKind
from core.types.grammar import Words
from tests.proofs.constraints.asks import BACKENDS
from tests.proofs.constraints.test_grammars import EOS, set_up
from tests.support.fakes.step_grammar import StepGrammar, StepMatcher

EASY = Constraint(ConstraintKind.REGEX, "[ab]{2}")
BOMB = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 999983}')
"""Takes llguidance 26 seconds of one core."""


def trial(seconds: float) -> GrammarTrial:
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra [grammar])")
    return GrammarTrial("llguidance", set_up("llguidance", EOS)[1], seconds)


async def test_a_process_that_is_stopped_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = trial(0.1)
    try:
        await tried.examine(EASY)
        process = tried._process
        assert process is not None
        # For more than its seconds on the clock the process has no core; then it has one.
        os.kill(process.pid, signal.SIGSTOP)
        asked = asyncio.create_task(tried.examine(EASY))
        looked = await looks_while(asked, process.pid, 3, monkeypatch)
        assert looked == 3, "given up without a look at its work"
        os.kill(process.pid, signal.SIGCONT)
        assert await asked >= 0 and tried._process is process
        # One that never gets a core ends the wait, not the constraint.
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(Overloaded, match="no core"):
            await tried.examine(EASY)
        assert await tried.examine(EASY) >= 0, "in a process of its own again"
    finally:
        await tried.close()


async def looks_while(asked: asyncio.Task[int], pid: int, count: int, patch: pytest.MonkeyPatch) -> int:
    """How often the work of the process was looked at while the answer was waited for, `count` at most."""
    looks = [0]

    def counted(of: int) -> float:
        looks[0] += of == pid
        return cpu_seconds(of)

    patch.setattr(grammar_trial, "cpu_seconds", counted)
    while looks[0] < count and not asked.done():
        await asyncio.sleep(0.01)
    return min(looks[0], count)


async def test_work_that_is_waited_for_no_more_is_cancelled() -> None:
    """Given up or left: else what it holds stays taken, and its answer comes to a line that has no reader."""
    loop, worked = asyncio.get_running_loop(), iter((0.0, 1.0))
    given_up, left = loop.create_future(), loop.create_future()
    with pytest.raises(bounded_work.TookTooLong):
        await bounded_work.within(given_up, lambda: next(worked), 0.001)
    waiting = asyncio.create_task(bounded_work.within(left, lambda: 0.0, 600.0))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert given_up.cancelled() and left.cancelled()


async def test_work_is_still_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the machine takes to do so much work."""
    monkeypatch.setattr(bounded_work, "PATIENCE", 10_000)
    tried = trial(0.3)
    try:
        with pytest.raises(TrialFailed, match="takes longer than"):
            await tried.examine(BOMB)
    finally:
        await tried.close()


class Stalled(StepMatcher):
    """Sleeps before its masks."""

    def fill(self, words: Words) -> bool:
        time.sleep(0.05)
        return super().fill(words)


class Burning(StepMatcher):
    """Works before its masks."""

    def fill(self, words: Words) -> bool:
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        return super().fill(words)


@pytest.mark.parametrize(("kind", "problem"), [(Stalled, None), (Burning, "too slow to follow")])
def test_masks_are_judged_by_their_work(kind: type[StepMatcher], problem: str | None) -> None:
    grammar = StepGrammar()
    grammar.matcher = kind  # type: ignore[method-assign]
    assert other_end._probe(grammar, Vocabulary("", 128, 128, (), False)) == problem


@pytest.mark.parametrize("name", BACKENDS)
def test_one_row_is_filled_on_the_calling_thread(name: str) -> None:
    """What `GrammarWork` relies on: the work of one row is CPU time of the thread that asks for it."""
    backend, vocabulary = set_up(name, EOS)
    shares = []
    for number in range(20):
        matcher = backend.compile(Constraint(ConstraintKind.REGEX, f"(a|b|cd)*x{{{number},99}}")).matcher()
        words = np.zeros(vocabulary.words, np.int32)
        began = time.thread_time(), time.process_time()
        assert matcher.fill(words)
        shares.append((time.thread_time() - began[0]) / (time.process_time() - began[1]))
    # What other threads of this process do meanwhile only makes a share smaller.
    assert max(shares) > 0.5, shares


async def test_a_machine_without_room_for_a_process_fails_the_request_and_not_the_constraint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise OSError("Cannot allocate memory")

    tried = trial(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(grammar_trial.asyncio, "create_subprocess_exec", refused)
        with pytest.raises(RequestFailed, match="cannot be started"):
            await tried.examine(EASY)
    with monkeypatch.context() as patch:
        patch.setattr(grammar_trial, "START_SECONDS", 0.0)
        with pytest.raises(RequestFailed, match="cannot be started"):
            await tried.examine(EASY)
    assert tried._process is None
    assert await tried.examine(EASY) >= 0
    await tried.close()


def test_of_an_error_that_quotes_the_whole_constraint_the_beginning_is_told() -> None:
    class Quoting:
        def compile(self, constraint: Constraint) -> None:
            raise GrammarError(f"no: {constraint.source}")

    vocabulary = set_up("llguidance", EOS)[1]
    told = other_end.examine(Quoting(), vocabulary, Constraint(ConstraintKind.REGEX, "x" * 65_536))  # type: ignore[arg-type]
    assert told["error"].startswith("no: xxx") and len(told["error"]) == other_end.ERROR_CHARS
