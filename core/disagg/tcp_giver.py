"""Gives keys away: a peer connects over TCP, says what it wants, and gets the bytes once they are there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from core.disagg import frames
from core.disagg.carrier import Sender, StreamSender
from core.disagg.frames import BadFrame, Message
from core.disagg.interface import Facts, Offer, Wanted
from core.disagg.line import Line
from core.disagg.rooms import Room, Rooms
from core.disagg.transfer_thread import TransferThread
from core.errors import StartupError

log = logging.getLogger(__name__)

HELLO_SECONDS: Final = 5.0
"""Within which a peer says what it wants: strangers hold no connection for longer."""
WAIT_SECONDS: Final = 1.0
"""Between two words that a prompt is still expected, for peers of less patience."""
MOST_NAMES, MOST_OF_A_NAME = 32, 64
"""Names of what differs that a peer is told, and characters of each."""
MOST_PEERS: Final = 1024
"""Connections at once; more wait to be accepted."""


class TcpGiver:
    """The `Giver` to which peers connect over TCP."""

    def __init__(
        self,
        bound: tuple[str, int],
        advertise: str | None,
        secret: bytes,
        engine_id: str,
        facts: Callable[[], Facts],
        timeout: float,
        sender: Sender | None = None,
    ) -> None:
        """`bound`: where to listen. `facts`: asked on another thread. `sender`: of bytes; over TCP too without one.

        Raises StartupError for an address in use.
        """
        self._listener = listener(bound)
        self._listener.setblocking(False)
        self.address = (advertise or bound[0], int(self._listener.getsockname()[1]))
        self._secret, self._engine_id, self._facts, self._timeout = secret, engine_id, facts, timeout
        self._sender = sender or StreamSender()
        self._thread = TransferThread("slipstream-give")
        self._tasks: set[asyncio.Task[None]] = set()
        self._rooms: Rooms
        self._thread.call(self._begin)

    def expect(self, room: str) -> None:
        """See `Giver`."""
        self._thread.call(lambda: self._rooms.expect(room))

    def offer(self, offer: Offer, over: Callable[[bool], None]) -> None:
        """See `Giver`."""
        self._thread.call(lambda: self._rooms.offer(offer, over))

    def withdraw(self, room: str) -> None:
        """See `Giver`."""
        self._thread.call(lambda: self._rooms.withdraw(room))

    def retire(self) -> None:
        """See `Giver`."""
        self._thread.call(lambda: self._rooms.retire())

    def close(self) -> None:
        """See `Giver`."""
        self._thread.close()
        self._listener.close()
        # Nothing runs there any more.
        self._rooms.close()
        self._sender.close()

    def _begin(self) -> None:
        self._rooms = Rooms(self._timeout)
        self._keep(self._accept())

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while len(self._tasks) > MOST_PEERS:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            try:
                peer, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                # No descriptors, say: those that are open end within their timeouts.
                log.warning("no engine can fetch keys for now: %s", error)
                await asyncio.sleep(HELLO_SECONDS / 10)
                continue
            peer.setblocking(False)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Left open by a task that is cancelled before its first step.
            self._keep(self._serve(peer)).add_done_callback(partial(_closed, peer))

    async def _serve(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError, EOFError, TimeoutError, BadFrame):
            drawn = frames.nonce()
            async with asyncio.timeout(min(HELLO_SECONDS, self._timeout)):
                await frames.send(peer, {"slipstream": frames.VERSION, "nonce": drawn})
                hello = await frames.receive(peer)
            asked, back = hello.get("asked"), hello.get("nonce")
            if not (isinstance(asked, dict) and isinstance(back, str)):
                raise BadFrame("nothing asked")
            line = Line(peer, self._secret, back, self._timeout)
            if not frames.proves(hello.get("proof"), self._secret, "take", drawn, asked):
                await line.say({"status": "unauthenticated"})
                return
            await self._answer(line, asked)

    async def _answer(self, line: Line, asked: Message) -> None:
        if differ := self._differ(asked):
            await line.say({"status": "mismatch", "differ": differ})
            return
        wanted = _wanted(asked)
        room = await self._room(line, wanted)
        # Asked again: it may have waited while weights changed here.
        if differ := self._differ(asked):
            await line.say({"status": "mismatch", "differ": differ})
            return
        if room is None or room.offer is None:
            await line.say({"status": "gone"})
            return
        self._rooms.begin(wanted.room, room)
        delivered = False
        try:
            await self._give(line, wanted, room.offer)
            delivered = True
        finally:
            self._rooms.sent(wanted.room, room, delivered=delivered)

    def _differ(self, asked: Message) -> list[str]:
        """Names of what the peer that asks has otherwise than this engine has it now."""
        facts, theirs = dict(self._facts()), asked.get("facts")
        known = theirs if isinstance(theirs, dict) else {}
        differ = (name for name in facts.keys() | known.keys() if known.get(name, self) != facts.get(name, self))
        # A peer may have names of its own, of any length; those that are told fit into a message.
        return [name[:MOST_OF_A_NAME] for name in sorted(differ)[:MOST_NAMES]]

    async def _room(self, line: Line, wanted: Wanted) -> Room | None:
        """The room once what is wanted is offered there; None if that is not going to be."""
        if wanted.engine_id not in ("", self._engine_id) or self._rooms.is_gone(wanted.room):
            return None
        ends = asyncio.get_running_loop().time() + self._timeout
        while True:
            room, arrived = self._rooms.find(wanted.room), self._rooms.arrived
            if room is None:
                # Asked before this engine was. One that it was told of by this engine itself is over.
                left = 0.0 if wanted.engine_id else ends - asyncio.get_running_loop().time()
                if left <= 0 or self._rooms.is_gone(wanted.room):
                    return None
                news = arrived
            elif room.offer is None or room.sending is not None:
                # A prompt that waits or is computed has no end that is known here: the peer hears that it goes on.
                left, news = self._timeout, room.changed
                news.clear()
            else:
                fits = room.offer.claim == wanted.claim and room.offer.tokens == wanted.tokens
                return room if fits and 0 <= wanted.start <= wanted.tokens else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, self._timeout / 3, WAIT_SECONDS)):
                    await news.wait()
            await line.say({"status": "wait"})

    async def _give(self, line: Line, wanted: Wanted, offer: Offer) -> None:
        parts = offer.parts(wanted.start)
        ready = {"status": "ready", "cached": offer.cached_tokens, "bytes": sum(map(len, parts))}
        await self._sender.send(line, ready, parts)


def listener(bound: tuple[str, int]) -> socket.socket:
    """A socket that listens there. Raises StartupError for an address that is in use, or none of this machine."""
    try:
        family = socket.AF_INET6 if ":" in bound[0] else socket.AF_INET
        both = bound[0] == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(bound, family=family, backlog=MOST_PEERS, dualstack_ipv6=both)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise StartupError(f"transfer_host {bound[0]}, transfer_port {bound[1]}: {why}") from None


def _wanted(asked: Message) -> Wanted:
    """Raises BadFrame."""
    names, numbers = ("room", "claim", "engine_id"), ("start", "tokens")
    if not all(isinstance(asked.get(name), str) for name in names):
        raise BadFrame("no room")
    if not all(type(asked.get(name)) is int for name in numbers):
        raise BadFrame("no tokens")
    return Wanted(asked["room"], asked["claim"], asked["start"], asked["tokens"], asked["engine_id"])


def _closed(peer: socket.socket, _: asyncio.Task[None]) -> None:
    peer.close()
