"""A thousand streams at once, each a token a second, as people read: none fails, and each costs little memory."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack

import pytest

from service.client import SlipstreamClient
from tests.chaos.conftest import Launch
from tests.chaos.device import Faults
from tests.chaos.history import FULL, Verdict
from tests.chaos.process import settled
from tests.chaos.readers import ask, endings, read, verdict
from tests.support.scorecard import Scorecard

pytestmark = pytest.mark.alone

STREAMS, CONNECTIONS = 1000, 10
MOST_OUTPUTS = 50
SOAK = pytest.param(600, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])
KILOBYTES_EACH = 100


@pytest.mark.parametrize("tokens", [4, SOAK])
async def test_a_thousand_streams_at_a_token_a_second(
    launch: Launch, tokens: int, seed: int, scorecard: Scorecard
) -> None:
    server = launch(
        Faults(step_seconds=1.0),
        max_running_requests=STREAMS,
        max_total_tokens=STREAMS * 1024,
        chunked_prefill_size=16 * STREAMS,
        max_queued_requests=2 * STREAMS,
        max_concurrent_requests=2 * STREAMS,
        max_concurrent_streams=2 * STREAMS // CONNECTIONS,
    )
    rng = random.Random(seed)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(server.client()) for _ in range(CONNECTIONS)]
        vocab = (await clients[0].model_info()).vocab_size
        # Every row once, by few calls: the memory of rows and pages is the operator's setting and not a stream's.
        await asyncio.gather(*(_rows(clients[0], each) for each in [MOST_OUTPUTS] * (STREAMS // MOST_OUTPUTS)))
        before, _ = await settled(server)
        asked = [ask(vocab, tokens, rng) for _ in range(STREAMS)]
        calls = [asyncio.create_task(read(clients[n % CONNECTIONS], each)) for n, each in enumerate(asked)]
        most, running = before.rss, 0
        while not all(call.done() for call in calls):
            now = await server.probe()
            most, running = max(most, now.rss), max(running, now.running)
            await asyncio.wait(calls, timeout=0.5)
        streams = await asyncio.gather(*calls)
    found, what = verdict(streams, vocab), f"{STREAMS} streams × {tokens} tokens, one a second"
    scorecard(10, f"{what}: at once", running, equals=STREAMS)
    scorecard(10, f"{what}: that were not whole", STREAMS - endings(streams).get(FULL, 0), equals=0)
    each = (most - before.rss) / STREAMS / 1e3
    scorecard(10, f"{what}: RSS of the server, kB each", round(each, 1), at_most=KILOBYTES_EACH, shared=150)
    assert found == Verdict()
    await settled(server)


async def _rows(client: SlipstreamClient, count: int) -> None:
    await client.complete([1, 2, 3], n=count, max_tokens=2, temperature=0.0, ignore_eos=True, want_text=False)
