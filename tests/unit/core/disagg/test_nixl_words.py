"""What an agent may say of itself and of its memory, and what is refused before anything is read."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from core.config import DisaggConfig
from core.disagg import frames, nixl_agent, over_nixl
from core.disagg.frames import BadFrame, Message
from core.disagg.interface import TransferFailed
from core.disagg.line import Line
from core.disagg.nixl_agent import NixlAgent, NixlFailed
from core.disagg.over_nixl import MAX_PARTS, MAX_TOLD, NixlReceiver, NixlSender
from core.disagg.registry import check_transfers
from core.errors import ConfigError
from tests.unit.core.disagg.by_nixl import needs_nixl, over_tcp
from tests.unit.core.disagg.transfer import (
    ENGINE,
    FACTS,
    SECRET,
    TIMEOUT,
    TOKENS,
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

__all__ = ["over_tcp"]

pytestmark = needs_nixl


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


def test_an_agent_under_another_name_is_not_kept() -> None:
    agent, other = NixlAgent(loopback=True), NixlAgent(loopback=True)
    removed, remove = list[str](), agent._agent.remove_remote_agent
    agent._agent.remove_remote_agent = lambda name: (removed.append(name), remove(name))
    with pytest.raises(NixlFailed, match="calls itself otherwise"):
        agent.meet("another", other.told())
    assert not agent._met
    assert removed == [other.name]
    agent.meet(other.name, other.told())


def test_nixl_that_does_not_work_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "pigeon")
    with pytest.raises(ConfigError, match=r"transfer_engine nixl does not work here: nixl.*: NIXL_ERR"):
        check_transfers(DisaggConfig(role="decode", transfer_engine="nixl"))


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


@pytest.mark.parametrize("statuses", [["no"], ["more"] * 4, [""]], ids=["no", "more and more", "nothing"])
async def test_an_engine_that_does_not_say_that_it_has_them_has_not(statuses: list[str]) -> None:
    """And one that reads for ever holds nothing for ever."""
    overs = Overs()
    with sides(sender=NixlSender(NixlAgent(loopback=True))) as (giver, _):
        giver.expect("r")
        giver.offer(offer(Keys()), overs)
        reader, writer = await hello(giver)
        greeting = await read(reader)
        asked = {"facts": FACTS, "room": "r", "claim": "c", "start": 0, "tokens": TOKENS, "engine_id": ENGINE}
        proof = frames.proof(SECRET, "take", greeting["nonce"], asked)
        await say(writer, {"asked": asked, "nonce": "n", "proof": proof})
        assert (await read(reader))["said"]["status"] == "ready"
        # It is cut off before the last of them.
        with contextlib.suppress(ConnectionError):
            for status in statuses:
                await say(writer, {"status": status})
        # At once, and not when nothing more has come for too long; the next one may ask.
        async with asyncio.timeout(TIMEOUT / 2):
            with contextlib.suppress(ConnectionError):
                await reader.read()
        assert overs.count == 0
        writer.close()


async def test_after_a_transfer_reads_are_looked_for_seldom() -> None:
    sender, receiver = NixlSender(NixlAgent(loopback=True)), NixlReceiver(NixlAgent(loopback=True))
    with sides(sender=sender, receiver=receiver) as (giver, taker):
        giver.expect("r")
        giver.offer(offer(Keys()), Overs())
        await taker.take(giver.address, wanted(), room()[1])
        looks = list[int]()
        sender._agent.progress = lambda: looks.append(1)  # type: ignore[method-assign]
        await asyncio.sleep(0.5)
        assert 0 < len(looks) < 50, "each half a millisecond it would be a thousand"


def test_memory_is_registered_once() -> None:
    agent, registered = NixlAgent(loopback=True), list[object]()
    register = agent._agent.register_memory
    agent._agent.register_memory = lambda *given, **more: (registered.append(given), register(*given, **more))
    space, parts = room()
    for _ in range(3):
        assert agent.lend(parts)[:, 1].sum() == space.size
    assert len(registered) == len(parts), "each part is an array of its own here"
