"""The events of one request in a front end, from their arrival until the client takes them."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from core.engine.streams.stream_end import StreamEnd
from core.engine.streams.unread import MORE_TOKENS, TOKEN_BYTES, UnreadRoom, too_many_bytes, too_many_tokens
from core.types.chat import AnswerPart
from core.types.io import Delta, OutputEvent
from core.types.logprobs import TokenLogprobs


class _Unread:
    """Deltas of one output that the client has not taken, merged."""

    def __init__(self, first: Delta) -> None:
        self.index, self._position = first.index, first.position
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._parts: list[AnswerPart] = []
        self._logprobs = TokenLogprobs()
        self.add(first)

    def add(self, delta: Delta) -> None:
        self._ids += delta.token_ids
        self._texts.append(delta.text)
        self._parts += delta.parts
        if delta.logprobs:
            self._logprobs.extend(delta.logprobs)

    @property
    def held_bytes(self) -> int:
        """Bytes that the deltas take. Each text is a string of its own until it is read, so its overhead counts."""
        texts = sum(map(sys.getsizeof, self._texts)) + sum(map(_bytes_of, self._parts))
        return len(self._ids) * TOKEN_BYTES + texts + self._logprobs.held_bytes

    def merged(self) -> Delta:
        ids, text = tuple(self._ids), "".join(self._texts)
        return Delta(self.index, self._position, ids, text, self._logprobs or (), tuple(self._parts))


def _bytes_of(part: AnswerPart) -> int:
    """Bytes that a part of an answer takes, about."""
    return sys.getsizeof(part.text) + (0 if part.call is None else sys.getsizeof(part.call.arguments))


class RemoteStream:
    """The `OutputStream` of `core.engine.api` in a front end. A reader too far behind ends with SlowConsumer."""

    def __init__(
        self,
        request_id: str,
        outputs: int,
        abort: Callable[[], None],
        max_pending_tokens: int,
        room: UnreadRoom,
    ) -> None:
        """`abort` ends the request in the engine's process.

        More than `max_pending_tokens` unread tokens end the stream. Their bytes are counted in `room`, anew after
        every `MORE_TOKENS` tokens.
        """
        self.request_id = request_id
        self._room = room
        self._counted = self._charged = 0
        self._abort = abort
        self._max_pending = max_pending_tokens
        self._events: deque[OutputEvent | _Unread] = deque()
        self._unread: dict[tuple[int, bool], _Unread] = {}
        """By output; tokens of the prompt, at places below 0, are merged by themselves."""
        self._pending = 0
        self._end = StreamEnd(outputs)
        self._waiter: asyncio.Future[None] | None = None

    def push(self, event: OutputEvent) -> None:
        """Keep one event of the engine for the reader. No-op once the stream has ended."""
        if self._end.met or self._end.error is not None:
            return
        if type(event) is Delta:
            self._push_delta(event)
        else:
            self._events.append(event)
        self._wake()

    def _push_delta(self, delta: Delta) -> None:
        self._pending += len(delta.token_ids)
        if delta.position < 0:
            # The bound is on tokens of outputs, as in the engine's process.
            self._max_pending += len(delta.token_ids)
        unread = self._unread.get(key := (delta.index, delta.position < 0))
        if unread is not None:
            unread.add(delta)
        else:
            self._unread[key] = unread = _Unread(delta)
            self._events.append(unread)
        if self._pending > self._max_pending:
            self.fail(too_many_tokens(self._max_pending))
            self._abort()
        elif self._pending >= self._counted + MORE_TOKENS:
            self._charge()

    def _charge(self) -> None:
        """Have `room` count exactly the bytes that are held now."""
        # Before `take`, which can call `give_way` of this stream, and so this method again.
        self._counted = self._pending
        held = sum(unread.held_bytes for unread in self._unread.values())
        more, self._charged = held - self._charged, held
        if more > 0:
            self._room.take(self, more)
        elif more < 0:
            self._room.give_back(self, -more)

    def give_way(self) -> None:
        """`UnreadHolder`: forget everything unread and end with SlowConsumer, here and in the engine's process."""
        self._forget()
        self.fail(too_many_bytes())
        self._abort()

    def _forget(self) -> None:
        self._events.clear()
        self._unread.clear()
        self._pending = 0
        self._charge()

    def output_finished(self) -> bool:
        """One output got its `Finished` event. Returns whether it was the last."""
        self._end.open_outputs -= 1
        return self._end.open_outputs == 0

    def fail(self, error: BaseException) -> None:
        """End with `error`, after the reader has taken pending events. The first error wins."""
        if self._end.fail(error):
            self._wake()

    def __aiter__(self) -> AsyncIterator[OutputEvent]:
        return self

    async def __anext__(self) -> OutputEvent:
        while True:
            if self._events:
                return self._take()
            if self._end.meet():
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _take(self) -> OutputEvent:
        event = self._events.popleft()
        if not isinstance(event, _Unread):
            return event
        delta = event.merged()
        del self._unread[event.index, delta.position < 0]
        self._pending -= len(delta.token_ids)
        if self._charged:
            self._charge()
        return delta

    async def aclose(self) -> None:
        """Stop reading, and abort outputs that still run. Idempotent."""
        if not self._end.met:
            self._end.met = True
            self._forget()
            if self._end.open_outputs and self._end.error is None:
                self._abort()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


_NOT_SAID_YET = 1 << 20
"""Number of open outputs of a `RemoteReader` until the reply says how many there are: more than any request has."""


class RemoteReader(RemoteStream):
    """The `ResumedStream` of `service.calls.desk` in a front end.

    If another call attaches, the engine's process sends StreamTakenOver as the last event, after those before it.
    """

    def __init__(self, request_id: str, abort: Callable[[], None], max_pending_tokens: int, room: UnreadRoom) -> None:
        # Events can be here before the task that asked for them knows how many outputs there are.
        super().__init__(request_id, _NOT_SAID_YET, abort, max_pending_tokens, room)
        self.expected, self.want_text = 0, True

    def expect(self, outputs: int, want_text: bool) -> bool:
        """`outputs` is the number of `Finished` events in all. Returns whether some have not arrived yet."""
        self.expected, self.want_text = outputs, want_text
        self._end.open_outputs += outputs - _NOT_SAID_YET
        return self._end.open_outputs > 0

    async def __aenter__(self) -> RemoteReader:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """No-op: `OpenCalls` calls `aclose` on every path."""
