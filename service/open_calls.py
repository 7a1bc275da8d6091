"""Calls that are open on the engine: how one is admitted, by whose limits, and under which id the engine knows it.

Every service that generates goes through the one `OpenCalls` of its server, whatever its messages look like: limits,
deadlines, tenants and counts of refusals are the same for all of them. Requests come in with the ids that their clients
gave; the engine gets ids within the tenant, so two tenants may use one id, and neither reaches the other's request.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import grpc.aio

from core.engine.door import EmbedCall, Engine, OutputStream
from core.errors import InvalidRequest, SlipstreamError
from core.types.io import EmbedRequest, GenerateRequest
from service.admission import Admission
from service.auth import caller_name
from service.config import ServerConfig
from service.engine_slot import EngineSlot, answered
from service.metrics.rpc import RpcMetrics
from service.resume.history import Position
from service.tenants.desk import ResumedStream, TenantDesk
from service.tenants.gates import Hold
from service.tenants.identity import scoped_id

Context = grpc.aio.ServicerContext[Any, Any]
Request = TypeVar("Request", GenerateRequest, EmbedRequest)


class OpenCalls:
    """Opens requests on whatever engine `slot` holds, for the tenant whose call it is."""

    def __init__(
        self, slot: EngineSlot, config: ServerConfig, admission: Admission, desk: TenantDesk, metrics: RpcMetrics
    ) -> None:
        self.slot = slot
        self.config = config
        self.metrics = metrics
        self._admission = admission
        self._desk = desk

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

    @contextmanager
    def counting_attaches(self) -> Iterator[None]:
        """Around everything that comes before the first event of a resumed stream."""
        try:
            yield
        except SlipstreamError as error:
            self.metrics.attach(error.reason)
            raise
        self.metrics.attach("attached")

    def deadline(self, context: Context) -> float | None:
        """The earlier of the client's deadline and the server's own limit, as a `time.monotonic()` instant."""
        limits = [limit for limit in (context.time_remaining(), self.config.max_request_seconds) if limit is not None]
        return time.monotonic() + min(limits) if limits else None

    async def generate(self, asked: GenerateRequest, held: AsyncExitStack) -> OutputStream:
        """Admit and queue. The admission lasts as long as `held`, which the caller lets close the stream too."""
        await self._admit(asked.deadline, held)
        return await self.engine.generate(_within_tenant(asked))

    async def keep(self, asked: GenerateRequest, held: AsyncExitStack) -> ResumedStream:
        """As `generate`, for a stream that outlives the call: `held` only lets go of it.

        The same request sent again gets the stream of the first. Raises what `Retention.open` does.
        """
        place = await self._admit(asked.deadline, held)
        return await _hold(await self._desk.open(_within_tenant(asked), caller_name.get(), place), held)

    async def attach(self, request_id: str, positions: dict[int, Position], held: AsyncExitStack) -> ResumedStream:
        """Go on with a kept stream of this caller until `held` lets go. Raises what `Retention.attach` does."""
        self.slot.require()
        return await _hold(await self._desk.attach(scoped_id(request_id, caller_name.get()), positions), held)

    async def embed(self, asked: EmbedRequest, held: AsyncExitStack) -> EmbedCall:
        """As `generate`, for vectors."""
        await self._admit(asked.deadline, held)
        return await self.engine.embed(_within_tenant(asked))

    async def _admit(self, deadline: float | None, held: AsyncExitStack) -> Hold:
        """Pass the tenant's gate, then the limits that all share: one that floods must not use those up."""
        place = await self._desk.enter(caller_name.get(), deadline)
        held.callback(place.release)
        await held.enter_async_context(self._admission.slot(deadline))
        return place

    async def abort(self, request_id: str) -> bool:
        """End a live request of this caller as cancelled; whether there was one."""
        if not request_id:
            raise InvalidRequest.of("request_id", "must not be empty")
        # Somebody else's request has another id.
        return await answered(self.engine.abort(scoped_id(request_id, caller_name.get())))


def _within_tenant(asked: Request) -> Request:
    """`asked` under the id that the engine knows it by."""
    return replace(asked, request_id=scoped_id(asked.request_id, caller_name.get()))


async def _hold(stream: ResumedStream, held: AsyncExitStack) -> ResumedStream:
    """Let go of the stream with `held`, and interrupt what waits in it when the stream is taken over."""
    held.push_async_callback(stream.aclose)
    await held.enter_async_context(stream)
    return stream
