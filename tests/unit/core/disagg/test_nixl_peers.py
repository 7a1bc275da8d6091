"""Engines that die, freeze or are not waited for while NIXL reads from them: nothing writes late."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from core.disagg import nixl_agent, over_nixl
from core.disagg.interface import TransferFailed
from core.disagg.tcp_taker import TcpTaker
from tests.support.repository import ROOT
from tests.unit.core.disagg.by_nixl import by_nixl, needs_nixl, over_tcp
from tests.unit.core.disagg.transfer import (
    LAYERS,
    TIMEOUT,
    TOKENS,
    WIDTH,
    Keys,
    Overs,
    offer,
    room,
    wanted,
)

__all__ = ["over_tcp"]

pytestmark = needs_nixl


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
        with pytest.raises(TransferFailed) as failed:
            await taker.take(address, wanted(), parts)
        # And not that nothing came in time.
        assert failed.value.reason == "lost"
        assert not taker._receiver._agent._met, "where it comes back it is met anew"  # type: ignore[attr-defined]
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
        settled, told = asyncio.Event(), list[int]()

        def then() -> None:
            told.append(threading.get_ident())
            settled.set()

        taker.settle(parts, then)
        done, _ = await asyncio.wait([asyncio.ensure_future(settled.wait())], timeout=0.3)
        assert not done and not space.any(), "they may still come"
        process.send_signal(signal.SIGCONT)
        await asyncio.wait_for(settled.wait(), TIMEOUT)
        assert told == [threading.get_ident()], "blocks are given back on the engine's thread"
        assert (space.reshape(LAYERS, TOKENS, WIDTH) == Keys().bytes).all(), "they came, and nothing was there yet"
        assert taker._receiver.is_quiet(parts)


@pytest.mark.parametrize("by", ["another agent", "a read that is refused"])
async def test_an_agent_is_not_forgotten_while_it_may_still_write(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that is forgotten NIXL says at once that there is no such read, and its bytes come all the same."""
    monkeypatch.setattr(nixl_agent, "MOST_MET", 1)
    monkeypatch.setattr(over_nixl, "CHUNK", 500)
    with by_nixl(taking={"timeout": 1.0}) as (giver, taker), another(TOKENS) as (process, address):
        (space, parts), agent = room(), taker._receiver._agent  # type: ignore[attr-defined]
        begin_with(taker, signal.SIGSTOP, process)
        if by == "a read that is refused":
            begins = agent._agent.initialize_xfer
            refuses = iter((False, True))

            def refused(*given: Any) -> Any:
                if next(refuses):
                    raise agent.errors[0]("refused")
                return begins(*given)

            monkeypatch.setattr(agent._agent, "initialize_xfer", refused)
        with pytest.raises(TransferFailed):
            await taker.take(address, wanted(), parts)
        monkeypatch.undo()
        settled = asyncio.Event()
        taker.settle(parts, settled.set)
        if by == "another agent":
            monkeypatch.setattr(nixl_agent, "MOST_MET", 1)
            agent.read = type(agent).read.__get__(agent)
            giver.expect("r")
            giver.offer(offer(Keys()), Overs())
            assert await taker.take(giver.address, wanted(), room()[1]) == 5
        done, _ = await asyncio.wait([asyncio.ensure_future(settled.wait())], timeout=0.3)
        assert not done and not space.any(), "they may still come"
        process.send_signal(signal.SIGCONT)
        await asyncio.wait_for(settled.wait(), TIMEOUT)
        assert space.any() and not agent._reading and not agent._lost


async def test_a_read_that_failed_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at again it would end another one's too, whose agent could be forgotten then."""
    with by_nixl() as (_, taker), another(TOKENS) as (process, address):
        (_, parts), agent = room(), taker._receiver._agent  # type: ignore[attr-defined]

        def failing(handle: object) -> str:
            raise agent.errors[0]("this read alone")

        monkeypatch.setattr(agent._agent, "check_xfer_state", failing)
        begin_with(taker, signal.SIGSTOP, process)
        reads = agent.read

        def beside_another(name: str, *given: Any) -> Any:
            agent._reading[name] += 1
            return reads(name, *given)

        agent.read = beside_another
        with pytest.raises(TransferFailed):
            await taker.take(address, wanted(), parts)
        settled = asyncio.Event()
        taker.settle(parts, settled.set)
        await asyncio.wait_for(settled.wait(), TIMEOUT)
        assert list(agent._reading.values()) == [1] and set(agent._reading) == agent._lost == set(agent._met)


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
