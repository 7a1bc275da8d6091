"""One stream that is kept: the engine's stream, what it has told, and the one reader that has it now.

Tokens that no reader has taken stay in the engine's stream, merged and bounded there as for any reader; only what was
read is history. So a stream without a reader costs the loop nothing until it ends, or until its bound ends it. What
waits there is counted here: unread bytes and history are one sum.
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
"""How long a reader may go on writing to a client that does not read, once another one wants its stream."""


class Keeper(Protocol):
    """Is told what becomes of kept streams."""

    def grown(self, kept: KeptStream, by: int) -> None:
        """What it holds, told and untold, grew by so many bytes; fewer than none when some was given up."""

    def joined(self, kept: KeptStream) -> None:
        """It has a reader."""

    def left(self, kept: KeptStream) -> None:
        """It has none any more."""

    def over(self, kept: KeptStream) -> None:
        """The engine has made its last token."""


class KeptStream:
    """Belongs to `tenant`. `over` once the engine has made its last token, read or not."""

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
        """Bytes that wait in the engine's stream."""
        stream.count_unread(self)
        stream.watch(self._changed)

    @property
    def size(self) -> int:
        """What it holds, told and untold, in bytes."""
        return self.history.size + self.unread

    def take(self, _holder: UnreadHolder, count: int) -> None:
        """See `UnreadRoom`."""
        self.unread += count
        self._keeper.grown(self, count)

    def give_back(self, _holder: UnreadHolder, count: int) -> None:
        """See `UnreadRoom`."""
        self.unread -= count
        self._keeper.grown(self, -count)

    @property
    def stalled(self) -> bool:
        """Whether most of what it holds was never read."""
        return self.unread > self.history.size

    def give_way(self) -> None:
        """Give up the older half of its history; if more is unread, all of that, and the request with it."""
        if self.stalled:
            self._stream.give_way()
        else:
            self._keeper.grown(self, -self.history.trim())

    @property
    def exhausted(self) -> bool:
        """Whether everything that the engine made is history."""
        return self._stream.ended

    async def attach(self, places: list[Position]) -> Reader:
        """A reader of everything after `places`; the one before ends with StreamTakenOver.

        Raises StreamTakenOver, StreamExpired, and what `History.refuse` does.
        """
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
        self.history.refuse(places)
        self.reader = Reader(self, places)
        self._keeper.joined(self)
        return self.reader

    async def next(self) -> OutputEvent | None:
        """The engine's next event, which becomes history; None after the last. Raises what the stream failed with."""
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
        """As `next`, but None also when there is nothing yet."""
        if self._error is not None:
            raise self._error
        try:
            event = self._stream.poll()
        except SlipstreamError as error:
            self._error = error
            raise
        return None if event is None else self._took(event)

    def leave(self) -> None:
        """The reader is gone."""
        self.reader = None
        if self.over:
            self._read_rest()
        self._keeper.left(self)

    async def close(self) -> None:
        """End the stream for good: what still runs is aborted."""
        self.closed = True
        await self._stream.aclose()
        await buggify.pause("closed")
        if not self.over:
            # How much was made, and lay unread, is not known any more.
            self._hold.use_up()
        self._hold.release()

    def _took(self, event: OutputEvent) -> OutputEvent:
        if type(event) is Delta:
            self._hold.use(len(event.token_ids))
        elif isinstance(event, Started):
            self._hold.saw_prompt(event.prompt_tokens)
        before = self.history.size
        self.history.add(event)
        if self.history.size != before:
            self._keeper.grown(self, self.history.size - before)
        return event

    def _changed(self) -> None:
        if not self.over and self._stream.open_outputs == 0:
            self.over = True
            self._hold.release()
            if self.reader is None:
                self._read_rest()
            self._keeper.over(self)
        if self.reader is not None:
            self.reader.notify()

    def _read_rest(self) -> None:
        """Of a stream that is over, so that all of it is in the one place whose size is bounded."""
        try:
            while self.poll() is not None:
                pass
        except SlipstreamError:
            pass  # remembered, for the reader that comes


class Reader:
    """The `PolledStream` of the call that reads a kept stream now. `aclose` lets go of the stream and does not end it.

    Read it either by iterating, inside `async with` so that being taken over interrupts the wait, or by `watch` and
    `poll`.
    """

    def __init__(self, kept: KeptStream, places: list[Position]) -> None:
        self.request_id, self.want_text = kept.request_id, kept.want_text
        self.expected = sum(not place.finished for place in places)
        """How many terminals it will see."""
        self.gone = asyncio.Event()
        self._kept, self._places = kept, places
        # Started was told; all of the history was, so that from now on everything comes from the engine.
        self._begun = self._caught_up = False
        self._taken = self._waiting = False
        self._ready: Callable[[], None] | None = None
        self._bound: asyncio.Timeout | None = None

    @property
    def open_outputs(self) -> int:
        """See `PolledStream`."""
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
        """The next event if there is one now; raises what the stream failed with, once."""
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
        """Call `ready` whenever `poll` may have something."""
        self._ready = ready
        ready()

    def notify(self) -> None:
        """The engine has something new."""
        if self._ready is not None:
            self._ready()

    def take_over(self) -> None:
        """Another reader wants the stream."""
        if not self._taken:
            self._taken = True
            self._interrupt()
            self.notify()

    def _interrupt(self) -> None:
        """Have the task that iterates leave: at once if it waits here, else with its next look, or soon after.

        It may be sending headers: a call whose headers were cut off half-way can have no status either, and would hang.
        """
        if self._bound is not None:
            now = asyncio.get_running_loop().time()
            self._bound.reschedule(now if self._waiting else now + STUCK_SECONDS)

    async def __aenter__(self) -> Reader:
        bound = await asyncio.timeout(None).__aenter__()
        self._bound = bound
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
        """Let go. Idempotent."""
        self._leave()

    def _told(self) -> OutputEvent | None:
        """What the history has for this reader, as long as it has something."""
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
    """What the earlier of two readers ends with."""
    return StreamTakenOver("another call reads this stream now")
