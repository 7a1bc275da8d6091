"""The desk: admits tenants' requests, and keeps streams that outlive their call.

Both need to see all calls of a tenant, so both are done in the engine's process, by `LocalDesk`. In a front end
`service.frontends.remote_desk` asks there.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from core.engine.api import Engine, OutputStream
from core.errors import Overloaded
from core.types.io import GenerateRequest
from service.access.access_files import AccessFiles
from service.config.server_config import ServerConfig
from service.engine.handle import EngineHandle
from service.limits.hold import Hold
from service.limits.refusals import Refusals
from service.limits.tenant_limiter import TenantGates
from service.limits.usage import TenantLoad, TenantUsage
from service.limits.work import ONE_SEQUENCE, Work
from service.metrics.rpc import RpcMetrics
from service.resume.kept import Reader
from service.resume.retention import Retention
from service.wire.position import Position


class ResumedStream(OutputStream, Protocol):
    """A kept stream, read from a given position. `aclose` detaches without ending it.

    Use `async with`: if another call attaches, the block ends with StreamTakenOver. `expected` is the number of
    `Finished` events still to come.
    """

    want_text: bool

    @property
    def expected(self) -> int: ...

    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class TenantDesk(Protocol):
    """The desk as `OpenCalls` sees it. Request ids are the engine's: they hold their tenant (`service.tenant_ids`)."""

    def refuse_hopeless(self, tenant: str | None) -> None:
        """Raise Overloaded or TenantLockedOut if `enter` would refuse any work at once, as far as is known here."""
        ...

    async def enter(self, tenant: str | None, deadline: float | None, work: Work = ONE_SEQUENCE) -> Hold:
        """Wait until the tenant's limits have room for `work`; `deadline` is a `time.monotonic()` instant.

        Raises Overloaded, DeadlinePassed, TenantLockedOut and TenantSequences.
        """
        ...

    async def open(self, asked: GenerateRequest, tenant: str | None, hold: Hold) -> ResumedStream:
        """Open a kept stream, or find that of the same request sent before. A new stream takes `hold` over.

        Raises DuplicateRequest, Overloaded, ResumeOff, and what `Engine.generate` and `attach` do.
        """
        ...

    async def attach(self, request_id: str, positions: dict[int, Position], incarnation: str) -> ResumedStream:
        """Read a kept stream, each output from its entry in `positions`, or from its start without one.

        `incarnation` names the stream among those of its id, "" does not. Raises ResumeOff, StreamNotFound,
        StreamTakenOver, PositionTooOld, PositionAhead, InvalidRequest.
        """
        ...

    async def load(self, tenant: str) -> TenantLoad:
        """What the tenant has running and waiting. Raises NotReady."""
        ...

    def follow(self, engine: Engine) -> None:
        """Count the tokens of requests as they end in `engine`, if `engine` is in this process."""
        ...


class LocalDesk:
    """The desk in the engine's process, one for all front ends. Construction raises StartupError for a bad file."""

    def __init__(
        self, handle: EngineHandle, config: ServerConfig, metrics: RpcMetrics, files: AccessFiles | None = None
    ) -> None:
        self._refusals = Refusals(metrics.tenant_refused)
        book = (files or AccessFiles(config)).tenants
        self._gates = TenantGates(book, config.admission_wait, self._refusals)
        self._retention = Retention(
            handle, config.resume_seconds, config.resume_bytes, config.resume_tenant_bytes, metrics.stream_gone
        )
        self._handle = handle
        self._usage = TenantUsage(metrics.tenant_tokens, lambda name: self._refusals.bounded(self._gates.label(name)))
        metrics.show_kept(lambda: len(self._retention), lambda: self._retention.bytes)

    def refuse_hopeless(self, tenant: str | None) -> None:
        """Ask the tenant's gate. Raises Overloaded or TenantLockedOut."""
        self._gates.refuse_hopeless(tenant)

    async def enter(self, tenant: str | None, deadline: float | None, work: Work = ONE_SEQUENCE) -> Hold:
        """Wait in the tenant's gate. Raises what `TenantGates.enter` does."""
        return await self._gates.enter(tenant, deadline, work)

    async def open(self, asked: GenerateRequest, tenant: str | None, hold: Hold) -> Reader:
        """Open the stream in `Retention`, and count a refusal for want of room as the tenant's."""
        try:
            return await self._retention.open(asked, tenant, hold)
        except Overloaded as refused:
            if refused.reason == "RESUME_BYTES":
                self._refusals.note(tenant or "", self._gates.label(tenant or ""), refused.reason, refused.message)
            raise

    async def load(self, tenant: str) -> TenantLoad:
        """What the tenant has running and waiting, from the engine's open streams. Raises NotReady."""
        return self._usage.load(tenant, self._handle.require().open_streams)

    def follow(self, engine: Engine) -> None:
        """Have the engine report each stream that ends, so that its tokens are counted for its tenant."""
        if engine.open_streams is not None:
            engine.open_streams.on_end(self._usage.ended)

    async def attach(self, request_id: str, positions: dict[int, Position], incarnation: str) -> Reader:
        """Read the stream that `Retention` keeps. Raises what `Retention.attach` does."""
        return await self._retention.attach(request_id, positions, incarnation)
