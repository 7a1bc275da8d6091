"""/metrics against what clients saw: the same numbers, as many series as ever, and no scraper in the way."""

from __future__ import annotations

import asyncio
import random
import socket
from contextlib import ExitStack

import pytest

from service.client import CallFailed
from service.metrics.http import MAX_CONNECTIONS
from tests.chaos.history import FULL, Stream, Verdict
from tests.chaos.process import ServerProcess, settled
from tests.chaos.readers import Manner, ask, endings, read, verdict
from tests.support.scorecard import Scorecard

GENERATE = 'method="slipstream.v1.InferenceService/Generate"'
Samples = dict[str, float]


async def test_counters_are_what_the_clients_saw(shared: ServerProcess, seed: int, scorecard: Scorecard) -> None:
    rng = random.Random(seed + 9)
    refusals = 7
    await settled(shared)
    before = await shared.metrics()
    async with shared.client() as client:
        vocab = (await client.model_info()).vocab_size
        full = [ask(vocab, rng.randint(1, 80), rng, longest=40) for _ in range(60)]
        aborted = [ask(vocab, 2000, rng) for _ in range(10)]
        await asyncio.gather(
            *(read(client, stream) for stream in full),
            *(read(client, stream, Manner(abort_after=rng.randint(1, 40))) for stream in aborted),
        )
        for _ in range(refusals):
            with pytest.raises(CallFailed):
                await client.complete([vocab])
    await settled(shared)
    after = await shared.metrics()
    assert verdict(full + aborted, vocab) == Verdict()
    assert endings(full + aborted) == {FULL: 60, "cancelled": 10}
    expected = _expected(full, aborted, refusals)
    differing = {name: (after[name] - before.get(name, 0.0), due) for name, due in expected.items()}
    differing = {name: pair for name, pair in differing.items() if pair[0] != pair[1]}
    assert not differing, "name: (scraped, seen by clients)"
    scorecard(36, f"of {len(expected)} counters, those that differ from the history", len(differing), equals=0)


def _expected(full: list[Stream], aborted: list[Stream], refusals: int) -> dict[str, float]:
    """What each counter must have grown by. A call is counted when it ends, a request when its terminal is made."""
    every = full + aborted
    prompt_tokens = sum(len(stream.prompt) for stream in every)
    return {
        "slipstream_prompt_tokens_total": prompt_tokens,
        # The terminal of an aborted stream comes after every token made for it, so clients have them all.
        "slipstream_generation_tokens_total": sum(stream.received for stream in every),
        'slipstream_requests_finished_total{reason="length"}': len(full),
        'slipstream_requests_finished_total{reason="cancelled"}': len(aborted),
        'slipstream_requests_finished_total{reason="stop"}': 0,
        "slipstream_time_to_first_token_seconds_count": len(every),
        "slipstream_queue_time_seconds_count": len(every),
        "slipstream_e2e_request_latency_seconds_count": len(every),
        "slipstream_inter_token_latency_seconds_count": sum(stream.received - 1 for stream in every),
        f"slipstream_rpc_started_total{{{GENERATE}}}": len(every) + refusals,
        f'slipstream_rpc_handled_total{{code="OK",{GENERATE}}}': len(every),
        f'slipstream_rpc_handled_total{{code="INVALID_ARGUMENT",{GENERATE}}}': refusals,
        'slipstream_requests_rejected_total{reason="INVALID_REQUEST"}': refusals,
        "slipstream_slow_consumer_evictions_total": 0,
    }


@pytest.mark.parametrize("requests", [2000, pytest.param(10_000, marks=pytest.mark.soak)])
async def test_no_request_adds_a_series(shared: ServerProcess, requests: int, scorecard: Scorecard) -> None:
    async with shared.client() as client:
        await client.complete([1], max_tokens=1, ignore_eos=True)
        before = await shared.metrics()

        async def one(number: int) -> None:
            await client.complete(
                [number % 700, 1],
                max_tokens=1,
                ignore_eos=True,
                request_id=f"id-{number}",
                cache_salt=f"tenant-{number}",
            )

        for first in range(0, requests, 200):
            await asyncio.gather(*(one(number) for number in range(first, first + 200)))
    added = set(await shared.metrics()) - set(before)
    assert not added
    scorecard(36, f"series added by {requests} request ids and salts", len(added), equals=0)
    await settled(shared)


async def test_a_scraper_that_stalls_stalls_nobody(shared: ServerProcess, seed: int, scorecard: Scorecard) -> None:
    """All slots but one are taken by connections that ask and never read, or never even ask."""
    host, _, port = shared.metrics_address.removeprefix("http://").removesuffix("/metrics").partition(":")
    rng = random.Random(seed + 10)
    with ExitStack() as stack:
        for number in range(MAX_CONNECTIONS - 1):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            if number % 2:
                connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
        async with shared.client() as client:
            vocab = (await client.model_info()).vocab_size
            streams = await asyncio.gather(*(read(client, ask(vocab, 100, rng)) for _ in range(20)))
        assert "slipstream_steps_total" in await shared.metrics(), "the last slot still answers"
    assert verdict(list(streams), vocab) == Verdict()
    unharmed = endings(list(streams))[FULL]
    scorecard(36, f"of 20 streams, unharmed beside {MAX_CONNECTIONS - 1} stalled scrapers", unharmed, equals=20)
