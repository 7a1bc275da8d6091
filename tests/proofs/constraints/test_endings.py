"""How constrained outputs end where no end-of-sequence token says so: by completion, by failure, for one alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from core.engine.async_engine import AsyncEngine
from core.engine.grammar.trial import GrammarTrial
from core.errors import Draining, InvalidRequest, RequestFailed
from core.sampling.grammar.budget import RowBudget
from core.text.tokenizer import Tokenizer
from core.types.constraint import Constraint, ConstraintKind
from core.types.grammar import Matcher, Words
from core.types.io import Delta, Finished, FinishReason, GenerateRequest
from core.types.sampling_params import SamplingParams
from service.bench.emulated import expected_output
from tests.support.fakes.step_grammar import StepGrammar, StepMatcher, follows
from tests.unit.core.engine.emulation import running

pytest.importorskip("llguidance", reason="llguidance is not installed (extra [grammar])")

PROMPT = (5, 6, 7)


async def ask(engine: AsyncEngine, constraint: Constraint | None, tokens: int) -> tuple[list[int], Finished]:
    """The tokens of one output, and its end."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
    stream = await engine.generate(
        GenerateRequest(token_ids=PROMPT, sampling=sampling, want_text=False, constraint=constraint)
    )
    got: list[int] = []
    async for event in stream:
        if isinstance(event, Delta):
            got.extend(event.token_ids)
        elif isinstance(event, Finished):
            end = event
    return got, end


def plant(engine: AsyncEngine, grammar: StepGrammar, name: str) -> Constraint:
    """A constraint that is compiled already, to `grammar`."""
    constraint = Constraint(ConstraintKind.REGEX, name)
    engine._grammars._cache.put(constraint, grammar, 0)
    return constraint


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_model_without_eos_stops_when_the_constraint_is_met(tokenizer: Tokenizer, overlap: bool) -> None:
    async with running(tokenizer, overlap=overlap) as engine:
        tokens, end = await ask(engine, Constraint(ConstraintKind.REGEX, "[0-9]{3}"), 20)
        assert tokenizer.decode(tokens, False).isdigit() and len(tokenizer.decode(tokens, False)) == 3
        assert end.reason is FinishReason.STOP and end.matched_stop is None
        assert end.usage.completion_tokens == len(tokens)
        tokens, end = await ask(engine, Constraint(ConstraintKind.REGEX, "[0-9]+"), 4)
        assert end.reason is FinishReason.LENGTH and len(tokens) == 4


class DeadEnd(StepGrammar):
    """Allows nothing after `length` tokens, and says nothing of an end."""

    def __init__(self, length: int) -> None:
        self.length = length

    def fill_all(self, matchers: Sequence[Matcher], words: Words) -> npt.NDArray[np.bool_]:
        some = super().fill_all(matchers, words)
        for i, matcher in enumerate(matchers):
            assert isinstance(matcher, StepMatcher)
            if len(matcher.taken) >= self.length:
                words[i], some[i] = 0, False
        return some


WORK = 0.1
"""CPU seconds of a matcher that works too much for one mask."""


class Stalled(StepMatcher):
    """Has no core for the third mask and each after it, as on a host that is starved or was stopped."""

    def fill(self, words: Words) -> bool:
        if len(self.taken) >= 2:
            time.sleep(WORK)
        return super().fill(words)


class Burning(StepMatcher):
    """Works for the third mask and each after it, however long the machine takes for that work."""

    def fill(self, words: Words) -> bool:
        end = time.thread_time() + WORK
        while len(self.taken) >= 2 and time.thread_time() < end:
            pass
        return super().fill(words)


class GrammarOf(StepGrammar):
    """Of matchers of one kind."""

    def __init__(self, kind: type[StepMatcher]) -> None:
        self.matcher = kind  # type: ignore[assignment]


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_dead_end_fails_its_request_alone(tokenizer: Tokenizer, overlap: bool) -> None:
    async with running(tokenizer, overlap=overlap) as engine:
        dead = plant(engine, DeadEnd(3), "dead")
        failing = asyncio.create_task(ask(engine, dead, 20))
        free = asyncio.create_task(ask(engine, None, 20))
        with pytest.raises(RequestFailed, match="allows no token"):
            await failing
        assert (await free)[0] == expected_output(list(PROMPT), 20, tokenizer.vocab_size)
        assert engine.stats.finished["request_failed"] == 1


async def test_masks_that_take_too_long_fail_their_request_alone(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as engine:
        slow, quick = plant(engine, GrammarOf(Burning), "slow"), plant(engine, StepGrammar(), "quick")
        failing = asyncio.create_task(ask(engine, slow, 20))
        fine = asyncio.create_task(ask(engine, quick, 20))
        with pytest.raises(InvalidRequest, match=r"constraint\.regex: takes more work"):
            await failing
        tokens, end = await fine
        assert len(tokens) == 20 and follows(tokens) and end.reason is FinishReason.LENGTH


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_host_that_stalls_fails_nobody(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    spent = list[float]()
    inner = RowBudget.spend

    def spend(self: RowBudget, seconds: float) -> float:
        spent.append(seconds)
        return inner(self, seconds)

    monkeypatch.setattr(RowBudget, "spend", spend)
    async with running(tokenizer, overlap=overlap) as engine:
        asked = [plant(engine, GrammarOf(Stalled), "stalled"), plant(engine, StepGrammar(), "quick")]
        answers = await asyncio.gather(*(ask(engine, each, 8) for each in asked), return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        assert not failed, "the host stalled, and no request is at fault"
        for tokens, end in (answer for answer in answers if not isinstance(answer, BaseException)):
            assert len(tokens) == 8 and follows(tokens) and end.reason is FinishReason.LENGTH
    assert len(spent) >= 4, "the rows were suspected every second step, and looked at one by one"


async def test_a_drain_ends_those_that_wait_for_their_constraint(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compile never ends, so a drain that waited for it would not either."""
    asked = asyncio.Event()

    async def for_ever(_trial: GrammarTrial, _constraint: Constraint) -> int:
        asked.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nothing resolves this future")

    monkeypatch.setattr(GrammarTrial, "examine", for_ever)
    async with running(tokenizer) as engine, asyncio.timeout(60):
        waiting = asyncio.create_task(ask(engine, Constraint(ConstraintKind.REGEX, "[0-9]"), 20))
        await asked.wait()
        await engine.drain(3600)
        with pytest.raises(Draining):
            await waiting
