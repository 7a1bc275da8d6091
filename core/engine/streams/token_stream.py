"""One client's stream: events in order, bounded, ended exactly once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from core.engine.streams.pending_output import PendingOutput
from core.engine.streams.reader_turns import Turnstile
from core.engine.streams.stream_end import StreamEnd
from core.engine.streams.unread import UnreadRoom
from core.errors import SlipstreamError
from core.invariants import check
from core.types.io import OutputEvent, Started
from core.types.request import Req


class TokenStream:
    """The engine's `OutputStream` (see `core.engine.api`). The output processor writes, one client task reads.

    Its queue is the tokens not read yet, merged per output. The output processor ends a stream whose reader leaves more
    than the engine's bound unread, so no reader can hold memory or pages by not reading.
    """

    def __init__(
        self,
        started: Started,
        outputs: list[PendingOutput],
        abort: Callable[[TokenStream], None],
        turnstile: Turnstile,
        text_failed: Callable[[TokenStream, PendingOutput, BaseException], None],
        give_way: Callable[[TokenStream], None],
        unread: UnreadRoom,
    ) -> None:
        """`abort(stream)` ends the requests that still run. `text_failed(stream, output, error)` is called with what
        `output` raised when its text was made for the reader; it calls `fail`, or raises `error` again.
        `give_way(stream)` calls `discard` and ends the request. Bytes that are not read are counted in `unread`.
        """
        self.request_id = started.request_id
        self.outputs = outputs
        self.reqs: list[Req] = []
        self._started: Started | None = started
        self._events: deque[OutputEvent] = deque()
        self._ready: deque[PendingOutput] = deque()
        self._end = StreamEnd(len(outputs))
        self._discarded = False
        self._abort = abort
        self._turnstile = turnstile
        self._text_failed = text_failed
        self._give_way, self._unread = give_way, unread
        # Set while the reader waits, for something to read or for its turn. It may be resolved already.
        self._waiter: asyncio.Future[None] | None = None
        self._in_line = False
        self._watcher: Callable[[], None] | None = None

    @property
    def pending_tokens(self) -> int:
        """Number of tokens that the client has not taken."""
        return sum(len(output) for output in self.outputs)

    def sequences(self) -> Iterator[tuple[Req, PendingOutput]]:
        """Each request with its output; none once the stream has closed and let go of its requests."""
        return zip(self.reqs, self.outputs)

    def count_unread(self, room: UnreadRoom) -> None:
        """Count what is not read in `room` from now on, and no longer in the room before."""
        charged = sum(output.charged for output in self.outputs)
        if charged:
            self._unread.give_back(self, charged)
        self._unread = room
        if charged:
            room.take(self, charged)

    def hold_more(self, output: PendingOutput) -> None:
        """Count more bytes for `output`, which holds more than its room; if the stream is over, forget it instead."""
        if self._end.met or self._discarded:
            output.discard()
        else:
            self._unread.take(self, output.charge())

    def give_way(self) -> None:
        """Called by a room that is short of bytes: end as the stream of a slow reader, and hold nothing any more."""
        self._give_way(self)

    def discard(self, error: SlipstreamError) -> None:
        """End with `error` at once. Forget what is pending, and what still comes: there would be a gap before it."""
        self._discarded = True
        self._events.clear()
        self._forget()
        self.fail(error)

    def _forget(self) -> None:
        self._ready.clear()
        for output in self.outputs:
            output.in_line = False
            output.discard()
            self._discharge(output)

    def _discharge(self, output: PendingOutput) -> None:
        if output.charged:
            self._unread.give_back(self, output.discharge())

    def begin(self) -> None:
        """Tell the reader that the first token is on its way. No-op if it was told, or if the stream has failed."""
        if self._started is not None and not self._end.known:
            self._events.append(self._started)
            self._started = None
            self._wake()

    def notify(self, output: PendingOutput) -> None:
        """Wake the reader: `output` may have something to read."""
        if self._started is not None:
            self.begin()
        if self._discarded or self._started is not None:
            # Of a stream that failed before it began nothing is told but the error: outputs of siblings would follow no
            # `Started`.
            output.discard()
        elif not output.in_line:
            output.in_line = True
            self._ready.append(output)
        self._wake()

    def output_ended(self) -> None:
        """Count the terminal of one output. Raises InvariantViolation when every output has got one already."""
        check("terminal_once", self._end.open_outputs > 0, request_id=self.request_id)
        self._end.open_outputs -= 1
        self._wake()

    @property
    def open_outputs(self) -> int:
        """Outputs that have not got their terminal."""
        return self._end.open_outputs

    @property
    def failed(self) -> bool:
        """Whether the stream ends with an error."""
        return self._end.error is not None

    def fail(self, error: SlipstreamError) -> None:
        """End with `error` after what is pending was read; the first error wins."""
        if self._end.fail(error):
            self._wake()

    def __aiter__(self) -> AsyncIterator[OutputEvent]:
        return self

    async def __anext__(self) -> OutputEvent:
        turn = False
        while True:
            if not self._anything:
                await self._wait(in_line=False)
                turn = True
            elif not (turn or self._turnstile.enter()):
                await self._wait(in_line=True)
                turn = True
            elif (event := self.poll()) is not None:
                return event
            elif self._end.met:
                raise StopAsyncIteration

    @property
    def _anything(self) -> bool:
        """Whether there may be an event or the end to read."""
        return bool(self._ready or self._events or self._end.known)

    async def _wait(self, *, in_line: bool) -> None:
        """Wait for this reader's turn: `in_line` at once, else when there is something to read."""
        self._waiter = asyncio.get_running_loop().create_future()
        self._in_line = in_line
        if in_line:
            self._turnstile.admit(self._waiter)
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def ended(self) -> bool:
        """Whether everything was read, an error included, or the stream was closed."""
        return self._end.met

    def poll(self) -> OutputEvent | None:
        """The next event if there is one now. Raises the error of the stream once, after the events before it."""
        event = self._next_ready()
        if event is None:
            self._end.meet()
        return event

    def watch(self, ready: Callable[[], None]) -> None:
        """Call `ready` now and whenever `poll` may have something, for a reader that has no task of its own."""
        self._watcher = ready
        ready()

    async def aclose(self) -> None:
        """Stop reading, forget what is unread, and abort what still runs. Idempotent."""
        self._end.met = True
        self._events.clear()
        self._forget()
        if self.open_outputs:
            self._abort(self)

    def _next_ready(self) -> OutputEvent | None:
        if self._events:
            return self._events.popleft()
        while self._ready:
            output = self._ready[0]
            event = self._taken(output)
            if not output.readable:
                self._ready.popleft().in_line = False
            if event is not None:
                return event
        return None

    def _taken(self, output: PendingOutput) -> OutputEvent | None:
        try:
            event = output.take()
        except BaseException as error:
            self._text_failed(self, output, error)
            # Text that was made before the failure is taken next. Where there is none, no later read would come to
            # give the bytes back, so that is done now.
            event = None
        if output.charged:
            self._discharge(output)
        return event

    def _wake(self) -> None:
        if self._watcher is not None:
            self._watcher()
        if self._waiter is not None and not self._in_line:
            self._in_line = True
            self._turnstile.admit(self._waiter)
