"""Requests that end in every way at every moment, through the wire: what they held is back, to the last descriptor."""

from __future__ import annotations

import asyncio
import random

import pytest

from service.client import CallFailed, SlipstreamClient
from tests.chaos.process import ServerProcess, settled
from tests.chaos.readers import Manner, ask, read
from tests.support.scorecard import Scorecard

pytestmark = pytest.mark.alone

AT_ONCE = 100
WAYS = {"leave": 6, "abort": 3, "deadline": 3, "refused": 1, "disconnect": 1}
"""How requests end, and how often; by themselves they would run for seconds, so that nothing ends but by its way."""


@pytest.mark.parametrize(
    "requests",
    [500, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])],
)
async def test_nothing_is_left_after_aborts_everywhere(
    shared: ServerProcess, requests: int, seed: int, scorecard: Scorecard
) -> None:
    rng = random.Random(seed + 2)
    async with shared.client() as client:
        vocab = (await client.model_info()).vocab_size
        await asyncio.gather(*(_end_somehow(shared, client, vocab, rng.getrandbits(32)) for _ in range(AT_ONCE)))
        baseline, _ = await settled(shared)
        for _ in range(requests // AT_ONCE):
            await asyncio.gather(*(_end_somehow(shared, client, vocab, rng.getrandbits(32)) for _ in range(AT_ONCE)))
        after, seconds = await settled(shared, baseline)
    scorecard(8, f"{requests} requests: rows, pages in use", [after.used["req"], after.used["kv_page"]], equals=[0, 0])
    for name in ("tasks", "files", "threads"):
        over = getattr(after, name) - getattr(baseline, name)
        scorecard(8, f"{requests} requests: {name} over baseline", over, at_most=0)
    scorecard(8, f"{requests} requests: seconds to baseline", seconds, at_most=1)
    scorecard(8, f"{requests} requests: RSS over baseline, MB", round((after.rss - baseline.rss) / 1e6, 1))


async def _end_somehow(server: ServerProcess, client: SlipstreamClient, vocab: int, seed: int) -> None:
    rng = random.Random(seed)
    stream = ask(vocab, 6000, rng, longest=rng.choice((1, 20, 400)))
    way, events = rng.choices(list(WAYS), list(WAYS.values()))[0], rng.randint(1, 30)
    if way == "leave":
        await read(client, stream, Manner(leave_after=events))
    elif way == "abort":
        await read(client, stream, Manner(abort_after=events))
    elif way == "deadline":
        await read(client, stream, Manner(timeout=rng.uniform(0.001, 0.05)))
    elif way == "refused":
        with pytest.raises(CallFailed):
            await client.complete([vocab], max_tokens=5)
    else:
        async with server.client() as other:
            reading = asyncio.create_task(read(other, stream))
            await other.load()
        await asyncio.gather(reading, return_exceptions=True)
