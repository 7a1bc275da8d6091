"""Offered three times what it can do: it goes on doing what it can, refuses the rest at once, and stays healthy."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from service.client import CallFailed, Completion, SlipstreamClient
from service.servicers.health import LIVENESS, READINESS
from tests.chaos.conftest import Launch
from tests.chaos.device import Faults, expected
from tests.chaos.process import ServerProcess, settled
from tests.chaos.watching import NAMES, health
from tests.support.scorecard import Scorecard

pytestmark = pytest.mark.alone

ROWS, QUEUE, TOKENS = 8, 16, 40
STEP_SECONDS = 0.008
PROMPT = [3, 1, 4]


@dataclass
class Tally:
    """What came of the calls of one phase."""

    done: list[Completion] = field(default_factory=list)
    refused: list[tuple[CallFailed, float]] = field(default_factory=list)


async def _one(client: SlipstreamClient, tally: Tally) -> None:
    began = time.monotonic()
    try:
        (done,) = await client.complete(PROMPT, max_tokens=TOKENS, temperature=0.0, ignore_eos=True, want_text=False)
        tally.done.append(done)
    except CallFailed as failed:
        tally.refused.append((failed, time.monotonic() - began))


async def _peak(client: SlipstreamClient, seconds: float) -> float:
    """Completions per second with the batch always full and nobody refused."""
    tally, until = Tally(), time.monotonic() + seconds

    async def worker() -> None:
        while time.monotonic() < until:
            await _one(client, tally)

    began = time.monotonic()
    await asyncio.gather(*(worker() for _ in range(ROWS + QUEUE // 2)))
    assert not tally.refused
    return len(tally.done) / (time.monotonic() - began)


async def _flood(clients: list[SlipstreamClient], rate: float, seconds: float, rng: random.Random) -> Tally:
    """Poisson arrivals of `rate` per second, whatever becomes of them."""
    tally, calls = Tally(), set[asyncio.Task[None]]()
    at = began = time.monotonic()
    while at < began + seconds:
        at += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        calls.add(asyncio.create_task(_one(rng.choice(clients), tally)))
    await asyncio.gather(*calls)
    return tally


async def _check_health(client: SlipstreamClient, latencies: list[float], answers: set[str]) -> None:
    stub = health(client.channel)
    while True:
        for service in (LIVENESS, READINESS):
            began = time.monotonic()
            answers.add(NAMES[(await stub.Check(health_pb2.HealthCheckRequest(service=service))).status])
            latencies.append(time.monotonic() - began)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("seconds", [6.0, pytest.param(60.0, marks=pytest.mark.soak)])
async def test_three_times_its_capacity_costs_it_nothing_of_it(
    launch: Launch, seconds: float, seed: int, scorecard: Scorecard
) -> None:
    server = launch(
        Faults(step_seconds=STEP_SECONDS),
        max_running_requests=ROWS,
        max_queued_requests=QUEUE,
        # Above rows and queue together, so that the queue itself refuses, and does so at once.
        max_concurrent_requests=1000,
    )
    latencies: list[float] = []
    answers: set[str] = set()
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(server.client(enable_retries=0)) for _ in range(5)]
        vocab = (await clients[0].model_info()).vocab_size
        peak = await _peak(clients[0], min(seconds, 6.0))
        checking = asyncio.create_task(_check_health(clients.pop(), latencies, answers))
        began = time.monotonic()
        tally = await _flood(clients, 3 * peak, seconds, random.Random(seed))
        goodput = len(tally.done) / (time.monotonic() - began)
        checking.cancel()
        await asyncio.gather(checking, return_exceptions=True)
    assert all(list(done.token_ids) == expected(PROMPT, TOKENS, vocab) for done in tally.done)
    assert {(failed.code.name, failed.reason) for failed, _ in tally.refused} == {("RESOURCE_EXHAUSTED", "QUEUE_FULL")}
    assert all(failed.retry_after for failed, _ in tally.refused)
    _record(scorecard, peak, goodput, tally, latencies)
    scorecard(11, "answers of both health services", sorted(answers), equals=["SERVING"])
    await _nothing_left(server)


def _record(scorecard: Scorecard, peak: float, goodput: float, tally: Tally, latencies: list[float]) -> None:
    waits = np.asarray([late for _, late in tally.refused]) * 1000
    checks = np.asarray(latencies) * 1000
    scorecard(11, "peak, goodput at 3 times it, completions/s", [peak, goodput])
    # The emptying of the queue is in it.
    scorecard(11, "goodput over peak", goodput / peak, at_least=0.9, shared=0.8)
    scorecard(11, f"median ms of {len(waits)} refusals", float(np.median(waits)), at_most=50)
    scorecard(11, "their p99 ms", float(np.percentile(waits, 99)), at_most=50, shared=1000)
    scorecard(24, "p99 ms of Check at 3 times the load", float(np.percentile(checks, 99)), at_most=50, shared=250)


async def _nothing_left(server: ServerProcess) -> None:
    await settled(server)
