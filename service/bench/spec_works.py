"""What `slipstream bench speculation` asks for: text that is fresh, said before, random, or that quotes its prompt.

Each round asks for other text, in a scope of its own (a cache salt), so neither the drafter's notes nor the prefix
cache know of the rounds before. Outputs end by length alone.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from core.models.bundled.corpus import BOS, EOS
from core.models.bundled.story import story_prompt_and_text

PROMPT, OUTPUT = 128, 128
"""Tokens of a prompt and of an output, where nothing else is said."""
RANDOM_PROMPT, RANDOM_OUTPUT = 20, 150
PASSAGE = 32
"""Tokens of the passage that a quoting prompt begins and ends with; what the model said behind it stands between."""
LEAST, EACH = 8, 2
"""Requests of a round: so many, and at least so many for each stream."""

Ids = tuple[int, ...]
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: `max_new` tokens behind `prompt`, exactly."""

    prompt: Ids
    max_new: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Maker:
    """What works are made from."""

    encode: Encode
    """Text -> token ids, special tokens read and none added."""
    vocab_size: int
    greedy: Callable[[Sequence[Ask]], Awaitable[list[Ids]]]
    """What the model says without drafts; its time counts for nothing."""


@dataclass(frozen=True, slots=True)
class Round:
    """The requests of one round. `before`: others in the same scope, served first and not timed."""

    asks: tuple[Ask, ...]
    before: tuple[Ask, ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """A kind of text. `temperatures`: those that it is asked for at; None for those of the command."""

    make: Callable[[Maker, random.Random, int, float], Awaitable[Round]]
    """(maker, source of chance, requests, temperature) -> round."""
    temperatures: tuple[float, ...] | None = None
    least: int = LEAST
    """Requests of a round, for few streams."""


async def _fresh(maker: Maker, pick: random.Random, count: int, temperature: float) -> Round:
    asks = []
    for _ in range(count):
        (title, text), (next_title, _) = story_prompt_and_text(pick), story_prompt_and_text(pick)
        ids = maker.encode(f"{BOS}{title}{text}{EOS}{BOS}{next_title}")
        asks.append(Ask(tuple(ids[-PROMPT:]), OUTPUT, temperature, pick.getrandbits(32)))
    return Round(tuple(asks))


async def _replayed(maker: Maker, pick: random.Random, count: int, temperature: float) -> Round:
    before = (await _fresh(maker, pick, count, temperature)).asks
    # Other seeds, as a caller has that asks again.
    again = tuple(Ask(ask.prompt, ask.max_new, temperature, pick.getrandbits(32)) for ask in before)
    return Round(again, before)


async def _random(maker: Maker, pick: random.Random, count: int, temperature: float) -> Round:
    return Round(
        tuple(
            Ask(_tokens(maker, pick, RANDOM_PROMPT), RANDOM_OUTPUT, temperature, pick.getrandbits(32))
            for _ in range(count)
        )
    )


async def _quoting(maker: Maker, pick: random.Random, count: int, temperature: float) -> Round:
    passages = [_tokens(maker, pick, PASSAGE) for _ in range(count)]
    said = await maker.greedy([Ask(passage, PROMPT - 2 * PASSAGE) for passage in passages])
    return Round(
        tuple(
            Ask(passage + behind + passage, OUTPUT, temperature, pick.getrandbits(32))
            for passage, behind in zip(passages, said, strict=True)
        )
    )


def _tokens(maker: Maker, pick: random.Random, count: int) -> Ids:
    # Ids below are special in most vocabularies.
    return tuple(pick.randrange(min(300, maker.vocab_size // 2), maker.vocab_size) for _ in range(count))


WORKS: dict[str, Work] = {
    "fresh": Work(_fresh),
    "replayed": Work(_replayed),
    "random": Work(_random, (1.0,)),
    "quoting": Work(_quoting, (0.0,), least=4),
}
"""By the name that `--work` takes."""


async def round_of(work: str, maker: Maker, number: int, streams: int, temperature: float) -> Round:
    """Round `number` of a work, for so many streams at once; the same for every engine."""
    pick = random.Random(f"{work} {number} {streams} {temperature}")
    return await WORKS[work].make(maker, pick, max(WORKS[work].least, EACH * streams), temperature)


def quoted(asks: Sequence[Ask], outputs: Sequence[Ids], order: int = 4) -> float:
    """The part of all output tokens that stood behind the same `order` tokens before, in prompt or output: 0 to 1.

    It says how much a drafter could find in each request alone, and so how far a work favours drafts.
    """
    right = total = 0
    for ask, output in zip(asks, outputs, strict=True):
        text, last = [*ask.prompt, *output], dict[Ids, int]()
        for place in range(order, len(text)):
            key = tuple(text[place - order : place])
            if place >= len(ask.prompt):
                right += last.get(key) == text[place]
                total += 1
            last[key] = text[place]
    return right / max(total, 1)
