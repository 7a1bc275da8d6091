"""Peers that say nothing, stop in the middle or come in crowds; engines that change; names of several addresses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import numpy as np
import pytest

from core.disagg import frames, tcp_giver
from core.disagg.interface import TransferFailed
from core.disagg.tcp_giver import TcpGiver
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
    hello,
    offer,
    read,
    room,
    say,
    sides,
    wanted,
)


async def test_engines_that_come_to_differ_while_one_waits_are_told_apart() -> None:
    """Weights were exchanged here, and the prompt was computed again."""
    facts: dict[str, Any] = dict(FACTS)
    with sides(giving={"facts": facts}) as (giver, taker):
        giver.expect("r")
        taking = asyncio.ensure_future(taker.take(giver.address, wanted(), room()[1]))
        await asyncio.wait([taking], timeout=0.3)
        facts["weight_version"] = "2"
        giver.offer(offer(Keys()), Overs())
        with pytest.raises(TransferFailed) as failed:
            await taking
        assert failed.value.reason == "mismatch"


async def test_a_nonce_that_is_no_text() -> None:
    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await say(writer, {"slipstream": frames.VERSION, "nonce": "\ud800"})
        await reader.read()
        writer.close()

    async with await asyncio.start_server(stranger, "127.0.0.1", 0) as server:
        with sides(timeout=1.0) as (_, taker):
            with pytest.raises(TransferFailed):
                await taker.take(server.sockets[0].getsockname(), wanted(), room()[1])


async def test_a_proof_that_is_no_text() -> None:
    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await say(writer, {"slipstream": frames.VERSION, "nonce": "n"})
        await read(reader)
        await say(writer, {"said": {"status": "ready"}, "proof": "\ud800"})
        await reader.read()
        writer.close()

    async with await asyncio.start_server(stranger, "127.0.0.1", 0) as server:
        with sides() as (_, taker):
            with pytest.raises(TransferFailed):
                await taker.take(server.sockets[0].getsockname(), wanted(), room()[1])


def test_an_address_of_version_6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("needs IPv6")
    giver = TcpGiver(("::1", 0), None, SECRET, ENGINE, lambda: FACTS, 5.0)
    giver.close()
    assert giver.address[0] == "::1" and giver.address[1] > 0


async def test_a_name_of_several_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    with sides() as (giver, taker):
        host, port = giver.address

        async def found(*args: Any, **more: Any) -> Any:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in ("127.0.0.2", host)]

        monkeypatch.setattr(taker._thread.loop, "getaddrinfo", found)
        giver.expect("r")
        giver.offer(offer(Keys()), Overs())
        assert await taker.take(("name", port), wanted(), room()[1]) == 5


async def test_a_name_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that was looked at is the one that is used."""
    with sides() as (giver, taker):
        asked, resolve = list[str](), taker._thread.loop.getaddrinfo

        async def found(host: str, port: int, **more: Any) -> Any:
            asked.append(host)
            return await resolve("127.0.0.1" if len(asked) == 1 else "127.0.0.99", port, **more)

        monkeypatch.setattr(taker._thread.loop, "getaddrinfo", found)
        giver.expect("r")
        giver.offer(offer(Keys()), Overs())
        assert await taker.take(("name.test", giver.address[1]), wanted(), room()[1]) == 5
        assert asked == ["name.test"]


@pytest.mark.parametrize("host", ["::ffff:10.0.0.1", "10.0.0.1", "0.0.0.0"])
async def test_addresses_that_are_no_peers_in_any_form(host: str) -> None:
    with sides() as (_, taker):
        assert taker._is_peer("::ffff:127.0.0.1") and not taker._is_peer(host)


@pytest.mark.parametrize("cached", [-1, TOKENS + 1, 1 << 40, "5", None, True, 1.5])
async def test_more_cached_tokens_than_the_prompt_has(cached: Any) -> None:
    with sides() as (giver, taker):
        giver.expect("r")
        giver.offer(offer(Keys(), cached_tokens=cached), Overs())
        with pytest.raises(TransferFailed):
            await taker.take(giver.address, wanted(), room()[1])


async def test_a_second_request_of_a_room_that_is_withdrawn_leaves_the_first() -> None:
    with sides() as (giver, taker):
        giver.expect("r")
        giver.offer(offer(Keys()), Overs())
        giver.expect("r")
        giver.withdraw("r")
        assert await taker.take(giver.address, wanted(), room()[1]) == 5


async def test_strangers_that_say_nothing_hold_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_giver, "HELLO_SECONDS", 0.1)
    with sides() as (giver, _):
        reader, writer = await hello(giver)
        await read(reader)
        async with asyncio.timeout(TIMEOUT / 2):
            assert await reader.read() == b""
        writer.close()


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_giver, "MOST_PEERS", 2)
    with sides() as (giver, _):
        peers = [await hello(giver) for _ in range(3)]
        for reader, _writer in peers[:2]:
            await read(reader)
        third = asyncio.ensure_future(read(peers[2][0]))
        done, _ = await asyncio.wait([third], timeout=0.3)
        assert not done, "more wait to be accepted"
        peers[0][1].close()
        assert "nonce" in await third
        for _reader, writer in peers[1:]:
            writer.close()


async def test_keys_that_stop_in_the_middle_are_given_up() -> None:
    async def stalls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await say(writer, {"slipstream": frames.VERSION, "nonce": "n"})
        back = (await read(reader))["nonce"]
        said = {"status": "ready", "cached": 0, "bytes": LAYERS * TOKENS * WIDTH}
        await say(writer, {"said": said, "proof": frames.proof(SECRET, "give", back, said)})
        writer.write(bytes(9))
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    async with await asyncio.start_server(stalls, "127.0.0.1", 0) as server:
        with sides(timeout=0.2) as (_, taker):
            with pytest.raises(TransferFailed) as failed:
                async with asyncio.timeout(TIMEOUT):
                    await taker.take(server.sockets[0].getsockname(), wanted(), room()[1])
    assert failed.value.reason == "timeout"


async def greeted(giver: TcpGiver, tokens: int) -> asyncio.StreamWriter:
    reader, writer = await hello(giver)
    greeting = await read(reader)
    asked = {"facts": FACTS, "room": "r", "claim": "c", "start": 0, "tokens": tokens, "engine_id": ENGINE}
    await say(writer, {"asked": asked, "nonce": "n", "proof": frames.proof(SECRET, "take", greeting["nonce"], asked)})
    assert (await read(reader))["said"]["status"] == "ready"
    return writer


@pytest.mark.parametrize("reads", [True, False])
async def test_an_engine_that_stops_in_the_middle_leaves_the_offer_for_the_next(reads: bool) -> None:
    """It acknowledges nothing, or reads nothing any more."""
    tokens = TOKENS if reads else 1 << 21
    keys, overs = Keys(tokens), Overs()
    with sides(timeout=0.3, taking={"timeout": TIMEOUT}) as (giver, taker):
        giver.expect("r")
        giver.offer(offer(keys, tokens=tokens), overs)
        writer = await greeted(giver, tokens)
        space = np.zeros(keys.bytes.size, np.uint8)
        async with asyncio.timeout(TIMEOUT):
            assert await taker.take(giver.address, wanted(tokens=tokens), [space.data]) == 5
        assert (space.reshape(keys.bytes.shape) == keys.bytes).all() and await overs.next() is True
        writer.close()


async def test_an_engine_that_asked_first_is_told_of_a_prompt_that_failed() -> None:
    """Of SGLang's dialect: it knows no engine's id, and hears at once, not when its patience ends."""
    with sides() as (giver, taker):
        giver.expect("r")
        taking = asyncio.ensure_future(taker.take(giver.address, wanted(engine_id=""), room()[1]))
        await asyncio.wait([taking], timeout=0.2)
        giver.withdraw("r")
        with pytest.raises(TransferFailed, match="not there"):
            async with asyncio.timeout(TIMEOUT / 4):
                await taking


async def test_an_engine_that_could_not_accept_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors come back as connections end."""
    overs = Overs()
    with sides(taking={"timeout": 3.0}) as (giver, taker):
        loop = giver._thread.loop
        accepts, fails = loop.sock_accept, iter([True])

        async def accept(listener: socket.socket) -> Any:
            if next(fails, False):
                raise OSError(24, "Too many open files")
            return await accepts(listener)

        monkeypatch.setattr(loop, "sock_accept", accept)
        for _ in range(2):
            # The accept that waits is of before.
            _, writer = await hello(giver)
            writer.close()
        giver.expect("r")
        giver.offer(offer(Keys()), overs)
        taken = 0
        with contextlib.suppress(TransferFailed):
            taken = await taker.take(giver.address, wanted(), room()[1])
        assert taken == 5 and await overs.next() is True


@pytest.mark.parametrize(("most", "giving"), [(0.1, TIMEOUT), (TIMEOUT, 0.6)])
async def test_engines_of_less_patience_hear_that_a_prompt_is_still_computed(
    most: float, giving: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_giver, "WAIT_SECONDS", most)
    overs = Overs()
    with sides(timeout=giving, taking={"timeout": 0.6}) as (giver, taker):
        giver.expect("r")
        taking = asyncio.ensure_future(taker.take(giver.address, wanted(), room()[1]))
        done, _ = await asyncio.wait([taking], timeout=1.2)
        assert not done
        giver.offer(offer(Keys()), overs)
        assert await taking == 5 and await overs.next() is True
