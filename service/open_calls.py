"""Calls that are open on the engine: how one is admitted, who started it, and who may abort it.

Every service that generates goes through the one `OpenCalls` of its server, whatever its messages look like: limits,
deadlines, owners of requests and counts of refusals are the same for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import grpc.aio

from core.engine.door import EmbedCall, Engine, OutputStream
from core.errors import InvalidRequest, SlipstreamError
from core.types.io import EmbedRequest, GenerateRequest
from service.admission import Admission
from service.auth import caller_name
from service.config import ServerConfig
from service.engine_slot import EngineSlot, answered
from service.metrics.rpc import RpcMetrics

Context = grpc.aio.ServicerContext[Any, Any]


class OpenCalls:
    """Opens requests on whatever engine `slot` holds."""

    def __init__(self, slot: EngineSlot, config: ServerConfig, admission: Admission, metrics: RpcMetrics) -> None:
        self.slot = slot
        self.config = config
        self.metrics = metrics
        self._admission = admission
        # Who started each live request: only they may abort it.
        self._callers: dict[str, str | None] = {}

    @property
    def engine(self) -> Engine:
        """The engine; raises NotReady while there is none."""
        return self.slot.require()

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Around everything that comes before the first event of a request."""
        try:
            yield
        except SlipstreamError as error:
            self.metrics.rejected(error.reason)
            raise

    def deadline(self, context: Context) -> float | None:
        """The earlier of the client's deadline and the server's own limit, as a `time.monotonic()` instant."""
        limits = [limit for limit in (context.time_remaining(), self.config.max_request_seconds) if limit is not None]
        return time.monotonic() + min(limits) if limits else None

    async def generate(self, asked: GenerateRequest, held: AsyncExitStack) -> OutputStream:
        """Admit and queue. The admission lasts as long as `held`, which the caller lets close the stream too."""
        await held.enter_async_context(self._admission.slot(asked.deadline))
        # Before it is queued, since it can be aborted while it waits for its constraint. An id that is taken stays with
        # its owner: the engine refuses this request.
        if asked.request_id not in self._callers:
            self._callers[asked.request_id] = caller_name.get()
            held.callback(self._callers.pop, asked.request_id)
        return await self.engine.generate(asked)

    async def embed(self, asked: EmbedRequest, held: AsyncExitStack) -> EmbedCall:
        """As `generate`, for vectors."""
        await held.enter_async_context(self._admission.slot(asked.deadline))
        call = await self.engine.embed(asked)
        self._callers[call.request_id] = caller_name.get()
        held.callback(self._callers.pop, call.request_id)
        return call

    async def abort(self, request_id: str) -> bool:
        """End a live request of this caller as cancelled; whether there was one."""
        if not request_id:
            raise InvalidRequest.of("request_id", "must not be empty")
        engine = self.engine
        # Somebody else's request is answered like one that is not there. One that came through another front end is not
        # known here; the engine's process asks there whose it is.
        caller = caller_name.get()
        if self._callers.get(request_id, caller) != caller:
            return False
        return await answered(engine.abort(request_id))
