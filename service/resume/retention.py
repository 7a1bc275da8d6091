"""The streams that are kept: who owns which, for how long, and what gives way when there are too many.

Two bounds in bytes, of one tenant and of all together, hold at every moment, and what waits unread in the engine counts
as what was told does. Past one of them the oldest stream goes that is over and has no reader. Then the stream with most
gives way: it loses the older half of its history or, where more is unread than was told, ends as one of a slow
reader. A new stream is refused when what is left is only what streams take without any of that. The tenant that has
most gives way, so one cannot push another out.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import cast

from core import buggify
from core.engine.api import CountedStream
from core.errors import DuplicateRequest, InvalidRequest, Overloaded
from core.types.io import GenerateRequest
from core.types.plain import to_plain
from service.engine.slot import EngineSlot
from service.errors import ResumeOff, StreamEvicted, StreamExpired, StreamNotFound
from service.limits.hold import Hold
from service.resume.history import History
from service.resume.kept import KeptStream, Reader
from service.wire.position import Position

STREAM_BYTES = 8192
"""What a kept stream of one output takes before it has told anything."""
OUTPUT_BYTES = 3072
"""What each further output takes."""

MAX_REMEMBERED = 4096
"""Ids of streams that are gone, so that a client that attaches too late is told why."""

FULL = "RESUME_BYTES"

_GONE = {
    StreamEvicted: "the stream gave way to others; send the request again",
    StreamExpired: "nobody attached in time, so the stream was ended; send the request again",
}


class _Share:
    """What one tenant's streams take."""

    def __init__(self) -> None:
        self.bytes = 0
        self.streams: dict[str, KeptStream] = {}
        # Those that are over and have no reader, the longest left first.
        self.idle: OrderedDict[str, KeptStream] = OrderedDict()


class Retention:
    """Opens streams that are kept `seconds` (0: none are), within `total` bytes and `each` of one tenant.

    Event-loop thread of the engine's process only. `on_gone` is told how a stream or a part of one went.
    """

    def __init__(
        self,
        slot: EngineSlot,
        seconds: float,
        total: int,
        each: int,
        on_gone: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._slot, self._seconds, self._total, self._each, self._on_gone = slot, seconds, total, each, on_gone
        self._kept: dict[str, KeptStream] = {}
        self._shares: dict[str | None, _Share] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._opening: dict[str, asyncio.Event] = {}
        self._gone: OrderedDict[str, type[StreamNotFound]] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    async def open(self, asked: GenerateRequest, tenant: str | None, hold: Hold) -> Reader:
        """The stream of a new request, or of the same one sent before, from its start.

        A new one takes `hold` over, and releases it when the engine is done with the request, whatever becomes of its
        readers. Raises DuplicateRequest, Overloaded, ResumeOff, and what `Engine.generate` does.
        """
        if not self._seconds:
            raise ResumeOff("this server keeps no streams")
        while (other := self._opening.get(asked.request_id)) is not None:
            await other.wait()
        digest = _digest(asked)
        kept = self._kept.get(asked.request_id)
        if kept is None:
            kept = await self._begin(asked, tenant, digest, hold)
        elif kept.digest != digest:
            raise DuplicateRequest("a stream that is kept for Attach has this request_id")
        return await kept.attach([Position() for _ in range(len(kept.history))])

    async def attach(self, request_id: str, positions: dict[int, Position]) -> Reader:
        """Everything after `positions` by output; one that is not named: from its start.

        Raises ResumeOff, StreamNotFound, StreamTakenOver, PositionTooOld, PositionAhead, InvalidRequest.
        """
        if not self._seconds:
            raise ResumeOff("this server keeps no streams")
        while (other := self._opening.get(request_id)) is not None:
            await other.wait()
        kept = self._kept.get(request_id)
        if kept is None:
            why = self._gone.get(request_id)
            if why is None:
                raise StreamNotFound("no stream of this id is kept here for this caller; send the request again")
            raise why(_GONE[why])
        if any(index >= len(kept.history) for index in positions):
            raise InvalidRequest.of("positions", f"the request has {len(kept.history)} outputs")
        return await kept.attach([positions.get(index, Position()) for index in range(len(kept.history))])

    def grown(self, kept: KeptStream, by: int) -> None:
        """See `Keeper`."""
        if not kept.closed:
            self._count(kept.tenant, by)
            if by > 0:
                self._shrink_to(kept.tenant, 0)

    def joined(self, kept: KeptStream) -> None:
        """See `Keeper`."""
        self._timers.pop(kept.request_id).cancel()
        self._shares[kept.tenant].idle.pop(kept.request_id, None)

    def left(self, kept: KeptStream) -> None:
        """See `Keeper`."""
        if kept.closed:
            return
        self._wait(kept)
        self.over(kept)

    def over(self, kept: KeptStream) -> None:
        """See `Keeper`."""
        if kept.over and kept.reader is None and kept.request_id in self._kept:
            self._shares[kept.tenant].idle[kept.request_id] = kept

    async def _begin(self, asked: GenerateRequest, tenant: str | None, digest: bytes, hold: Hold) -> KeptStream:
        opened = self._opening[asked.request_id] = asyncio.Event()
        try:
            taken = _empty_bytes(asked.sampling.n)
            self._reserve(tenant, taken)
            try:
                await buggify.pause("reserved")
                stream = cast(CountedStream, await self._slot.require().generate(asked))
            except BaseException:
                self._count(tenant, -taken)
                raise
        finally:
            del self._opening[asked.request_id]
            opened.set()
        self._gone.pop(stream.request_id, None)
        history = History(asked.sampling.n, asked.want_text)
        kept = KeptStream(
            stream, history, tenant=tenant, digest=digest, want_text=asked.want_text, hold=hold.move(), keeper=self
        )
        self._kept[kept.request_id] = self._shares[tenant].streams[kept.request_id] = kept
        self._wait(kept)
        self.over(kept)
        return kept

    def _reserve(self, tenant: str | None, room: int) -> None:
        """Take what one more stream of the tenant takes; raises Overloaded."""
        self._shrink_to(tenant, room)
        share = self._shares.get(tenant)
        mine = 0 if share is None else share.bytes
        if mine + room > self._each or self.bytes + room > self._total:
            raise Overloaded("too many streams are kept for Attach", reason=FULL, retry_after=self._seconds)
        self._count(tenant, room)

    def _shrink_to(self, tenant: str | None, room: int) -> None:
        """Have `room` bytes within both bounds, as far as there is something to give up."""
        share = self._shares.get(tenant)
        while share is not None and share.bytes + room > self._each and self._shrink(share):
            pass
        while self.bytes + room > self._total:
            # The tenant that has most gives way, so that none can push out another that has less.
            largest_first = sorted(self._shares.values(), key=lambda each: -each.bytes)
            if not any(self._shrink(each) for each in largest_first):
                return

    def _shrink(self, share: _Share) -> bool:
        """Have the share take less; whether it does."""
        if share.idle:
            self._drop(next(iter(share.idle.values())), StreamEvicted)
            return True
        largest = max(share.streams.values(), key=lambda kept: kept.size, default=None)
        if largest is None or not largest.size:
            return False
        self._on_gone("stalled" if largest.stalled else "trimmed")
        largest.give_way()
        return True

    def _wait(self, kept: KeptStream) -> None:
        """End the stream unless a client attaches in time."""
        loop = asyncio.get_running_loop()
        self._timers[kept.request_id] = loop.call_later(self._seconds, self._drop, kept, StreamExpired)

    def _drop(self, kept: KeptStream, why: type[StreamNotFound]) -> None:
        self._timers.pop(kept.request_id).cancel()
        del self._kept[kept.request_id]
        share = self._shares[kept.tenant]
        del share.streams[kept.request_id]
        share.idle.pop(kept.request_id, None)
        self._count(kept.tenant, -_empty_bytes(len(kept.history)) - kept.size)
        self._gone[kept.request_id] = why
        while len(self._gone) > MAX_REMEMBERED:
            self._gone.popitem(last=False)
        self._on_gone("evicted" if why is StreamEvicted else "expired")
        kept.closed = True
        closing = asyncio.ensure_future(kept.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _count(self, tenant: str | None, by: int) -> None:
        share = self._shares.setdefault(tenant, _Share())
        self.bytes += by
        share.bytes += by
        assert share.bytes >= 0, "nothing is given back twice"
        if not share.bytes:
            del self._shares[tenant]


def _empty_bytes(outputs: int) -> int:
    """What a stream takes before it has told anything."""
    return STREAM_BYTES + (outputs - 1) * OUTPUT_BYTES


def _digest(asked: GenerateRequest) -> bytes:
    """Equal for the same request sent again: its deadline and its trace move, and nothing else."""
    # Ids apart: a million of them as JSON would hold up the loop for as long as a step takes.
    plain = to_plain(dataclasses.replace(asked, deadline=None, token_ids=None, trace_id="", tenant="", weight=1.0))
    ids = b"" if asked.token_ids is None else array("q", asked.token_ids).tobytes()
    whole = hashlib.sha256(json.dumps(plain, sort_keys=True).encode("utf-8", "surrogatepass"))
    whole.update(ids)
    return whole.digest()
