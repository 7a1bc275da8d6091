"""Calls that are open on the engine: how each is admitted, by which limits, and under which id the engine knows it.

Every service that generates goes through the one `OpenCalls` of its server, whatever its messages look like. So limits,
deadlines, tenants and counts of refusals are the same for all services. Requests come in with the ids and cache salts
that their clients gave. The engine gets both with the tenant in front (`service.tenant_ids`). So two tenants may use
the same id or salt, and neither reaches the other's request or cached prefixes. Only this file puts the tenant in
front, so a dialect cannot forget it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import grpc.aio

from core.engine.api import EmbedCall, Engine, OutputStream, PrefixWatch
from core.errors import InvalidRequest, Overloaded, SlipstreamError
from core.types.io import EmbedRequest, GenerateRequest, ModelInfo
from service.access.caller import caller_address, caller_name
from service.access.permissions import Permissions
from service.calls.desk import ResumedStream, TenantDesk
from service.config.server_config import ServerConfig
from service.engine.handle import EngineHandle, answered
from service.errors import NotPermitted
from service.limits.admission import Admission
from service.limits.hold import Hold, current_hold
from service.limits.usage import TenantLoad
from service.limits.work import Work, embedding, generating
from service.metrics.rpc import RpcMetrics
from service.tenant_ids import scoped_id, tenant_salt
from service.wire.position import Position
from service.wire.served_calls import refuse_unless_generating

Context = grpc.aio.ServicerContext[Any, Any]
Request = TypeVar("Request", GenerateRequest, EmbedRequest)


class OpenCalls:
    """Opens requests on the engine of `handle`, each for the tenant that the current call names."""

    def __init__(
        self, handle: EngineHandle, config: ServerConfig, admission: Admission, desk: TenantDesk, metrics: RpcMetrics
    ) -> None:
        self.handle = handle
        self.config = config
        self.metrics = metrics
        self._admission = admission
        self._desk = desk
        self._permissions = Permissions(config)

    @property
    def engine(self) -> Engine:
        """The engine; raises NotReady while there is none."""
        return self.handle.require()

    def writing_model(self) -> ModelInfo:
        """Facts of the model, for a call that generates. Raises NotReady, and Unsupported for one that puts out none.

        Before anything else is looked at: its chat template, say, is not what a model that only judges lacks.
        """
        info = self.engine.model_info
        refuse_unless_generating(info)
        return info

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count an error inside as a refusal. The body is everything before the first event of a request."""
        try:
            yield
        except SlipstreamError as error:
            self.metrics.rejected(error.reason)
            raise

    @contextmanager
    def counting_attaches(self) -> Iterator[None]:
        """Count an Attach call, or the error that refused it. The body is everything before its first event."""
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
        """Admit and queue a request. The admission lasts until `held` closes; push `aclose` of the stream there too.

        Raises NotPermitted, and what `TenantDesk.enter`, `Admission.slot` and `Engine.generate` do.
        """
        # First, since it takes no place and no tokens of the tenant.
        self._refuse_grammar(asked)
        work = self._work(asked)
        place = await self._admit(asked.deadline, work, held)
        stream = await self.engine.generate(_within_tenant(asked, place))
        _count_for(place, work)
        return stream

    async def keep(self, asked: GenerateRequest, held: AsyncExitStack) -> ResumedStream:
        """As `generate`, for a stream that outlives the call: when `held` closes, the call only detaches from it.

        The same request sent again gets the stream of the first. Raises NotPermitted, and what `TenantDesk.enter`,
        `Admission.slot` and `Retention.open` do.
        """
        self._refuse_grammar(asked)
        work = self._work(asked)
        place = await self._admit(asked.deadline, work, held)
        return await _hold(await self._desk.open(_within_tenant(asked, place), caller_name.get(), place), held)

    async def attach(
        self, request_id: str, positions: dict[int, Position], held: AsyncExitStack, *, incarnation: str = ""
    ) -> ResumedStream:
        """Read a kept stream of this caller until `held` closes. Raises NotReady and what `Retention.attach` does."""
        self.handle.require()
        scoped = scoped_id(request_id, caller_name.get())
        return await _hold(await self._desk.attach(scoped, positions, incarnation), held)

    async def embed(self, asked: EmbedRequest, held: AsyncExitStack) -> EmbedCall:
        """Admit and queue an embedding request; as `generate` otherwise. Raises what `generate` does for a request."""
        work = self._work(asked)
        place = await self._admit(asked.deadline, work, held)
        call = await self.engine.embed(_within_tenant(asked, place))
        _count_for(place, work)
        return call

    def _refuse_grammar(self, asked: GenerateRequest) -> None:
        """Raise NotPermitted for a constraint in a form that this caller may not use."""
        kind = None if asked.constraint is None else asked.constraint.kind
        if kind is not None and not self._permissions.may_constrain(caller_name.get(), kind):
            raise NotPermitted("grammars (ebnf) are for callers that --grammar-callers lists; others have json_schema")

    def _work(self, asked: GenerateRequest | EmbedRequest) -> Work:
        """The work that the request counts as; one sequence without tokens if there is no tenants file."""
        if self.config.tenants_file is None:
            return Work()
        if isinstance(asked, EmbedRequest):
            return embedding(asked)
        return generating(asked, self.engine.model_info.context_length)

    def refuse_hopeless(self, tenant: str | None) -> None:
        """Raise the error with which any request of `tenant` would be refused at once, before its message is read."""
        self._desk.refuse_hopeless(tenant)
        self._admission.refuse_hopeless()
        # "" stands for every caller without a name. The engine knows such callers by their address, which it gets with
        # the request.
        if self.engine.full(tenant or ""):
            raise Overloaded("the waiting queue is full", reason="QUEUE_FULL")

    async def _admit(self, deadline: float | None, work: Work, held: AsyncExitStack) -> Hold:
        """Pass the tenant's gate, then the limits that all tenants share, which a flood of one must not use up."""
        place = await self._desk.enter(caller_name.get(), deadline, work)
        held.callback(place.release)
        await held.enter_async_context(self._admission.slot(deadline))
        return place

    async def watch_prefixes(self) -> PrefixWatch:
        """Watch the cached prefixes that requests of this caller without a salt can find. Raises Unsupported."""
        return await answered(self.engine.prefixes.watch(tenant_salt("", caller_name.get())))

    @property
    def tenant(self) -> str | None:
        """The tenant whose load this call sees and whose prefixes it flushes; None: those of all tenants."""
        caller = caller_name.get()
        return None if self._permissions.sees_all(caller) else caller

    async def own_load(self) -> TenantLoad | None:
        """What the tenant of this call has running and waiting; None for a caller that sees the load of all."""
        return None if self.tenant is None else await self._desk.load(self.tenant)

    async def abort(self, request_id: str) -> bool:
        """End a live request of this caller as cancelled. Returns whether there was one. Raises InvalidRequest."""
        if not request_id:
            raise InvalidRequest.of("request_id", "must not be empty")
        # The id holds the caller's name, so no caller can end another's request.
        return await answered(self.engine.abort(scoped_id(request_id, caller_name.get())))


def _within_tenant(asked: Request, place: Hold) -> Request:
    """`asked` as the engine gets it: id and salt with the caller in front, and the tenant and weight to share by."""
    caller = caller_name.get()
    return replace(
        asked,
        request_id=scoped_id(asked.request_id, caller),
        cache_salt=tenant_salt(asked.cache_salt, caller),
        tenant=caller or caller_address.get(),
        weight=place.weight,
    )


def _count_for(place: Hold, work: Work) -> None:
    """Count the prompt of an accepted request for `place`, and from now on the tokens that this call reads."""
    place.saw_prompt(work.prompt)
    current_hold.set(place)


async def _hold(stream: ResumedStream, held: AsyncExitStack) -> ResumedStream:
    """Have `held` detach from the stream, and interrupt the call inside when another call takes the stream over."""
    # `aclose` is pushed first, so it runs after the stream's own `__aexit__`, which may raise StreamTakenOver.
    held.push_async_callback(stream.aclose)
    await held.enter_async_context(stream)
    return stream
