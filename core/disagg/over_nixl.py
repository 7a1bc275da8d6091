"""Bytes of keys by NIXL: the engine that asks reads them out of the memory of the one that has prefilled.

Both talk over their connection as ever; NIXL is told nothing that was not proved there. What is read is taken only when
the other engine has then said that it kept it meanwhile: one that gave it up would let other keys be read there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from core.disagg.frames import BadFrame, Message
from core.disagg.interface import TransferFailed
from core.disagg.line import Line
from core.disagg.nixl_agent import NixlAgent, NixlFailed, Read, Table

CHUNK: Final = 32 << 20
"""Bytes of a read. The other engine hears of each, so that it knows of one that goes on."""
TOGETHER: Final = 2
"""Reads that are under way at once, so that none waits for the next look."""
LOOK_SECONDS: Final = 0.0005
"""Between two looks. Looking all the time made TCP half as fast, and left no core for the engine."""
SELDOM_SECONDS: Final = 0.05
"""Between two looks at what nothing waits for: reads that were left, here or by another engine."""
MAX_TOLD: Final = 1 << 16
"""Bytes that an agent says of itself: half a kilobyte, and some more for each network card."""
MAX_PARTS: Final = 1 << 18
_ADDRESSES: Final = 16
"""Bytes of a row of a table."""


class NixlSender:
    """The `Sender` by NIXL: it says where the bytes are, and answers reads."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._sending = 0
        self._begins = asyncio.Event()
        self._answering: asyncio.Task[None] | None = None

    async def send(self, line: Line, ready: Message, parts: Sequence[memoryview]) -> None:
        """See `Sender`."""
        where, told = self._agent.lend(parts).tobytes(), self._agent.told()
        digest = hashlib.sha256(told + where).hexdigest()
        at = {"agent": self._agent.name, "told": len(told), "where": len(where), "digest": digest}
        await line.say(ready | {"nixl": at})
        await line.send([memoryview(told), memoryview(where)])
        with self._answers():
            for _ in range(ready["bytes"] // CHUNK + 2):
                if (status := await line.told()) != "more":
                    break
        if status != "got":
            raise BadFrame("no acknowledgement")
        await line.say({"status": "kept"})

    def close(self) -> None:
        """See `Sender`."""
        self._agent.close()

    @contextlib.contextmanager
    def _answers(self) -> Iterator[None]:
        """Answer reads meanwhile, and from now on seldom: an engine that was cut off may have left some."""
        self._sending += 1
        self._begins.set()
        if self._answering is None:
            self._answering = asyncio.get_running_loop().create_task(self._answer())
        try:
            yield
        finally:
            self._sending -= 1

    async def _answer(self) -> None:
        while True:
            # A peer that is gone: its own connection ends.
            with contextlib.suppress(NixlFailed):
                self._agent.progress()
            self._begins.clear()
            if self._sending:
                await asyncio.sleep(LOOK_SECONDS)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SELDOM_SECONDS):
                        await self._begins.wait()


@dataclass(eq=False)
class _Reading:
    """What is being read into `parts`."""

    parts: Sequence[memoryview]
    under_way: deque[Read] = field(default_factory=deque)


class NixlReceiver:
    """The `Receiver` by NIXL: it reads.

    A read cannot be taken back: NIXL lets go of its handle at once, and the bytes come all the same when a peer that
    was frozen goes on. So reads that are left are looked after until they have ended.
    """

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._left: dict[int, _Reading] = {}
        """By identity of the parts, which it keeps: what has failed, or was cancelled, while reads were under way."""

    async def receive(self, line: Line, ready: Message, parts: Sequence[memoryview]) -> None:
        """See `Receiver`."""
        name, told, there = await _source(line, ready)
        here = self._agent.lend(parts)
        if not fit(here, there):
            raise BadFrame("other bytes than were told of")
        self._agent.meet(name, told)
        reading = _Reading(parts)
        try:
            await self._read(line, name, pieces(here, there), reading.under_way)
        except BaseException as error:
            if reading.under_way:
                self._left[id(parts)] = reading
            if isinstance(error, NixlFailed):
                # Met anew the next time: NIXL makes no second connection to an agent that it has lost.
                self._agent.forget(name)
            raise
        await line.tell("got")
        if (await line.said())["status"] != "kept":
            raise TransferFailed("lost", "the keys were given up while they were read")

    def is_quiet(self, parts: Sequence[memoryview]) -> bool:
        """See `Receiver`."""
        return id(parts) not in self._left

    async def quiet(self, parts: Sequence[memoryview]) -> None:
        """See `Receiver`."""
        if (reading := self._left.get(id(parts))) is None:
            return
        for read in reading.under_way:
            with contextlib.suppress(NixlFailed):
                while self._agent.under_way(read):  # noqa: ASYNC110 - NIXL has to be asked
                    await asyncio.sleep(SELDOM_SECONDS)
        del self._left[id(parts)]

    def close(self) -> None:
        """See `Receiver`."""
        self._left.clear()
        self._agent.close()

    async def _read(self, line: Line, name: str, found: Table, under_way: deque[Read]) -> None:
        for chunk in _chunks(found):
            if len(under_way) == TOGETHER:
                await self._landed(line, under_way)
            if (read := self._agent.read(name, chunk)) is not None:
                under_way.append(read)
            else:
                # Over shared memory it is done at once, on this thread, which others wait for as well.
                await line.tell("more")
                await asyncio.sleep(0)
        while under_way:
            await self._landed(line, under_way)

    async def _landed(self, line: Line, under_way: deque[Read]) -> None:
        async with asyncio.timeout(line.timeout):
            while self._agent.under_way(under_way[0]):  # noqa: ASYNC110 - NIXL has to be asked
                await asyncio.sleep(LOOK_SECONDS)
        under_way.popleft()
        await line.tell("more")


async def _source(line: Line, ready: Message) -> tuple[str, bytes, Table]:
    """(name of the agent, what it tells of itself, uint64[n, 2]: where the bytes are). Raises BadFrame."""
    at = ready.get("nixl")
    if not (isinstance(at, dict) and isinstance(at.get("agent"), str)):
        raise BadFrame("an engine without NIXL")
    told, where = (_room(at.get(name), most) for name, most in (("told", MAX_TOLD), ("where", MAX_PARTS * _ADDRESSES)))
    if len(where) % _ADDRESSES:
        raise BadFrame("no table")
    await line.fill([memoryview(told), memoryview(where)])
    if hashlib.sha256(told + where).hexdigest() != at.get("digest"):
        raise BadFrame("not what was proved")
    return at["agent"], bytes(told), np.frombuffer(where, np.uint64).reshape(-1, 2)


def _room(size: Any, most: int) -> bytearray:
    if type(size) is not int or not 0 <= size <= most:
        raise BadFrame("more than an agent has to tell")
    return bytearray(size)


def fit(here: Table, there: Table) -> bool:
    """Whether both have as many bytes. `there` is what a peer says: its sizes may turn round as they are added up."""
    total = here[:, 1].sum()
    return bool((there[:, 1] <= total).all() and there[:, 1].sum() == total)


def pieces(here: Table, there: Table) -> Table:
    """uint64[n, 3]: address here, address there, and bytes, of all that has one place on either side.

    `here` and `there`, uint64[n, 2], have as many bytes. No piece goes over a multiple of CHUNK bytes.
    """
    total = int(here[:, 1].sum())
    assert fit(here, there), "refused"
    ends_here, ends_there = (np.cumsum(each[:, 1], dtype=np.uint64) for each in (here, there))
    ends = np.unique(np.concatenate((ends_here, ends_there, np.arange(CHUNK, total, CHUNK).astype(np.uint64))))
    begins = np.concatenate((np.zeros(1, np.uint64), ends))[:-1]
    places = []
    for parts, part_ends in ((here, ends_here), (there, ends_there)):
        part = np.searchsorted(part_ends, begins, side="right")
        places.append(parts[part, 0] + begins - (part_ends[part] - parts[part, 1]))
    return np.stack((*places, ends - begins), axis=1)


def _chunks(found: Table) -> Iterator[Table]:
    """`found` in runs of at most CHUNK bytes."""
    chunk = (np.cumsum(found[:, 2]) - 1) // CHUNK
    edges = [0, *(np.flatnonzero(np.diff(chunk)) + 1), len(found)]
    for first, last in itertools.pairwise(edges):
        if last > first:
            yield found[first:last]
