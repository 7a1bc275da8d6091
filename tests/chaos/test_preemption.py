"""A pool too small for its batch: requests are put back and resumed, and no client can tell."""

from __future__ import annotations

import asyncio
import random

from tests.chaos.conftest import Launch
from tests.chaos.history import FULL, Verdict
from tests.chaos.process import settled
from tests.chaos.readers import ask, endings, read, verdict
from tests.support.scorecard import Scorecard

STREAMS, TOKENS = 48, 150


async def test_resumed_streams_are_those_of_an_unhurried_server(
    launch: Launch, seed: int, scorecard: Scorecard
) -> None:
    """The standard is the device's answer to the prompt alone, which knows no pages at all."""
    server = launch(max_running_requests=32, max_total_tokens=2048, page_size=4)
    rng = random.Random(seed + 8)
    async with server.client() as client:
        vocab = (await client.model_info()).vocab_size
        streams = [ask(vocab, TOKENS, rng, longest=60) for _ in range(STREAMS)]
        await asyncio.gather(*(read(client, stream) for stream in streams))
    await settled(server)
    preemptions = int((await server.metrics())["slipstream_preemptions_total"])
    found = verdict(streams, vocab)
    scorecard(26, "preemptions", preemptions, at_least=11)
    mismatches = found.wrong + found.missing + found.duplicated
    scorecard(26, f"mismatches in {STREAMS} × {TOKENS} tokens", mismatches, equals=0)
    assert found == Verdict() and endings(streams) == {FULL: STREAMS}
