"""A well-behaved client beside the attack: the same seeded request over and over, whose answer must never change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from service.client import SlipstreamClient

ASKED: dict[str, Any] = {"max_tokens": 40, "temperature": 0.9, "seed": 7, "ignore_eos": True}
PROMPT = "the quick brown fox"
LAG_TICK = 0.005


@dataclass
class Neighbour:
    """What the good client saw: how often it was answered, and how far the event loop fell behind."""

    expected: tuple[int, ...]
    answers: int = 0
    wrong: list[tuple[int, ...]] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)

    @property
    def worst_lag(self) -> float:
        """The longest time in seconds that the loop was late while its process was at work."""
        return max(self.lags, default=0.0)


@asynccontextmanager
async def beside(client: SlipstreamClient) -> AsyncIterator[Neighbour]:
    """Runs the good client, and a clock of the loop, while the body attacks; checks the answers at the end."""
    alone = (await client.complete(PROMPT, **ASKED))[0].token_ids
    seen = Neighbour(alone)
    assert len(seen.expected) == ASKED["max_tokens"]
    stop = asyncio.Event()

    async def ask() -> None:
        while not stop.is_set():
            ids = (await client.complete(PROMPT, **ASKED))[0].token_ids
            seen.answers += 1
            if ids != alone:
                seen.wrong.append(ids)

    async def tick() -> None:
        while not stop.is_set():
            due, worked = time.monotonic() + LAG_TICK, time.process_time()
            await asyncio.sleep(LAG_TICK)
            # A host that stalls makes the loop late as well; only what this process did meanwhile can be its fault.
            seen.lags.append(min(time.monotonic() - due, time.process_time() - worked))

    tasks = [asyncio.create_task(ask()), asyncio.create_task(tick())]
    try:
        yield seen
    finally:
        stop.set()
        await asyncio.gather(*tasks)
    assert seen.answers > 0
    assert seen.wrong == []
