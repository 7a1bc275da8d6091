"""Strangers, silence and addresses that are none: nothing is given away, nothing hangs, and a line says why."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any

import pytest

from core.disagg import frames
from core.disagg.interface import TransferFailed
from core.disagg.tcp_giver import HELLO_SECONDS, TcpGiver
from core.disagg.transfer_thread import TransferThread
from core.errors import StartupError
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


async def test_nothing_answers_and_names_that_are_none() -> None:
    with socket.socket() as unused, sides() as (_, taker):
        unused.bind(("127.0.0.1", 0))
        for host, port in (("127.0.0.1", unused.getsockname()[1]), ("no.such.name.invalid", 1), ("a" * 70 + ".b", 1)):
            with pytest.raises(TransferFailed) as failed:
                await taker.take((host, port), wanted(), [])
            assert failed.value.reason == "unreachable", host


async def test_names_of_any_length_are_answered() -> None:
    """A peer has the secret, and facts that no engine has."""
    with sides() as (giver, _):
        reader, writer = await hello(giver)
        greeting = await read(reader)
        names = ["\u20ac" * 2000, *(f"n{number}" for number in range(300))]
        asked = {"facts": dict.fromkeys(names, 1), "room": "r", "claim": "c", "start": 0, "tokens": 4, "engine_id": ""}
        proof = frames.proof(SECRET, "take", greeting["nonce"], asked)
        await say(writer, {"asked": asked, "nonce": "n", "proof": proof})
        said = (await read(reader))["said"]
        assert said["status"] == "mismatch" and 0 < len(said["differ"]) <= 32
        writer.close()


async def test_an_engine_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, sides(timeout=0.1) as (_, taker):
        with pytest.raises(TransferFailed) as failed:
            await taker.take(silent.getsockname(), wanted(), [])
        assert failed.value.reason == "timeout"


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        (1 << 30).to_bytes(4, "little"),
        (4).to_bytes(4, "little") + b"null",
        (2).to_bytes(4, "little") + b"{}",
        (5).to_bytes(4, "little") + b"{\xff\xff\xff}",
    ],
    ids=["http", "endless", "null", "empty", "no text"],
)
async def test_strangers_get_nothing_and_hold_nothing_up(said: bytes) -> None:
    keys, overs = Keys(), Overs()
    with sides() as (giver, taker):
        reader, writer = await hello(giver)
        await read(reader)
        writer.write(said)
        # Sooner than one that says nothing.
        async with asyncio.timeout(HELLO_SECONDS * 0.6):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        giver.expect("r")
        giver.offer(offer(keys), overs)
        assert await taker.take(giver.address, wanted(), room()[1]) == 5
        writer.close()


@pytest.mark.parametrize(
    "change",
    [{"room": 1}, {"claim": None}, {"tokens": 1.5}, {"tokens": True}, {"start": "0"}, {"engine_id": ["x"]}],
)
async def test_what_is_asked_with_the_secret_is_checked_too(change: dict[str, Any]) -> None:
    with sides() as (giver, _):
        reader, writer = await hello(giver)
        greeting = await read(reader)
        asked: dict[str, Any] = {
            "facts": FACTS,
            "room": "r",
            "claim": "c",
            "start": 0,
            "tokens": 1,
            "engine_id": ENGINE,
        }
        asked |= change
        proof = frames.proof(SECRET, "take", greeting["nonce"], asked)
        await say(writer, {"asked": asked, "nonce": "n", "proof": proof})
        async with asyncio.timeout(TIMEOUT / 2):
            assert await reader.read() == b""
        writer.close()


async def test_a_recording_proves_nothing() -> None:
    """The proof of one connection is none on the next, whichever side shows it."""
    with sides() as (giver, _):
        reader, writer = await hello(giver)
        greeting = await read(reader)
        asked = {"facts": FACTS, "room": "r", "claim": "c", "start": 0, "tokens": 1, "engine_id": ENGINE}
        recorded = {"asked": asked, "nonce": "n", "proof": frames.proof(SECRET, "take", greeting["nonce"], asked)}
        writer.close()
        reader, writer = await hello(giver)
        await read(reader)
        await say(writer, recorded)
        answer = await read(reader)
        assert answer["said"] == {"status": "unauthenticated"}
        writer.close()


def test_a_proof_is_of_one_message_one_side_and_one_nonce() -> None:
    given = frames.proof(SECRET, "take", "n", {"room": "r"})
    assert frames.proves(given, SECRET, "take", "n", {"room": "r"})
    assert not frames.proves(given, SECRET, "take", "n", {"room": "s"})
    assert not frames.proves(given, SECRET, "give", "n", {"room": "r"})
    assert not frames.proves(given, SECRET, "take", "m", {"room": "r"})
    assert not frames.proves(given, b"another", "take", "n", {"room": "r"})
    assert not frames.proves(None, SECRET, "take", "n", {"room": "r"})
    assert not frames.proves("\u00e9", SECRET, "take", "n", {"room": "r"})


@pytest.mark.parametrize("sent", [0, 1, LAYERS * TOKENS * WIDTH - 1])
async def test_keys_that_end_early_are_none(sent: int) -> None:
    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await say(writer, {"slipstream": frames.VERSION, "nonce": "n"})
        back = (await read(reader))["nonce"]
        said = {"status": "ready", "cached": 0, "bytes": LAYERS * TOKENS * WIDTH}
        await say(writer, {"said": said, "proof": frames.proof(SECRET, "give", back, said)})
        writer.write(bytes(sent))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(dies, "127.0.0.1", 0) as server:
        with sides() as (_, taker):
            with pytest.raises(TransferFailed) as failed:
                await taker.take(server.sockets[0].getsockname(), wanted(), room()[1])
    assert failed.value.reason == "lost"


async def test_an_engine_without_the_secret_gives_nothing_that_is_believed() -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await say(writer, {"slipstream": frames.VERSION, "nonce": "n"})
        await read(reader)
        said = {"status": "ready", "cached": 0, "bytes": LAYERS * TOKENS * WIDTH}
        await say(writer, {"said": said, "proof": "0" * 64})
        writer.close()

    async with await asyncio.start_server(impostor, "127.0.0.1", 0) as server:
        with sides() as (_, taker):
            with pytest.raises(TransferFailed) as failed:
                await taker.take(server.sockets[0].getsockname(), wanted(), room()[1])
    assert failed.value.reason == "unauthenticated"


def test_an_address_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bound = taken.getsockname()
        with pytest.raises(StartupError, match=f"transfer_host 127.0.0.1, transfer_port {bound[1]}: Address already"):
            TcpGiver(bound, None, b"", ENGINE, dict, TIMEOUT)


def test_what_is_closed_twice_is_closed_and_the_advertised_name_is_told() -> None:
    giver = TcpGiver(("127.0.0.1", 0), "prefill-0.pool", b"", ENGINE, dict, TIMEOUT)
    assert giver.address[0] == "prefill-0.pool" and giver.address[1] > 0
    giver.close()
    giver.close()
    giver.expect("r")


async def test_work_that_comes_as_a_thread_ends_is_ended_too() -> None:
    """Else its caller would wait for ever."""
    thread, begun, late = TransferThread("t"), threading.Event(), list[asyncio.Future[Any]]()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            late.append(asyncio.ensure_future(asyncio.Event().wait()))

    waiting = asyncio.ensure_future(thread.run(work))
    assert await asyncio.to_thread(begun.wait, TIMEOUT)
    await asyncio.to_thread(thread.close)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert [each.cancelled() for each in late] == [True]
