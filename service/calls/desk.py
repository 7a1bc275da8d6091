"""What a servicer asks beside the engine: to let a tenant in, and for streams that outlive their call.

Both need to see all calls of a tenant, so they are done where the engine is: by `LocalDesk` in its process, by
`service.frontends.remote_desk` in a front end, which asks there.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from core.engine.api import Engine, OutputStream
from core.errors import Overloaded
from core.types.io import GenerateRequest
from service.access.access_files import AccessFiles
from service.config.server_config import ServerConfig
from service.engine.slot import EngineSlot
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

    Use `async with`: if another call attaches, what is awaited inside ends with StreamTakenOver. `expected` is the
    number of terminals still to come.
    """

    want_text: bool

    @property
    def expected(self) -> int: ...

    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class TenantDesk(Protocol):
    """Ids are the engine's: within their tenant."""

    def refuse_hopeless(self, tenant: str | None) -> None:
        """Raise what `enter` would raise at once, as far as it is known here, whatever the work is."""
        ...

    async def enter(self, tenant: str | None, deadline: float | None, work: Work = ONE_SEQUENCE) -> Hold:
        """Wait for the tenant's turn with so much work. Raises what `TenantGates.enter` does."""
        ...

    async def open(self, asked: GenerateRequest, tenant: str | None, hold: Hold) -> ResumedStream:
        """See `Retention.open`."""
        ...

    async def attach(self, request_id: str, positions: dict[int, Position]) -> ResumedStream:
        """See `Retention.attach`."""
        ...

    async def load(self, tenant: str) -> TenantLoad:
        """What the tenant has running and waiting. Raises NotReady."""
        ...

    def follow(self, engine: Engine) -> None:
        """Count the tokens of requests as they end in `engine`, where that is in this process."""
        ...


class LocalDesk:
    """The desk in the engine's process: one for all its front ends. Raises StartupError for a bad tenants file."""

    def __init__(
        self, slot: EngineSlot, config: ServerConfig, metrics: RpcMetrics, files: AccessFiles | None = None
    ) -> None:
        self._refusals = Refusals(metrics.tenant_refused)
        book = (files or AccessFiles(config)).tenants
        self._gates = TenantGates(book, config.admission_wait, self._refusals)
        self._retention = Retention(
            slot, config.resume_seconds, config.resume_bytes, config.resume_tenant_bytes, metrics.stream_gone
        )
        self._slot = slot
        self._usage = TenantUsage(metrics.tenant_tokens, lambda name: self._refusals.bounded(self._gates.label(name)))
        metrics.show_kept(lambda: len(self._retention), lambda: self._retention.bytes)

    def refuse_hopeless(self, tenant: str | None) -> None:
        """See `TenantDesk.refuse_hopeless`."""
        self._gates.refuse_hopeless(tenant)

    async def enter(self, tenant: str | None, deadline: float | None, work: Work = ONE_SEQUENCE) -> Hold:
        """See `TenantDesk.enter`."""
        return await self._gates.enter(tenant, deadline, work)

    async def open(self, asked: GenerateRequest, tenant: str | None, hold: Hold) -> Reader:
        """See `TenantDesk.open`."""
        try:
            return await self._retention.open(asked, tenant, hold)
        except Overloaded as refused:
            if refused.reason == "RESUME_BYTES":
                self._refusals.note(tenant or "", self._gates.label(tenant or ""), refused.reason, refused.message)
            raise

    async def load(self, tenant: str) -> TenantLoad:
        """See `TenantDesk.load`."""
        return self._usage.load(tenant, self._slot.require().open_streams)

    def follow(self, engine: Engine) -> None:
        """See `TenantDesk.follow`."""
        if engine.open_streams is not None:
            engine.open_streams.on_end(self._usage.ended)

    async def attach(self, request_id: str, positions: dict[int, Position]) -> Reader:
        """See `TenantDesk.attach`."""
        return await self._retention.attach(request_id, positions)
