"""The two sides of a transfer on loopback, and keys that tell where they belong."""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from core.disagg.carrier import Receiver, Sender
from core.disagg.interface import Offer, TransferFailed, Wanted
from core.disagg.tcp_giver import TcpGiver
from core.disagg.tcp_taker import TcpTaker

SECRET = b"sixteen bytes at least"
FACTS = {"architecture": "A", "page_size": 4, "weight_version": "1"}
ENGINE = "engine-1"
LOOPBACK = ipaddress.ip_network("127.0.0.0/8")
LAYERS, TOKENS, WIDTH = 3, 40, 7
TIMEOUT = 20.0
"""Seconds that no test waits for: what should come at once comes at once."""


class Keys:
    """Keys of `tokens` tokens in `LAYERS` layers, as an arena has them: layer after layer."""

    def __init__(self, tokens: int = TOKENS, seed: int = 3) -> None:
        self.bytes = np.random.default_rng(seed).integers(0, 256, (LAYERS, tokens, WIDTH), np.uint8)

    def parts(self, start: int) -> list[memoryview]:
        return [np.ascontiguousarray(layer[start:]).data.cast("B") for layer in self.bytes if len(layer) > start]


class Overs:
    """What became of offers: `over` is called from another thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Queue[bool] = asyncio.Queue()
        self.count = 0

    def __call__(self, delivered: bool) -> None:
        self.count += 1
        self._loop.call_soon_threadsafe(self._told.put_nowait, delivered)

    async def next(self) -> bool:
        async with asyncio.timeout(TIMEOUT):
            return await self._told.get()


def room(tokens: int = TOKENS, start: int = 0) -> tuple[np.ndarray[Any, Any], list[memoryview]]:
    """Where keys of [start, tokens) are written, in two parts that end within a layer."""
    space = np.zeros(LAYERS * (tokens - start) * WIDTH, np.uint8)
    half = len(space) // 2 + 1
    return space, [space[:half].data, space[half:].data]


def wanted(**changes: Any) -> Wanted:
    return Wanted(**{"room": "r", "claim": "c", "start": 0, "tokens": TOKENS, "engine_id": ENGINE, **changes})


def offer(keys: Keys, **changes: Any) -> Offer:
    given = {"room": "r", "claim": "c", "tokens": TOKENS, "cached_tokens": 5, "parts": keys.parts}
    return Offer(**{**given, **changes})


@contextmanager
def sides(
    giving: dict[str, Any] | None = None,
    taking: dict[str, Any] | None = None,
    timeout: float = TIMEOUT,
    sender: Sender | None = None,
    receiver: Receiver | None = None,
) -> Iterator[tuple[TcpGiver, TcpTaker]]:
    """A giver and a taker that fit, but for what is changed in either."""
    given = {"secret": SECRET, "facts": FACTS} | (giving or {})
    taken = {"secret": SECRET, "facts": FACTS, "networks": (LOOPBACK,)} | (taking or {})
    giver = TcpGiver(("127.0.0.1", 0), None, given["secret"], ENGINE, lambda: given["facts"], timeout, sender)
    taker = TcpTaker(
        taken["networks"], taken["secret"], lambda: taken["facts"], taken.get("timeout", timeout), receiver
    )
    try:
        yield giver, taker
    finally:
        taker.close()
        giver.close()


async def check_arrival(giver: TcpGiver, taker: TcpTaker, start: int) -> None:
    """That bytes from `start` on arrive in order, and that the offer is over then."""
    keys, overs = Keys(), Overs()
    space, parts = room(start=start)
    giver.expect("r")
    giver.offer(offer(keys), overs)
    assert await taker.take(giver.address, wanted(start=start), parts) == 5
    assert (space.reshape(LAYERS, TOKENS - start, WIDTH) == keys.bytes[:, start:]).all()
    assert await overs.next() is True
    with pytest.raises(TransferFailed) as failed:
        await taker.take(giver.address, wanted(start=start), parts)
    assert failed.value.reason == "gone", "each prompt goes to one engine"
    assert overs.count == 1


async def hello(giver: TcpGiver) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which nothing was said."""
    return await asyncio.open_connection(*giver.address)


async def read(reader: asyncio.StreamReader) -> dict[str, Any]:
    async with asyncio.timeout(TIMEOUT):
        length = int.from_bytes(await reader.readexactly(4), "little")
        found: dict[str, Any] = json.loads(await reader.readexactly(length))
        return found


async def say(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    writer.write(len(data).to_bytes(4, "little") + data)
    await writer.drain()
