"""Keys go by NIXL whole or not at all, whatever becomes of the engine that is read, and nothing writes late."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Sequence
from typing import Any

import numpy as np
import pytest

from core.disagg import over_nixl
from core.disagg.frames import Message
from core.disagg.interface import TransferFailed
from core.disagg.line import Line
from core.disagg.nixl_agent import NixlAgent
from core.disagg.over_nixl import NixlReceiver, NixlSender, pieces
from tests.support.ports import listening
from tests.unit.core.disagg.by_nixl import by_nixl, needs_nixl, over_tcp
from tests.unit.core.disagg.transfer import (
    TIMEOUT,
    TOKENS,
    Keys,
    Overs,
    check_arrival,
    offer,
    room,
    sides,
    wanted,
)

__all__ = ["over_tcp"]

pytestmark = needs_nixl


@pytest.mark.parametrize("start", [0, 16, TOKENS - 1])
async def test_bytes_arrive_in_order_and_the_offer_is_over(start: int) -> None:
    with by_nixl() as (giver, taker):
        await check_arrival(giver, taker, start)


async def test_many_pieces_of_other_sizes_on_either_side(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """In many reads, out of memory that is in other parts than that where it goes."""
    monkeypatch.setattr(over_nixl, "CHUNK", 1 << 12)
    pick, keys, overs = np.random.default_rng(seed), Keys(8000, seed), Overs()
    space = np.zeros(keys.bytes.size, np.uint8)
    edges = np.sort(pick.choice(space.size, 60, replace=False))
    parts = [each.data for each in np.split(space, edges)]
    with by_nixl() as (giver, taker):
        giver.expect("r")
        giver.offer(offer(keys, tokens=8000), overs)
        assert await taker.take(giver.address, wanted(tokens=8000), parts) == 5
        assert await overs.next() is True
    assert (space.reshape(keys.bytes.shape) == keys.bytes).all()


async def arrived(taking: Awaitable[int]) -> bool:
    with contextlib.suppress(TransferFailed):
        return await taking == 5
    return False


async def test_memory_that_is_lent_later_is_found() -> None:
    """An agent tells of itself again, since what it has lent is among that."""
    with by_nixl() as (giver, taker):
        for seed in (1, 2):
            keys, overs, (space, parts) = Keys(seed=seed), Overs(), room()
            giver.expect("r")
            giver.offer(offer(keys), overs)
            assert await arrived(taker.take(giver.address, wanted(), parts)) and await overs.next() is True
            assert (space.reshape(keys.bytes.shape) == keys.bytes).all()


async def test_a_read_that_goes_on_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other engine's timeout is without progress, of which NIXL tells it nothing."""
    monkeypatch.setattr(over_nixl, "CHUNK", 64)
    monkeypatch.setattr(over_nixl, "TOGETHER", 1)
    keys, overs, (_, parts) = Keys(), Overs(), room()
    with by_nixl(timeout=0.5, taking={"timeout": TIMEOUT}) as (giver, taker):
        looks = taker._receiver._agent.under_way  # type: ignore[attr-defined]

        def slow(read: Any) -> bool:
            time.sleep(0.1)
            return bool(looks(read))

        taker._receiver._agent.under_way = slow  # type: ignore[attr-defined]
        giver.expect("r")
        giver.offer(offer(keys), overs)
        began = time.monotonic()
        assert await arrived(taker.take(giver.address, wanted(), parts)) and await overs.next() is True
        assert time.monotonic() - began > 1.0, "longer than the timeout, or this shows nothing"


async def test_an_engine_that_has_all_tokens_takes_no_byte() -> None:
    overs = Overs()
    with by_nixl() as (giver, taker):
        giver.expect("r")
        giver.offer(offer(Keys()), overs)
        assert await taker.take(giver.address, wanted(start=TOKENS), []) == 5 and await overs.next() is True


def test_pieces_are_all_bytes_once(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(over_nixl, "CHUNK", 100)
    pick = np.random.default_rng(seed)
    for _ in range(50):
        total = int(pick.integers(1, 1000))
        tables, homes = [], []
        for _ in range(2):
            edges = np.unique(np.concatenate(([0, total], pick.integers(0, total, pick.integers(0, 9)))))
            sizes = np.diff(edges).astype(np.uint64)
            starts = (pick.permutation(len(sizes)) * 5000).astype(np.uint64)
            tables.append(np.stack((starts, sizes), axis=1))
            homes.append(np.concatenate([np.arange(at, at + size) for at, size in tables[-1].tolist()]))
        found = pieces(*tables)
        for side, home in enumerate(homes):
            runs = [np.arange(row[side], row[side] + row[2]) for row in found.tolist()]
            assert (np.concatenate(runs) == home).all()
        ends = np.cumsum(found[:, 2]).tolist()
        assert all(first // 100 == (last - 1) // 100 for first, last in zip([0, *ends], ends))
        chunks = list(over_nixl._chunks(found))
        assert (np.concatenate(chunks) == found).all() and len(chunks) == -(-total // 100)


async def test_keys_that_are_withdrawn_while_they_are_read_are_none() -> None:
    """What was read may be of another request by then."""
    keys, overs = Keys(), Overs()
    _, parts = room()
    with by_nixl() as (giver, taker):
        reads = taker._receiver._agent.read  # type: ignore[attr-defined]

        def withdrawn(*args: Any) -> Any:
            giver.withdraw("r")
            return reads(*args)

        taker._receiver._agent.read = withdrawn  # type: ignore[attr-defined]
        giver.expect("r")
        giver.offer(offer(keys), overs)
        with pytest.raises(TransferFailed) as failed:
            await taker.take(giver.address, wanted(), parts)
        assert failed.value.reason == "lost" and await overs.next() is False


async def test_what_the_other_engine_did_not_keep_is_none() -> None:
    """It may have been given up behind the last read, and said so."""

    class Forgetful(NixlSender):
        async def send(self, line: Line, ready: Message, parts: Sequence[memoryview]) -> None:
            say = line.say

            async def gone(said: Message) -> None:
                await say({"status": "gone"} if said["status"] == "kept" else said)

            line.say = gone  # type: ignore[method-assign]
            await super().send(line, ready, parts)

    _, parts = room()
    sender, receiver = Forgetful(NixlAgent(loopback=True)), NixlReceiver(NixlAgent(loopback=True))
    with sides(sender=sender, receiver=receiver) as (giver, taker):
        giver.expect("r")
        giver.offer(offer(Keys()), Overs())
        with pytest.raises(TransferFailed, match="given up while they were read"):
            await taker.take(giver.address, wanted(), parts)


async def test_an_engine_without_nixl_is_told_apart() -> None:
    overs, (space, parts) = Overs(), room()
    with sides(receiver=NixlReceiver(NixlAgent(loopback=True))) as (giver, taker):
        giver.expect("r")
        giver.offer(offer(Keys()), overs)
        with pytest.raises(TransferFailed, match="an engine without NIXL"):
            await taker.take(giver.address, wanted(), parts)
        assert not space.any()


async def test_nothing_spins_and_nothing_listens_beyond_this_machine(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES")
    before, (_, parts) = listening(), room()
    with by_nixl() as (giver, taker):
        giver.expect("r")
        giver.offer(offer(Keys()), Overs())
        await taker.take(giver.address, wanted(), parts)
        assert listening() - before <= {"0100007F"}
        used = time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - used < 0.2, "NIXL's own thread takes all of a core"
    assert not capfd.readouterr().out, "standard output is the command's own"
