"""The kept streams: which tenant owns each, how long it is kept, and which one gives way when they take too much.

Two bounds in bytes hold at every moment: one for each tenant, one for all tenants together. History and unread bytes
both count. When a bound is passed, memory is freed in this order:
(1) An idle stream is dropped: one that is over and has no reader. The one that was left first goes first.
(2) Without an idle stream the largest stream gives way. It loses the older half of its history. If more of it is unread
    than was read, it ends with SlowConsumer instead.
(3) A new stream is refused with Overloaded when only the fixed bytes of the open streams are left.
Past the bound for all, the tenant that takes most gives way, so one tenant cannot push out another that takes less.
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
from service.engine.handle import EngineHandle
from service.errors import ResumeOff, StreamEvicted, StreamExpired, StreamNotFound, StreamReplaced
from service.limits.hold import Hold
from service.resume.history import History
from service.resume.kept import KeptStream, Reader
from service.wire.position import Position

STREAM_BYTES = 8192
"""Bytes that a kept stream of one output takes before its first event."""
OUTPUT_BYTES = 3072
"""Bytes that each further output takes."""

MAX_REMEMBERED = 4096
"""Number of ids remembered of streams that were dropped, so that a client that attaches too late is told why."""

FULL = "RESUME_BYTES"

_GONE = {
    StreamEvicted: "the stream gave way to others; send the request again",
    StreamExpired: "nobody attached in time, so the stream was ended; send the request again",
}

_REPLACED = "incarnation: the stream of this one is gone, and another has its request_id now; send the request again"
_AMBIGUOUS = (
    "incarnation: several streams had this request_id lately; name the one that `started` told, "
    "or send the request again"
)


class _Share:
    """The kept streams of one tenant, and the bytes that they take."""

    def __init__(self) -> None:
        self.bytes = 0
        self.streams: dict[str, KeptStream] = {}
        # Streams that are over and have no reader, the longest idle first.
        self.idle: OrderedDict[str, KeptStream] = OrderedDict()


class Retention:
    """Opens streams, and keeps each one `seconds` without a reader (0: no stream is kept).

    All streams take at most `total` bytes, those of one tenant at most `each` bytes. `on_gone` is called with "expired"
    or "evicted" for a stream that is dropped, with "trimmed" for a history that loses its older half, and with
    "stalled" for a stream that ends because it was not read. Event-loop thread of the engine's process only.
    """

    def __init__(
        self,
        handle: EngineHandle,
        seconds: float,
        total: int,
        each: int,
        on_gone: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._handle, self._seconds, self._total, self._each, self._on_gone = handle, seconds, total, each, on_gone
        self._kept: dict[str, KeptStream] = {}
        self._shares: dict[str | None, _Share] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._opening: dict[str, asyncio.Event] = {}
        self._gone: OrderedDict[str, type[StreamNotFound]] = OrderedDict()
        # Ids of kept streams that an earlier stream, remembered in `_gone` until then, had before them.
        self._reused: set[str] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    async def open(self, asked: GenerateRequest, tenant: str | None, hold: Hold) -> Reader:
        """Open the stream of a new request, or find that of the same request sent before; read it from its start.

        A new stream takes `hold` over. It releases it when the engine is done with the request, with or without a
        reader. Raises DuplicateRequest if another request is kept under this id, Overloaded without room, ResumeOff,
        what `Engine.generate` raises, and for a stream that is there already what `KeptStream.attach` raises.
        """
        if not self._seconds:
            raise ResumeOff("this server keeps no streams")
        digest = await asyncio.to_thread(_digest, asked) if asked.has_media else _digest(asked)
        # One task at a time opens an id: a second one would not see the stream that the first has not stored yet.
        while (other := self._opening.get(asked.request_id)) is not None:
            await other.wait()
        kept = self._kept.get(asked.request_id)
        if kept is None:
            kept = await self._begin(asked, tenant, digest, hold)
        elif kept.digest != digest:
            raise DuplicateRequest("a stream that is kept for Attach has this request_id")
        return await kept.attach([Position() for _ in range(len(kept.history))])

    async def attach(self, request_id: str, positions: dict[int, Position], incarnation: str) -> Reader:
        """Read a kept stream, each output from its entry in `positions`; from the start without an entry.

        `incarnation` is that of the stream's `Started`. "" is the one stream of the id, of a reader that was told none.
        Raises ResumeOff, StreamNotFound (StreamExpired and StreamEvicted where the reason is known, StreamReplaced
        where the id has another stream by now, or may have), StreamTakenOver, PositionTooOld, PositionAhead,
        InvalidRequest.
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
        if not incarnation and request_id in self._reused:
            raise StreamReplaced(_AMBIGUOUS)
        if incarnation and incarnation != kept.history.incarnation:
            raise StreamReplaced(_REPLACED)
        if any(index >= len(kept.history) for index in positions):
            raise InvalidRequest.of("positions", f"the request has {len(kept.history)} outputs")
        return await kept.attach([positions.get(index, Position()) for index in range(len(kept.history))])

    def grown(self, kept: KeptStream, by: int) -> None:
        """`Keeper`: count `by` bytes more of `kept`, and make room if a bound is passed."""
        # A closed stream was subtracted as a whole in `_drop`; what it gives back while it closes must not count again.
        if not kept.closed:
            self._count(kept.tenant, by)
            if by > 0:
                self._shrink_to(kept.tenant, 0)

    def joined(self, kept: KeptStream) -> None:
        """`Keeper`: `kept` has a reader, so it does not expire and is not idle."""
        self._timers.pop(kept.request_id).cancel()
        self._shares[kept.tenant].idle.pop(kept.request_id, None)

    def left(self, kept: KeptStream) -> None:
        """`Keeper`: `kept` has no reader any more, so it expires in time and is idle if it is over."""
        if kept.closed:
            return
        self._wait(kept)
        self.over(kept)

    def over(self, kept: KeptStream) -> None:
        """`Keeper`: `kept` becomes idle if it is over and has no reader."""
        # The stream can be over within its constructor, before `_begin` has stored it: `_begin` calls this again.
        if kept.over and kept.reader is None and kept.request_id in self._kept:
            self._shares[kept.tenant].idle[kept.request_id] = kept

    async def _begin(self, asked: GenerateRequest, tenant: str | None, digest: bytes, hold: Hold) -> KeptStream:
        opened = self._opening[asked.request_id] = asyncio.Event()
        try:
            taken = _empty_bytes(asked.sampling.n)
            # Before the engine is asked: without room the request must not run at all.
            self._reserve(tenant, taken)
            try:
                await buggify.pause("reserved")
                stream = cast(CountedStream, await self._handle.require().generate(asked))
            except BaseException:
                self._count(tenant, -taken)
                raise
        finally:
            del self._opening[asked.request_id]
            opened.set()
        if self._gone.pop(stream.request_id, None) is not None:
            self._reused.add(stream.request_id)
        history = History(asked.sampling.n, asked.want_text)
        kept = KeptStream(
            stream, history, tenant=tenant, digest=digest, want_text=asked.want_text, hold=hold.move(), keeper=self
        )
        self._kept[kept.request_id] = self._shares[tenant].streams[kept.request_id] = kept
        self._wait(kept)
        self.over(kept)
        return kept

    def _reserve(self, tenant: str | None, room: int) -> None:
        """Count `room` bytes for one more stream of the tenant. Raises Overloaded if they cannot be freed."""
        self._shrink_to(tenant, room)
        share = self._shares.get(tenant)
        mine = 0 if share is None else share.bytes
        if mine + room > self._each or self.bytes + room > self._total:
            raise Overloaded("too many streams are kept for Attach", reason=FULL, retry_after=self._seconds)
        self._count(tenant, room)

    def _shrink_to(self, tenant: str | None, room: int) -> None:
        """Free memory until `room` more bytes are within both bounds, or nothing is left to free."""
        share = self._shares.get(tenant)
        while share is not None and share.bytes + room > self._each and self._shrink(share):
            pass
        while self.bytes + room > self._total:
            # The tenant that has most gives way, so that none can push out another that has less.
            largest_first = sorted(self._shares.values(), key=lambda each: -each.bytes)
            if not any(self._shrink(each) for each in largest_first):
                return

    def _shrink(self, share: _Share) -> bool:
        """Free some memory of `share`: drop its longest idle stream, else shrink its largest. False if it has none."""
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
        """Drop the stream unless a client attaches within the time that streams are kept."""
        loop = asyncio.get_running_loop()
        self._timers[kept.request_id] = loop.call_later(self._seconds, self._drop, kept, StreamExpired)

    def _drop(self, kept: KeptStream, why: type[StreamNotFound]) -> None:
        self._timers.pop(kept.request_id).cancel()
        del self._kept[kept.request_id]
        self._reused.discard(kept.request_id)
        share = self._shares[kept.tenant]
        del share.streams[kept.request_id]
        share.idle.pop(kept.request_id, None)
        self._count(kept.tenant, -_empty_bytes(len(kept.history)) - kept.size)
        self._gone[kept.request_id] = why
        while len(self._gone) > MAX_REMEMBERED:
            self._gone.popitem(last=False)
        self._on_gone("evicted" if why is StreamEvicted else "expired")
        # Now, since `close` runs in a later turn of the loop: an attach that waits there must find the stream closed.
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
    """Bytes that a stream takes before its first event."""
    return STREAM_BYTES + (outputs - 1) * OUTPUT_BYTES


def _digest(asked: GenerateRequest) -> bytes:
    """A digest that is equal for the same request sent again: only its deadline and its trace may differ.

    Tenant and weight are left out: they come from the server, and the id is already the tenant's.
    """
    # Ids apart: a million of them as JSON would hold up the loop for as long as a step takes. Of images and sounds it
    # has digests: as base64 they would hold the interpreter, and with it the loop, from whatever thread.
    left = dataclasses.replace(asked, deadline=None, token_ids=None, trace_id="", tenant="", weight=1.0)
    plain = to_plain(left, lambda data: hashlib.sha256(data).hexdigest())
    ids = b"" if asked.token_ids is None else array("q", asked.token_ids).tobytes()
    whole = hashlib.sha256(json.dumps(plain, sort_keys=True).encode("utf-8", "surrogatepass"))
    whole.update(ids)
    return whole.digest()
