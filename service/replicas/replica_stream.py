"""One request of a replica: its events, a `CountedStream` of `core.engine.api`, and its share of the router's book."""

from __future__ import annotations

import time
from collections.abc import Callable

from core.engine.streams.unread import UnreadRoom
from core.types.io import Delta, GenerateRequest, OutputEvent, Started
from core.types.streams import StreamInfo
from service.frontends.remote_stream import RemoteStream
from service.replicas.router import Share

WAITING, DECODE = "waiting", "decode"


class ReplicaStream(RemoteStream):
    """A `RemoteStream` that can be read without waiting too, for streams that are kept and for front ends.

    `share` is ended, and `on_end` called, as soon as the engine is done with the request or the request is aborted.
    """

    def __init__(
        self,
        request: GenerateRequest,
        abort: Callable[[], None],
        max_pending_tokens: int,
        room: UnreadRoom,
        share: Share,
        on_end: Callable[[ReplicaStream], None],
    ) -> None:
        super().__init__(request.request_id, request.sampling.n, abort, max_pending_tokens, room)
        self._share, self._on_end = share, on_end
        self._adapter, self._arrived_at = request.adapter, time.monotonic()
        self._prompt_tokens = self._output_tokens = 0
        self._watcher: Callable[[], None] | None = None

    @property
    def open_outputs(self) -> int:
        """Outputs that have not got their terminal."""
        return self._end.open_outputs

    @property
    def ended(self) -> bool:
        """Whether everything was read, an error included, or the stream was closed."""
        return self._end.met

    @property
    def over(self) -> bool:
        """Whether the engine is done with the request, or it was aborted."""
        return self._share.ended

    def info(self) -> StreamInfo:
        """The request as operators see it. It counts as waiting until its first token: the rest is the engine's."""
        state = DECODE if self._share.begun else WAITING
        lengths = (self._prompt_tokens, self._output_tokens)
        return StreamInfo(self.request_id, state, *lengths, self._arrived_at, self._adapter)

    def push(self, event: OutputEvent) -> None:
        """Keep one event, and note in the book what it says of the request."""
        if type(event) is Delta:
            if event.position >= 0:
                self._share.begin()
                self._share.grow(len(event.token_ids))
                self._output_tokens += len(event.token_ids)
        elif isinstance(event, Started):
            self._prompt_tokens = event.prompt_tokens
            self._share.correct(event.prompt_tokens)
        super().push(event)

    def poll(self) -> OutputEvent | None:
        """The next event if there is one now. Raises the error of the stream once, after the events before it."""
        if self._events:
            return self._take()
        self._end.meet()
        return None

    def watch(self, ready: Callable[[], None]) -> None:
        """Call `ready` now and whenever `poll` may have something, for a reader that has no task of its own."""
        self._watcher = ready
        ready()

    def count_unread(self, room: UnreadRoom) -> None:
        """Count what is not read in `room` from now on, and no longer in the room before."""
        charged = self._charged
        if charged:
            self._room.give_back(self, charged)
        self._room = room
        if charged:
            room.take(self, charged)

    def output_finished(self) -> bool:
        """One output got its `Finished` event. Returns whether it was the last."""
        last = super().output_finished()
        if last:
            self._over()
        # The watcher was told of the event before it could see that it was the last.
        self._wake()
        return last

    def fail(self, error: BaseException) -> None:
        """End with `error`, after the reader has taken pending events. The first error wins."""
        if self._end.error is None and self._end.open_outputs:
            self._end.open_outputs = 0
            self._over()
        super().fail(error)

    async def aclose(self) -> None:
        """Stop reading, and abort outputs that still run. Idempotent."""
        await super().aclose()
        self._over()

    def _over(self) -> None:
        if not self._share.ended:
            self._share.end()
            self._on_end(self)

    def _wake(self) -> None:
        super()._wake()
        if self._watcher is not None:
            self._watcher()
