"""One kept stream: the engine's stream, the history of what was read from it, and the one reader that it has now.

Tokens that no reader has taken stay in the engine's stream. They are merged and bounded there as for any reader. Only
what was read is history. So a stream without a reader costs the loop nothing until the engine has made its last token,
or until the unread bytes reach their bound and the stream ends. The size of a kept stream is one sum: history and
unread bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Protocol

from core import buggify
from core.engine.api import CountedStream
from core.engine.streams.unread import UnreadHolder
from core.errors import SlipstreamError
from core.types.io import Delta, Finished, OutputEvent, Started
from service.errors import StreamExpired, StreamTakenOver
from service.limits.hold import Hold
from service.resume.history import History
from service.wire.position import Position

STUCK_SECONDS = 0.5
"""Seconds that a reader may go on writing to a client that does not read, once another call wants its stream."""


class Keeper(Protocol):
    """The owner of kept streams (`Retention`): each stream calls it when its size, its reader or its state changes."""

    def grown(self, kept: KeptStream, by: int) -> None:
        """The size of `kept`, history and unread bytes together, grew by `by` bytes; `by` is negative if it shrank."""

    def joined(self, kept: KeptStream) -> None:
        """`kept` has got a reader."""

    def left(self, kept: KeptStream) -> None:
        """The reader of `kept` has left."""

    def over(self, kept: KeptStream) -> None:
        """The engine has made the last token of `kept`."""


class KeptStream:
    """A stream of `tenant` that outlives the call that opened it. Event-loop thread only.

    `over`: the engine has made the last token, read or not. `closed`: the stream was ended for good. `digest` is equal
    for the same request sent again. `hold` is released when the engine is done with the request.
    """

    def __init__(
        self,
        stream: CountedStream,
        history: History,
        *,
        tenant: str | None,
        digest: bytes,
        want_text: bool,
        hold: Hold,
        keeper: Keeper,
    ) -> None:
        self.request_id = stream.request_id
        self.history = history
        self.tenant, self.digest, self.want_text = tenant, digest, want_text
        self.reader: Reader | None = None
        self.over = self.closed = False
        self._stream, self._hold, self._keeper = stream, hold, keeper
        self._error: SlipstreamError | None = None
        self._claims = 0
        self.unread = 0
        """Bytes that wait unread in the engine's stream."""
        stream.count_unread(self)
        stream.watch(self._changed)

    @property
    def size(self) -> int:
        """Bytes of history and unread bytes together."""
        return self.history.size + self.unread

    def take(self, _holder: UnreadHolder, count: int) -> None:
        """`UnreadRoom`: the engine's stream holds `count` more unread bytes."""
        self.unread += count
        self._keeper.grown(self, count)

    def give_back(self, _holder: UnreadHolder, count: int) -> None:
        """`UnreadRoom`: the engine's stream holds `count` fewer unread bytes."""
        self.unread -= count
        self._keeper.grown(self, -count)

    @property
    def stalled(self) -> bool:
        """Whether more bytes are unread than were read."""
        return self.unread > self.history.size

    def give_way(self) -> None:
        """Free memory. If more bytes are unread than read, the stream ends with SlowConsumer and they are dropped.

        Otherwise the older half of the history is dropped, and the stream goes on.
        """
        if self.stalled:
            self._stream.give_way()
        else:
            self._keeper.grown(self, -self.history.trim())

    @property
    def exhausted(self) -> bool:
        """Whether the engine's stream has ended and everything in it was read, so that all events are history."""
        return self._stream.ended

    async def attach(self, places: list[Position]) -> Reader:
        """A reader of everything after `places`; an earlier reader ends with StreamTakenOver.

        Raises StreamTakenOver if another call attaches while this one waits, StreamExpired if the stream was closed,
        and PositionTooOld, PositionAhead or InvalidRequest for `places` from which the rest cannot be sent.
        """
        # First, so that a call with a bad position does not take the stream from the reader that has it.
        self.history.refuse(places)
        self._claims += 1
        claim = self._claims
        while self.reader is not None:
            # Two tasks that wait for one stream's next event would lose its wake-ups.
            self.reader.take_over()
            await self.reader.gone.wait()
            if claim != self._claims:
                raise taken_over()
        if self.closed:
            raise StreamExpired("the stream was ended; send the request again")
        # Again, since history may have been trimmed during the wait.
        self.history.refuse(places)
        self.reader = Reader(self, places)
        self._keeper.joined(self)
        return self.reader

    async def next(self) -> OutputEvent | None:
        """Wait for the engine's next event and add it to the history; None after the last event.

        Raises the error that ended the stream, on every call from then on.
        """
        if self._error is not None:
            raise self._error
        try:
            return self._took(await self._stream.__anext__())
        except StopAsyncIteration:
            return None
        except SlipstreamError as error:
            self._error = error
            raise

    def poll(self) -> OutputEvent | None:
        """As `next` without waiting: None also while there is no event yet."""
        if self._error is not None:
            raise self._error
        try:
            event = self._stream.poll()
        except SlipstreamError as error:
            self._error = error
            raise
        return None if event is None else self._took(event)

    def leave(self) -> None:
        """The reader has gone."""
        self.reader = None
        # Room is made by halving a history, but by ending a stream whose bytes are mostly unread: so none stay unread.
        if self.over:
            self._read_rest()
        self._keeper.left(self)

    async def close(self) -> None:
        """End the stream for good, and abort outputs that still run."""
        self.closed = True
        await self._stream.aclose()
        await buggify.pause("closed")
        if not self.over:
            # Tokens that were made and never read are gone, their number unknown: the tenant pays the whole charge.
            self._hold.use_up()
        self._hold.release()

    def _took(self, event: OutputEvent) -> OutputEvent:
        if type(event) is Delta:
            self._hold.use(len(event.token_ids))
        elif isinstance(event, Started):
            self._hold.saw_prompt(event.prompt_tokens)
        before = self.history.size
        event = self.history.add(event)
        if self.history.size != before:
            self._keeper.grown(self, self.history.size - before)
        return event

    def _changed(self) -> None:
        if not self.over and self._stream.open_outputs == 0:
            self.over = True
            # Now and not when the stream is read: the tenant's place is for the engine's work, which is done.
            self._hold.release()
            if self.reader is None:
                self._read_rest()
            self._keeper.over(self)
        if self.reader is not None:
            self.reader.notify()

    def _read_rest(self) -> None:
        """Move all unread events of a stream that is over to the history, whose size is bounded."""
        try:
            while self.poll() is not None:
                pass
        except SlipstreamError:
            pass  # `poll` keeps the error for the next reader


class Reader:
    """The `PolledStream` of the call that reads a kept stream now. `aclose` detaches and does not end the stream.

    There are two ways to read: (1) iterate, inside `async with`, so that a call that takes the stream over interrupts
    the wait with StreamTakenOver; (2) `watch` and `poll`.
    """

    def __init__(self, kept: KeptStream, places: list[Position]) -> None:
        self.request_id, self.want_text = kept.request_id, kept.want_text
        self.expected = sum(not place.finished for place in places)
        """Number of `Finished` events that this reader gets."""
        self.gone = asyncio.Event()
        self._kept, self._places = kept, places
        # `_begun`: Started was sent. `_caught_up`: all of the history was; from now on events come from the engine.
        self._begun = self._caught_up = False
        self._taken = self._waiting = False
        self._ready: Callable[[], None] | None = None
        self._bound: asyncio.Timeout | None = None

    @property
    def open_outputs(self) -> int:
        """Outputs whose `Finished` event this reader has not got yet."""
        return sum(not place.finished for place in self._places)

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to read here."""
        return self.gone.is_set()

    def __aiter__(self) -> AsyncIterator[OutputEvent]:
        return self

    async def __anext__(self) -> OutputEvent:
        event = self._told()
        if event is None:
            self._waiting = True
            try:
                event = await self._kept.next()
            finally:
                self._waiting = False
        if event is None:
            self._leave()
            raise StopAsyncIteration
        return self._passed(event)

    def poll(self) -> OutputEvent | None:
        """The next event if there is one now, else None. Raises the stream's error or StreamTakenOver, once."""
        if self.ended:
            return None
        try:
            event = self._told() or self._kept.poll()
        except BaseException:
            self._leave()
            raise
        if event is not None:
            return self._passed(event)
        if self._kept.exhausted:
            self._leave()
        return None

    def watch(self, ready: Callable[[], None]) -> None:
        """Call `ready` now, and again whenever `poll` may have an event."""
        self._ready = ready
        ready()

    def notify(self) -> None:
        """Call `ready`: the engine's stream has changed, or another call takes this stream over."""
        if self._ready is not None:
            self._ready()

    def take_over(self) -> None:
        """Another call wants the stream: this reader ends with StreamTakenOver."""
        if not self._taken:
            self._taken = True
            self._interrupt()
            self.notify()

    def _interrupt(self) -> None:
        """Make the iterating task leave: at once if it waits here, else at its next event or after STUCK_SECONDS.

        Else not at once: it may be sending headers, and a call whose headers are cut off hangs without a status.
        """
        if self._bound is not None:
            now = asyncio.get_running_loop().time()
            self._bound.reschedule(now if self._waiting else now + STUCK_SECONDS)

    async def __aenter__(self) -> Reader:
        bound = await asyncio.timeout(None).__aenter__()
        self._bound = bound
        # `take_over` may have been called before there was a bound to reschedule.
        if self._taken:
            self._interrupt()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._bound is not None, "entered"
        bound, self._bound = self._bound, None
        try:
            await bound.__aexit__(kind, error, trace)
        except TimeoutError:
            raise taken_over() from None

    async def aclose(self) -> None:
        """Detach from the stream. Idempotent."""
        self._leave()

    def _told(self) -> OutputEvent | None:
        """The next event that the history has for this reader; None when all of it was sent.

        Raises StreamTakenOver, and PositionTooOld where the history was trimmed faster than this reader reads.
        """
        if self._taken:
            raise taken_over()
        if not self._begun and self._kept.history.started is not None:
            return self._kept.history.started
        if self._caught_up:
            return None
        event = self._kept.history.after(self._places)
        self._caught_up = event is None
        return event

    def _passed(self, event: OutputEvent) -> OutputEvent:
        if isinstance(event, Started):
            self._begun = True
        elif isinstance(event, Finished):
            self._places[event.index].finished = True
        return event

    def _leave(self) -> None:
        if not self.gone.is_set():
            self.gone.set()
            self._kept.leave()


def taken_over() -> StreamTakenOver:
    """The error that the earlier of two readers ends with."""
    return StreamTakenOver("another call reads this stream now")
