"""A client that leaves gives its row and pages back within two steps, whatever its request was doing.

Through real sockets, with a device slow enough (60 ms a step) that steps can be counted against the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from core.engine.async_engine import AsyncEngine
from core.text.tokenizer import Tokenizer
from service.bench.emulated import expected_output
from service.client import CallFailed, Chunk, SlipstreamClient
from tests.support.fakes.emulated_engine import emulated_engine
from tests.support.scorecard import Scorecard
from tests.support.servers import serve_checkpoint
from tests.support.until import until

pytestmark = pytest.mark.alone

STEP_SECONDS = 0.06
CHUNK = 1024
LONG_PROMPT = 3 * CHUNK + 200


@pytest.fixture(scope="module")
def checkpoint(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("llama")


@pytest.fixture
async def served(checkpoint: Path) -> AsyncIterator[tuple[AsyncEngine, SlipstreamClient]]:
    """Two rows, so that a third request waits."""
    tokenizer = Tokenizer.load(checkpoint)
    built = emulated_engine(tokenizer, step_seconds=STEP_SECONDS, rows=2, context=8000, max_total_tokens=16_000)
    async with serve_checkpoint(checkpoint, lambda *_: built) as (server, client):
        assert isinstance(server.engine, AsyncEngine)
        yield server.engine, client


async def _read(client: SlipstreamClient, prompt: list[int], tokens: int, timeout: float | None = None) -> list[int]:
    got: list[int] = []
    async for event in client.generate(
        prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, want_text=False, timeout=timeout
    ):
        if isinstance(event, Chunk):
            got += event.token_ids
    return got


PHASES: dict[str, tuple[list[int], int, int]] = {
    "first prefill": ([7] * 30, 50, 0),
    "middle chunk": ([7] * LONG_PROMPT, 50, 2),
    "decode": ([7] * 30, 50, 6),
    "last step": ([7] * 30, 8, 7),
}
"""Prompt, outputs, and the step of its life in which the client leaves."""


ROWS = {"cancel": 15, "deadline": 16}
"""Of the scorecard."""


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("way", ["cancel", "deadline"])
async def test_leaving_gives_everything_back(
    served: tuple[AsyncEngine, SlipstreamClient], phase: str, way: str, scorecard: Scorecard
) -> None:
    engine, client = served
    prompt, tokens, step = PHASES[phase]
    timeout = (step + 0.7) * STEP_SECONDS if way == "deadline" else None
    call = asyncio.create_task(_read(client, prompt, tokens, timeout))
    await until(lambda: engine.stats.running == 1)
    if way == "cancel":
        await until(lambda: engine.stats.step >= step)
        call.cancel()
    with contextlib.suppress(asyncio.CancelledError, CallFailed):
        await call
    left_at, left_time = engine.stats.step, time.monotonic()
    await until(lambda: all(pool.used == 0 for pool in engine.stats.pools))
    milliseconds = (time.monotonic() - left_time) * 1000
    scorecard(ROWS[way], f"{phase}: steps to everything back", engine.stats.step - left_at, at_most=2)
    scorecard(ROWS[way], f"{phase}: ms to everything back", milliseconds, at_most=2500 * STEP_SECONDS)
    assert engine.live_requests == 0
    assert engine.stats.generation_tokens <= step + 2


@pytest.mark.parametrize("way", ["cancel", "deadline"])
async def test_leaving_the_queue_disturbs_nobody(
    served: tuple[AsyncEngine, SlipstreamClient], way: str, scorecard: Scorecard
) -> None:
    engine, client = served
    running = [asyncio.create_task(_read(client, [n, n + 1], 12)) for n in (3, 5)]
    await until(lambda: engine.stats.running == 2)
    queued = asyncio.create_task(_read(client, [9] * 10, 5, 5 * STEP_SECONDS if way == "deadline" else None))
    await until(lambda: engine.stats.waiting == 1)
    if way == "cancel":
        queued.cancel()
    with contextlib.suppress(asyncio.CancelledError, CallFailed):
        await queued
    await until(lambda: engine.stats.waiting == 0)
    assert engine.live_requests == 2
    for n, task in zip((3, 5), running, strict=True):
        assert await task == expected_output([n, n + 1], 12, engine.model_info.vocab_size)
    scorecard(ROWS[way], "forward rows spent on a queued request", engine.stats.prompt_tokens - 4, equals=0)
