"""Keys go over TCP whole or not at all, to the one engine that may have them, and each offer ends once."""

from __future__ import annotations

import asyncio
import ipaddress
import threading
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from core.disagg import frames
from core.disagg.interface import TransferFailed
from tests.unit.core.disagg.transfer import (
    ENGINE,
    FACTS,
    LAYERS,
    SECRET,
    TIMEOUT,
    TOKENS,
    WIDTH,
    Keys,
    Overs,
    check_arrival,
    hello,
    offer,
    read,
    room,
    say,
    sides,
    wanted,
)


@pytest.mark.parametrize("start", [0, 16, TOKENS - 1])
async def test_bytes_arrive_in_order_and_the_offer_is_over(start: int) -> None:
    with sides() as (giver, taker):
        await check_arrival(giver, taker, start)


async def test_an_engine_that_asks_first_waits() -> None:
    keys, overs = Keys(), Overs()
    space, parts = room()
    with sides(timeout=1.5) as (giver, taker):
        giver.expect("r")
        taking = asyncio.ensure_future(taker.take(giver.address, wanted(), parts))
        # Longer than its timeout: it hears that the prompt is still expected.
        done, _ = await asyncio.wait([taking], timeout=2.0)
        assert not done
        giver.offer(offer(keys), overs)
        assert await taking == 5 and await overs.next() is True
    assert (space.reshape(keys.bytes.shape) == keys.bytes).all()


async def test_without_an_engine_s_id_the_room_may_come_later() -> None:
    """SGLang's gateways ask both engines at the same time."""
    keys, overs = Keys(), Overs()
    _, parts = room()
    with sides() as (giver, taker):
        taking = asyncio.ensure_future(taker.take(giver.address, wanted(engine_id=""), parts))
        done, _ = await asyncio.wait([taking], timeout=0.3)
        assert not done
        giver.expect("other")
        giver.expect("r")
        giver.offer(offer(keys), overs)
        assert await taking == 5 and await overs.next() is True


async def refused(taking: dict[str, Any], ask: dict[str, Any], timeout: float = TIMEOUT) -> TransferFailed:
    """How an engine is refused; what it asked for stays for another one."""
    keys, overs = Keys(), Overs()
    space, parts = room()
    with sides(taking=taking, timeout=timeout) as (giver, taker):
        giver.expect("r")
        giver.offer(offer(keys), overs)
        with pytest.raises(TransferFailed) as failed:
            await taker.take(giver.address, wanted(**ask), parts)
        assert overs.count == 0 and not space.any()
    assert overs.count == 1 and await overs.next() is False, "closed"
    return failed.value


@pytest.mark.parametrize(
    ("taking", "ask", "reason", "told"),
    [
        ({"secret": b"another secret of that length"}, {}, "unauthenticated", "different transfer secrets"),
        ({"facts": {**FACTS, "page_size": 8}}, {}, "mismatch", "page_size"),
        ({"facts": {**FACTS, "weight_version": "2"}}, {}, "mismatch", "weight_version"),
        ({"facts": {**FACTS, "more": 1}}, {}, "mismatch", "more"),
        ({}, {"claim": "of another prompt"}, "gone", "not there"),
        ({}, {"tokens": TOKENS - 4}, "gone", "not there"),
        ({}, {"start": -1}, "gone", "not there"),
        ({}, {"start": TOKENS + 1}, "gone", "not there"),
        ({}, {"engine_id": "of a process before"}, "gone", "not there"),
        ({}, {"room": "another"}, "gone", "not there"),
        ({"networks": (ipaddress.ip_network("10.0.0.0/8"),)}, {}, "peer_refused", "transfer_peers"),
        ({}, {"start": 4}, "lost", "other bytes"),
    ],
)
async def test_what_does_not_fit_is_refused(
    taking: dict[str, Any], ask: dict[str, Any], reason: str, told: str
) -> None:
    failed = await refused(taking, ask)
    assert failed.reason == reason and told in str(failed)


async def test_a_room_that_never_comes_is_not_waited_for_without_end() -> None:
    with sides(timeout=0.2, taking={"timeout": TIMEOUT}) as (giver, taker):
        with pytest.raises(TransferFailed) as failed:
            await taker.take(giver.address, wanted(engine_id=""), room()[1])
    assert failed.value.reason == "gone"


async def test_what_nothing_asks_for_is_over_in_time_and_gone() -> None:
    overs, (_, parts) = Overs(), room()
    with sides(timeout=0.1, taking={"timeout": TIMEOUT}) as (giver, taker):
        giver.expect("r")
        giver.offer(offer(Keys()), overs)
        assert await overs.next() is False
        with pytest.raises(TransferFailed, match="not there"):
            await taker.take(giver.address, wanted(engine_id=""), parts)


async def test_a_prompt_that_failed_is_told_at_once() -> None:
    overs, (_, parts) = Overs(), room()
    with sides() as (giver, taker):
        giver.expect("r")
        taking = asyncio.ensure_future(taker.take(giver.address, wanted(), parts))
        await asyncio.wait([taking], timeout=0.2)
        giver.withdraw("r")
        giver.withdraw("never there")
        with pytest.raises(TransferFailed, match="not there"):
            await taking
        giver.offer(offer(Keys()), overs)
        assert await overs.next() is False, "what comes behind that is wanted by none"
        # The name may be used again.
        giver.expect("r")
        giver.offer(offer(Keys()), overs)
        assert await taker.take(giver.address, wanted(), parts) == 5


async def test_an_offer_stays_where_an_engine_left_in_the_middle() -> None:
    keys, overs = Keys(1 << 20), Overs()
    given = offer(keys, tokens=1 << 20)
    with sides() as (giver, taker):
        giver.expect("r")
        giver.offer(given, overs)
        reader, writer = await hello(giver)
        greeting = await read(reader)
        asked = {"facts": FACTS, "room": "r", "claim": "c", "start": 0, "tokens": 1 << 20, "engine_id": ENGINE}
        proof = frames.proof(SECRET, "take", greeting["nonce"], asked)
        await say(writer, {"asked": asked, "nonce": "n", "proof": proof})
        assert (await read(reader))["said"]["status"] == "ready"
        await reader.readexactly(1 << 16)
        writer.close()
        space = np.zeros(keys.bytes.size, np.uint8)
        assert await taker.take(giver.address, wanted(tokens=1 << 20), [space.data]) == 5
        assert (space.reshape(keys.bytes.shape) == keys.bytes).all()
        assert await overs.next() is True and overs.count == 1


async def test_all_that_was_sent_is_not_delivered_before_the_other_side_says_so() -> None:
    overs = Overs()
    with sides(timeout=0.5) as (giver, _):
        giver.expect("r")
        giver.offer(offer(Keys()), overs)
        reader, writer = await hello(giver)
        greeting = await read(reader)
        asked = {"facts": FACTS, "room": "r", "claim": "c", "start": 0, "tokens": TOKENS, "engine_id": ENGINE}
        proof = frames.proof(SECRET, "take", greeting["nonce"], asked)
        await say(writer, {"asked": asked, "nonce": "n", "proof": proof})
        assert (await read(reader))["said"]["status"] == "ready"
        await reader.readexactly(LAYERS * TOKENS * WIDTH)
        await say(writer, {"status": "no"})
        assert await overs.next() is False
        writer.close()


async def test_a_withdrawn_offer_is_cut_off_and_over() -> None:
    keys, overs = Keys(1 << 21), Overs()
    with sides() as (giver, taker):
        giver.expect("r")
        giver.offer(offer(keys, tokens=1 << 21), overs)
        reader, writer = await hello(giver)
        greeting = await read(reader)
        asked = {"facts": FACTS, "room": "r", "claim": "c", "start": 0, "tokens": 1 << 21, "engine_id": ENGINE}
        proof = frames.proof(SECRET, "take", greeting["nonce"], asked)
        await say(writer, {"asked": asked, "nonce": "n", "proof": proof})
        assert (await read(reader))["said"]["status"] == "ready"
        giver.withdraw("r")
        assert await overs.next() is False
        rest = await reader.read(-1)
        assert len(rest) < keys.bytes.size
        writer.close()
        with pytest.raises(TransferFailed, match="not there"):
            await taker.take(giver.address, wanted(tokens=1 << 21, engine_id=""), [np.zeros(9, np.uint8).data])


async def test_two_that_ask_for_one_room_get_it_once() -> None:
    keys, overs = Keys(), Overs()
    rooms = [room() for _ in range(3)]
    with sides() as (giver, taker):
        giver.expect("r")
        taking = [asyncio.ensure_future(taker.take(giver.address, wanted(), parts)) for _, parts in rooms]
        await asyncio.wait(taking, timeout=0.3)
        giver.offer(offer(keys), overs)
        found = await asyncio.gather(*taking, return_exceptions=True)
    assert sorted(str(each) for each in found) == ["5"] + 2 * ["the keys are not there, or no more"]
    assert overs.count == 1


async def test_one_that_leaves_while_it_waits_writes_nothing_any_more() -> None:
    keys, overs = Keys(), Overs()
    space, parts = room()
    with sides() as (giver, taker):
        giver.expect("r")
        taking = asyncio.ensure_future(taker.take(giver.address, wanted(), parts))
        await asyncio.wait([taking], timeout=0.2)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        giver.offer(offer(keys), overs)
        other, others = room()
        assert await taker.take(giver.address, wanted(), others) == 5
        assert not space.any() and other.any()


async def test_one_that_is_cancelled_has_ended_when_it_says_so() -> None:
    """What was reserved is given up then: a byte that comes later would be in keys of another prompt."""
    keys, overs, goes_on = Keys(), Overs(), threading.Event()
    space = np.zeros(keys.bytes.size, np.uint8)
    with sides() as (giver, taker):
        giver.expect("r")
        taking = asyncio.ensure_future(taker.take(giver.address, wanted(), [space.data]))
        await asyncio.wait([taking], timeout=0.2)
        # The thread that writes is busy: it hears of the end later.
        taker._thread.call(goes_on.wait)
        taking.cancel()
        done, _ = await asyncio.wait([taking], timeout=0.2)
        # Before anything is asserted: `sides` waits for that thread.
        goes_on.set()
        assert not done, "it may still write"
        with pytest.raises(asyncio.CancelledError):
            await taking
        giver.offer(offer(keys), overs)
        other = np.zeros(keys.bytes.size, np.uint8)
        assert await taker.take(giver.address, wanted(), [other.data]) == 5
        assert not space.any() and await overs.next() is True


async def test_a_connection_is_closed_whose_task_never_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the engine stops right behind what it has accepted."""
    with sides() as (giver, _):
        keep = giver._keep

        def cancelled(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            task = keep(work)
            task.cancel()
            return task

        # It accepts by now: that is a task as well.
        first, closing = await hello(giver)
        await read(first)
        closing.close()
        monkeypatch.setattr(giver, "_keep", cancelled)
        reader, writer = await asyncio.open_connection(*giver.address)
        try:
            reading = asyncio.ensure_future(reader.read())
            done, _ = await asyncio.wait([reading], timeout=TIMEOUT)
            assert done and await reading == b"", "not a word, and no connection"
        finally:
            writer.close()
