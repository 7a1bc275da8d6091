"""One replica's engine as this server sees it: `core.engine.api.Engine`, over the connection to its process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from core.engine.api import EngineState
from core.errors import ConfigError, ModelLoadError, SlipstreamError, StartupError
from core.types.io import GenerateRequest
from core.types.streams import StreamInfo
from service.errors import EngineSilent
from service.frontends.remote_engine import RemoteEngine
from service.frontends.wire import Kind
from service.replicas.replica_stream import ReplicaStream
from service.replicas.router import Share

Told = Callable[[str, float], None]
PATIENT: Final = frozenset({"vectors"})
"""Calls whose answer takes as long as the work."""


class ReplicaEngine(RemoteEngine):
    """A `RemoteEngine` whose process runs that engine and nothing else. Event-loop thread only.

    `on_loading` is told of the progress of the load, `on_ended` of each request that has ended there.
    """

    def __init__(
        self, max_pending_tokens: int, on_loading: Told, on_ended: Callable[[StreamInfo], None] = lambda _: None
    ) -> None:
        super().__init__(max_pending_tokens)
        self._on_loading, self._on_ended = on_loading, on_ended
        self._gone = "the engine that had this request failed; send it again"
        self._failed: StartupError | None = None
        self._patient: set[int] = set()

    @property
    def is_ready(self) -> bool:
        """Whether it has started and serves."""
        return self._ready.done() and self._state is EngineState.READY

    async def started(self) -> bool:
        """Wait until it serves, or its process has ended; returns whether it serves. Raises StartupError as told."""
        await asyncio.wait((self._ready, self.closing), return_when=asyncio.FIRST_COMPLETED)
        if self._failed is not None:
            raise self._failed
        return self.is_ready

    async def open_stream(
        self, request: GenerateRequest, share: Share, on_end: Callable[[ReplicaStream], None]
    ) -> ReplicaStream:
        """As `generate`; `share` is ended with the stream, or with the error that comes instead."""
        number = self._next()
        stream = ReplicaStream(request, lambda: self.end(number), self._max_pending, self._unread, share, on_end)
        try:
            await self._begin(number, stream, request)
        except BaseException:
            share.end()
            raise
        return stream

    def hush(self) -> None:
        """Give up the calls that its process has not answered, which raise EngineSilent: it may never answer.

        Streams and embeddings that it has begun wait on: they would lose what is there already.
        """
        for number, reply in self._replies.items():
            if number not in self._patient and not reply.done():
                reply.set_exception(EngineSilent("the engine's process does not answer"))
                self.end(number)

    def fail_streams(self, error: SlipstreamError) -> None:
        """End every stream that is open with `error`, and tell of each as far as it had come."""
        for stream in list(self._streams.values()):
            if isinstance(stream, ReplicaStream) and not stream.over:
                self._on_ended(stream.info())
        super().fail_streams(error)

    async def _ask(self, number: int, method: str, **arguments: Any) -> Any:
        if method not in PATIENT:
            return await super()._ask(number, method, **arguments)
        self._patient.add(number)
        try:
            return await super()._ask(number, method, **arguments)
        finally:
            self._patient.discard(number)

    async def drain(self, timeout: float) -> int:
        """Have it refuse new requests and give those that live `timeout` seconds. Returns how many were cut."""
        return int(await self.call("drain", timeout=timeout))

    async def leave(self) -> None:
        """Have its process stop the engine and end. Raises EngineDead if it is gone."""
        await self.call("stop")

    def _frame(self, kind: Kind, number: int, body: bytes) -> None:
        if kind is Kind.LOADING:
            self._on_loading(*json.loads(body))
        elif kind is Kind.FAILED:
            self._failed = _startup_error(json.loads(body))
        elif kind is Kind.ENDED:
            self._on_ended(StreamInfo(*json.loads(body)))
        else:
            super()._frame(kind, number, body)

    def _hear(self, kind: Kind, value: Any) -> None:
        known = self._stats.histograms
        super()._hear(kind, value)
        if kind is Kind.STATE and not self._stats.histograms:
            # They come with every tenth snapshot only.
            self._stats = replace(self._stats, histograms=known)


def _startup_error(told: dict[str, Any]) -> StartupError:
    kinds = {kind.__name__: kind for kind in (StartupError, ConfigError, ModelLoadError)}
    error = kinds.get(told["error"], StartupError)(told["message"])
    error.exit_code = int(told["exit_code"])
    return error
