"""Many clients of all manners at once: what each received is what the device made for it, once."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack

import pytest

from service.client import SlipstreamClient
from tests.chaos.history import FULL, LEFT, Stream, Verdict
from tests.chaos.process import ServerProcess, settled
from tests.chaos.readers import Manner, ask, endings, read, verdict
from tests.support.scorecard import Scorecard

pytestmark = pytest.mark.alone

CHANNELS = 4
Sizes = tuple[int, int]
"""Streams and tokens each."""

SOAK = pytest.param((200, 5000), marks=[pytest.mark.soak, pytest.mark.timeout(1200)])


@pytest.mark.parametrize("sizes", [(100, 300), SOAK], ids=str)
async def test_every_stream_is_complete_whatever_its_reader_is_like(
    shared: ServerProcess, sizes: Sizes, seed: int, scorecard: Scorecard
) -> None:
    rng = random.Random(seed)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(shared.client()) for _ in range(CHANNELS)]
        vocab = (await clients[0].model_info()).vocab_size
        before = time.monotonic()
        streams = await asyncio.gather(
            *(
                read(rng.choice(clients), ask(vocab, sizes[1], rng), Manner(dawdle=rng.choice((0.0, 0.0, 0.02))))
                for _ in range(sizes[0])
            )
        )
        seconds = time.monotonic() - before
    found = verdict(streams, vocab)
    what = f"{sizes[0]} streams × {sizes[1]} tokens"
    scorecard(1, f"{what}: duplicated, missing, wrong, terminals ≠ 1", _four(found), equals=[0] * 4)
    scorecard(1, f"{what}: tokens/s", round(sum(stream.received for stream in streams) / seconds))
    assert found == Verdict()
    assert endings(streams) == {FULL: sizes[0]}
    await settled(shared)


@pytest.mark.parametrize("sizes", [(100, 200), SOAK], ids=str)
async def test_leaving_freezing_and_running_late_costs_nobody_else_anything(
    shared: ServerProcess, sizes: Sizes, seed: int, scorecard: Scorecard
) -> None:
    rng = random.Random(seed + 1)
    count, tokens = sizes
    thaw = asyncio.Event()
    async with shared.client() as busy, shared.client() as icy:
        vocab = (await busy.model_info()).vocab_size

        def one(number: int) -> asyncio.Task[Stream]:
            manner, client = _manner(number % 100, tokens, rng, thaw), icy if number % 100 in FROZEN else busy
            return asyncio.create_task(read(client, ask(vocab, tokens, rng), manner))

        tasks = {number: one(number) for number in range(count)}
        await asyncio.wait([task for number, task in tasks.items() if number % 100 not in FROZEN])
        thaw.set()
        streams = list(await asyncio.gather(*tasks.values()))
        found = verdict(streams, vocab)
        ended = endings(streams)
        what = f"{count} streams × {tokens} tokens"
        scorecard(2, f"{what}: duplicated, missing, wrong, terminals ≠ 1", _four(found), equals=[0] * 4)
        strays = [found.after_terminal, found.foreign]
        scorecard(2, f"{what}: events after a terminal, of another stream", strays, equals=[0, 0])
        scorecard(2, f"{what}: endings", ", ".join(f"{n} {word}" for word, n in ended.items()))
        assert found == Verdict()
        assert set(ended) <= {FULL, LEFT, "cancelled", "DEADLINE_EXCEEDED"} and ended[FULL] >= count * 0.75
        await _still_right(busy, vocab, rng)
    await settled(shared)


FROZEN = (98, 99)


def _manner(place: int, tokens: int, rng: random.Random, thaw: asyncio.Event) -> Manner:
    """Of a hundred: 10 leave, 5 abort, 5 run late, 2 freeze, the others read on, some slowly."""
    if place < 10:
        return Manner(leave_after=rng.randint(1, tokens // 2))
    if place < 15:
        return Manner(abort_after=rng.randint(1, tokens // 2))
    if place < 20:
        return Manner(timeout=rng.uniform(0.05, 1.0))
    if place in FROZEN:
        return Manner(freeze=thaw)
    return Manner(dawdle=0.02 if place % 3 == 0 else 0.0)


async def _still_right(client: SlipstreamClient, vocab: int, rng: random.Random) -> None:
    """A request after all that, in rows and pages that others have left."""
    after = [await read(client, ask(vocab, 50, rng, longest=200)) for _ in range(3)]
    assert verdict(after, vocab) == Verdict() and endings(after) == {FULL: 3}


def _four(found: Verdict) -> list[int]:
    return [found.duplicated, found.missing, found.wrong, found.terminals]
