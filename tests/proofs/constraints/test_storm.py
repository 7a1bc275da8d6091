"""Constrained requests in a pool far too small, some of them doomed: who follows what, retracted or not, and who fails.

The device is emulated and the grammars are made up, so that a seed reaches much in little time: every mask that was
made is held against every token that was taken, and a matcher that starts again against what its client has.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from core.engine.async_engine import AsyncEngine
from core.errors import RequestFailed
from core.text.tokenizer import Tokenizer
from core.types.grammar import Matcher, Words
from core.types.io import Delta, Finished, FinishReason, GenerateRequest
from core.types.sampling_params import SamplingParams
from service.bench.emulated import expected_output
from tests.proofs.constraints.test_endings import plant
from tests.support.fakes.step_grammar import WIDTH, StepGrammar, StepMatcher, successors
from tests.unit.core.engine.emulation import running

REQUESTS, ROUNDS = 24, 3
MAX_ROUNDS = 12
"""Played while a run has not shown yet what it is for."""


class Watched(StepMatcher):
    """Ends by itself, or gives up, after so many tokens; refuses what its last mask did not allow."""

    def __init__(self, grammar: WatchedGrammar) -> None:
        super().__init__()
        self._grammar = grammar
        self.allowed: list[int] | None = None

    def fill(self, words: Words) -> bool:
        if len(self.taken) >= self._grammar.length:
            self.is_terminated = not self._grammar.dead_end
            return False
        self.allowed = successors(self.taken)
        return super().fill(words)

    def accept(self, token: int) -> bool:
        # A matcher that starts behind known tokens has made no mask for them.
        self._grammar.foreign += self.allowed is not None and token not in self.allowed
        self._grammar.refused += token not in successors(self.taken)
        self.allowed = None
        return super().accept(token)


@dataclass
class WatchedGrammar(StepGrammar):
    """What one request is constrained by, and all that its matchers took."""

    length: int
    dead_end: bool
    foreign: int = 0
    refused: int = 0
    matchers: list[Watched] = field(default_factory=list)

    def matcher(self) -> Matcher:
        self.matchers.append(Watched(self))
        return self.matchers[-1]

    def fill_all(self, matchers: Sequence[Matcher], words: Words) -> npt.NDArray[np.bool_]:
        return np.array([matcher.fill(words[i]) for i, matcher in enumerate(matchers)], np.bool_)


@dataclass
class Asked:
    """One request: its grammar if it has one, and what came of it."""

    prompt: tuple[int, ...]
    tokens: int
    grammar: WatchedGrammar | None
    got: list[int] = field(default_factory=list)
    end: FinishReason | None = None
    failed: bool = False


def draw(rng: random.Random) -> Asked:
    prompt = tuple(rng.randrange(3, 90) for _ in range(rng.randint(1, 30)))
    tokens, length = rng.randint(4, 40), rng.randint(1, 45)
    kind = rng.randrange(4)
    return Asked(prompt, tokens, None if kind == 0 else WatchedGrammar(length, dead_end=kind == 1))


async def play(engine: AsyncEngine, asked: Asked, name: str, rng: random.Random) -> None:
    constraint = None if asked.grammar is None else plant(engine, asked.grammar, name)
    sampling = SamplingParams(temperature=0.0, max_tokens=asked.tokens, ignore_eos=constraint is None)
    for _ in range(rng.randrange(40)):
        await asyncio.sleep(0)
    stream = await engine.generate(
        GenerateRequest(token_ids=asked.prompt, sampling=sampling, want_text=False, constraint=constraint)
    )
    try:
        async for event in stream:
            if isinstance(event, Delta):
                asked.got.extend(event.token_ids)
            elif isinstance(event, Finished):
                asked.end = event.reason
    except RequestFailed:
        asked.failed = True


def shown(seen: Counter[str]) -> bool:
    """Whether every kind of thing happened often enough for a run to mean something."""
    outcomes = min(seen[outcome] for outcome in ("cut", "failed", "met"))
    return seen["retracted"] > 5 and seen["started again"] > 3 and outcomes > 3


def check(asked: Asked, vocab: int, seen: Counter[str]) -> None:
    got, grammar = asked.got, asked.grammar
    if grammar is None:
        assert got == expected_output(list(asked.prompt), asked.tokens, vocab), "a free row noticed its neighbours"
        return
    assert all(token in successors(got[:place]) and token < WIDTH for place, token in enumerate(got))
    assert grammar.foreign == 0, "a token that the mask made for it did not allow"
    first, *others = grammar.matchers
    seen["started again"] += len(others)
    for matcher in (first, *others):
        assert matcher.taken == got[: len(matcher.taken)], "in another state than what its client has"
    whole = len(got) == min(grammar.length, asked.tokens)
    if grammar.length >= asked.tokens:
        assert asked.end is FinishReason.LENGTH and whole
        seen["cut"] += 1
    elif grammar.dead_end:
        assert asked.failed and whole
        seen["failed"] += 1
    else:
        assert asked.end is FinishReason.STOP and whole
        seen["met"] += 1


@pytest.mark.parametrize("overlap", [True, False])
async def test_storm(tokenizer: Tokenizer, overlap: bool, seed: int) -> None:
    rng, seen = random.Random(seed), Counter[str]()
    for number in range(MAX_ROUNDS):
        if number >= ROUNDS and shown(seen):
            break
        async with running(tokenizer, overlap=overlap, max_total_tokens=160, page_size=4) as engine:
            all_asked = [draw(rng) for _ in range(REQUESTS)]
            await asyncio.gather(*(play(engine, each, f"{number}.{i}", rng) for i, each in enumerate(all_asked)))
            seen["retracted"] += engine.stats.preemptions
            assert not any(engine.stats.assert_failures.values())
        for each in all_asked:
            check(each, tokenizer.vocab_size, seen)
    print(dict(seen))
    assert shown(seen)
