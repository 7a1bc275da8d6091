"""Calls that are open on the engine: how one is admitted, who started it, and who may abort it.

Every service that generates goes through the one `OpenCalls` of its server, whatever its messages look like: limits,
deadlines, owners of requests and counts of refusals are the same for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, eq=False)
class Owner:
    """Who started one request, by name; two of the same name are still two."""

    name: str | None


class OpenCalls:
    """Opens requests on whatever engine `slot` holds."""

    def __init__(self, slot: EngineSlot, config: ServerConfig, admission: Admission, metrics: RpcMetrics) -> None:
        self.slot = slot
        self.config = config
        self.metrics = metrics
        self._admission = admission
        # Who started each live request: only they may abort it.
        self._owners: dict[str, Owner] = {}

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
        # its owner until the engine, which refuses one of them, has decided whose it is.
        owner = Owner(caller_name.get())
        held.callback(self._give_up, asked.request_id, owner)
        self._owners.setdefault(asked.request_id, owner)
        stream = await self.engine.generate(asked)
        self._owners[asked.request_id] = owner
        return stream

    async def embed(self, asked: EmbedRequest, held: AsyncExitStack) -> EmbedCall:
        """As `generate`, for vectors."""
        await held.enter_async_context(self._admission.slot(asked.deadline))
        call = await self.engine.embed(asked)
        owner = Owner(caller_name.get())
        held.callback(self._give_up, call.request_id, owner)
        self._owners[call.request_id] = owner
        return call

    def _give_up(self, request_id: str, owner: Owner) -> None:
        # Another request may have got the id meanwhile.
        if self._owners.get(request_id) is owner:
            del self._owners[request_id]

    async def abort(self, request_id: str) -> bool:
        """End a live request of this caller as cancelled; whether there was one."""
        if not request_id:
            raise InvalidRequest.of("request_id", "must not be empty")
        engine = self.engine
        # Somebody else's request is answered like one that is not there. One that came through another front end is not
        # known here; the engine's process asks there whose it is.
        caller = caller_name.get()
        owner = self._owners.get(request_id)
        if owner is not None and owner.name != caller:
            return False
        return await answered(engine.abort(request_id))
