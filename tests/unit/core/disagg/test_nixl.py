"""Keys go by NIXL whole or not at all, whatever becomes of the engine that is read, and nothing writes late."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from core.disagg import nixl_agent, over_nixl
from core.disagg.frames import BadFrame, Message
from core.disagg.interface import TransferFailed
from core.disagg.line import Line
from core.disagg.nixl_agent import NixlAgent, NixlFailed
from core.disagg.over_nixl import MAX_PARTS, MAX_TOLD, NixlReceiver, NixlSender, pieces
from core.disagg.tcp_giver import TcpGiver
from core.disagg.tcp_taker import TcpTaker
from tests.support.ports import listening
from tests.support.repository import ROOT
from tests.unit.core.disagg.transfer import (
    LAYERS,
    TIMEOUT,
    TOKENS,
    WIDTH,
    Keys,
    Overs,
    offer,
    room,
    sides,
    wanted,
)

pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed (slipstream[nixl])")


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between two machines: memory of a process that is frozen could be read otherwise."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


@contextmanager
def by_nixl(**changes: Any) -> Iterator[tuple[TcpGiver, TcpTaker]]:
    sender, receiver = NixlSender(NixlAgent(loopback=True)), NixlReceiver(NixlAgent(loopback=True))
    with sides(sender=sender, receiver=receiver, **changes) as (giver, taker):
        yield giver, taker


@pytest.mark.parametrize("start", [0, 16, TOKENS - 1])
async def test_bytes_arrive_in_order_and_the_offer_is_over(start: int) -> None:
    keys, overs = Keys(), Overs()
    space, parts = room(start=start)
    with by_nixl() as (giver, taker):
        giver.expect("r")
        giver.offer(offer(keys), overs)
        assert await taker.take(giver.address, wanted(start=start), parts) == 5
        assert (space.reshape(LAYERS, TOKENS - start, WIDTH) == keys.bytes[:, start:]).all()
        assert await overs.next() is True
        with pytest.raises(TransferFailed) as failed:
            await taker.take(giver.address, wanted(start=start), parts)
        assert failed.value.reason == "gone", "each prompt goes to one engine"
    assert overs.count == 1


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


@contextmanager
def another(tokens: int) -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    """A process that gives keys of `tokens` tokens, and where it does."""
    command = [sys.executable, "-m", "tests.unit.core.disagg.giving", str(tokens)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, ("127.0.0.1", int(process.stdout.readline()))
        finally:
            process.kill()


def begin_with(taker: TcpTaker, signal_number: int, process: subprocess.Popen[str]) -> threading.Event:
    """Send `process` the signal before the first read from it begins; set when that has."""
    begun = threading.Event()
    agent = taker._receiver._agent  # type: ignore[attr-defined]
    reads = agent.read

    def read(*args: Any) -> Any:
        process.send_signal(signal_number)
        if signal_number == signal.SIGKILL:
            process.wait()
        try:
            return reads(*args)
        finally:
            begun.set()

    agent.read = read
    return begun


async def test_an_engine_that_dies_is_lost_at_once() -> None:
    with by_nixl() as (_, taker), another(TOKENS) as (process, address):
        space, parts = room()
        begin_with(taker, signal.SIGKILL, process)
        began = time.monotonic()
        with pytest.raises(TransferFailed) as failed:
            await taker.take(address, wanted(), parts)
        assert failed.value.reason == "lost" and time.monotonic() - began < TIMEOUT / 2
        settled = asyncio.Event()
        taker.settle(parts, settled.set)
        await asyncio.wait_for(settled.wait(), TIMEOUT)
        assert not space.any()


async def test_bytes_of_a_frozen_engine_that_come_late_harm_nothing() -> None:
    """The request goes on without them. Where they would be written is held until they have come."""
    with by_nixl(taking={"timeout": 1.0}) as (_, taker), another(TOKENS) as (process, address):
        space, parts = room()
        begin_with(taker, signal.SIGSTOP, process)
        with pytest.raises(TransferFailed) as failed:
            await taker.take(address, wanted(), parts)
        assert failed.value.reason == "timeout"
        settled = asyncio.Event()
        taker.settle(parts, settled.set)
        done, _ = await asyncio.wait([asyncio.ensure_future(settled.wait())], timeout=0.3)
        assert not done and not space.any(), "they may still come"
        process.send_signal(signal.SIGCONT)
        await asyncio.wait_for(settled.wait(), TIMEOUT)
        assert (space.reshape(LAYERS, TOKENS, WIDTH) == Keys().bytes).all(), "they came, and nothing was there yet"
        assert taker._receiver.is_quiet(parts)


async def test_one_that_is_cancelled_leaves_its_reads_to_end() -> None:
    with by_nixl() as (_, taker), another(TOKENS) as (process, address):
        _, parts = room()
        begun = begin_with(taker, signal.SIGSTOP, process)
        taking = asyncio.ensure_future(taker.take(address, wanted(), parts))
        assert await asyncio.to_thread(begun.wait, TIMEOUT)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        settled = asyncio.Event()
        taker.settle(parts, settled.set)
        assert not settled.is_set()
        process.kill()
        await asyncio.wait_for(settled.wait(), TIMEOUT)


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


TABLES = {
    "more": [[1, 41], [2, 800]],
    "less": [[1, 40]],
    "turned round": [[1, (1 << 64) - 1], [2, 841]],
    "none": [],
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
async def test_tables_that_do_not_fit_are_refused_before_anything_is_read(table: list[list[int]]) -> None:
    """A peer that has the secret may still be mistaken: what it says decides where bytes are written."""

    class Mistaken(NixlSender):
        async def send(self, line: Line, ready: Message, parts: Sequence[memoryview]) -> None:
            self._agent.lend = lambda _: np.array(table, np.uint64).reshape(-1, 2)  # type: ignore[method-assign]
            await super().send(line, ready, parts)

    receiver = NixlReceiver(NixlAgent(loopback=True))
    receiver._agent.read = None  # type: ignore[assignment]
    space, parts = room()
    with sides(sender=Mistaken(NixlAgent(loopback=True)), receiver=receiver) as (giver, taker):
        giver.expect("r")
        giver.offer(offer(Keys()), Overs())
        with pytest.raises(TransferFailed, match="other bytes than were told of"):
            await taker.take(giver.address, wanted(), parts)
    assert not space.any()


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_tables_that_do_not_fit(table: list[list[int]]) -> None:
    here, there = np.array([[7, 840]], np.uint64), np.array(table, np.uint64).reshape(-1, 2)
    assert not over_nixl.fit(here, there) and over_nixl.fit(here, np.array([[1, 40], [9, 800]], np.uint64))


AT = {"agent": "a", "told": 3, "where": 16, "digest": hashlib.sha256(b"abc" + bytes(16)).hexdigest()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"agent": 3}, "an engine without NIXL"),
        ({"told": MAX_TOLD + 1}, "more than an agent has to tell"),
        ({"told": -1}, "more than an agent has to tell"),
        ({"where": "16"}, "more than an agent has to tell"),
        ({"where": 16 * (MAX_PARTS + 1)}, "more than an agent has to tell"),
        ({"where": 15}, "no table"),
        ({"digest": "0" * 64}, "not what was proved"),
    ],
)
async def test_what_no_agent_says_is_refused(changes: dict[str, Any], said: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.send(b"abc" + bytes(16))
        line = Line(ours, b"", "", 1.0)
        assert (await over_nixl._source(line, {"nixl": AT}))[1] == b"abc"
        theirs.send(b"abc" + bytes(16))
        with pytest.raises(BadFrame, match=said):
            await over_nixl._source(line, {"nixl": AT | changes})


def test_agents_that_were_not_heard_of_for_long_are_met_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "MOST_MET", 2)
    agent, others = NixlAgent(loopback=True), [NixlAgent(loopback=True) for _ in range(3)]
    for other in (others[0], others[1], others[0], others[2]):
        agent.meet(other.name, other.told())
    assert list(agent._met) == [others[0].name, others[2].name]
    with pytest.raises(NixlFailed, match="calls itself otherwise"):
        agent.meet("another", others[1].told())
    with pytest.raises(NixlFailed, match="NIXL: nixl"):
        agent.meet(others[1].name, b"nothing that an agent tells")
    for each in (agent, *others):
        each.close()
        each.close()
