"""The desk in a front end: every question goes to the engine process, which admits tenants and keeps streams."""

from __future__ import annotations

from dataclasses import asdict

from core.engine.api import Engine
from core.types.io import GenerateRequest
from core.types.plain import to_plain
from service.frontends.plain_json import from_plain
from service.frontends.remote_engine import RemoteEngine
from service.frontends.remote_stream import RemoteReader
from service.limits.hold import Hold
from service.limits.usage import TenantLoad
from service.limits.work import ONE_SEQUENCE, Work
from service.wire.position import Position


class RemoteDesk:
    """The `TenantDesk` of `service.calls.desk` in a front end.

    `limited`: there is a tenants file. Without one tenants have no limits, so `enter` does not ask the engine process.
    """

    def __init__(self, engine: RemoteEngine, limited: bool) -> None:
        self._engine, self._limited = engine, limited

    def refuse_hopeless(self, tenant: str | None) -> None:
        """Never raises: lines and budgets are in the engine process, and `enter` asks there."""

    async def enter(self, tenant: str | None, deadline: float | None, work: Work = ONE_SEQUENCE) -> Hold:
        """Wait in the engine process for a place in the tenant's gate. Raises what `TenantGates.enter` does there."""
        if not self._limited or tenant is None:
            return Hold()
        number, weight = await self._engine.entered(tenant, deadline, work)
        return Hold(lambda used: self._engine.end(number, used), number, weight=weight)

    async def open(self, asked: GenerateRequest, tenant: str | None, hold: Hold) -> RemoteReader:
        """Open a kept stream in the engine process, which moves `hold` there. Raises what `Retention.open` does."""
        return await self._engine.resumed(
            "open", asked.request_id, request=to_plain(asked), tenant=tenant, hold=hold.number
        )

    async def attach(self, request_id: str, positions: dict[int, Position], incarnation: str) -> RemoteReader:
        """Read a kept stream from `positions` on. Raises what `Retention.attach` does in the engine process."""
        places = {str(index): asdict(position) for index, position in positions.items()}
        return await self._engine.resumed(
            "attach", request_id, request_id=request_id, positions=places, incarnation=incarnation
        )

    async def load(self, tenant: str) -> TenantLoad:
        """Ask the engine process what the tenant has running and waiting. Raises NotReady."""
        return from_plain(TenantLoad, await self._engine.call("tenant_load", tenant=tenant))

    def follow(self, engine: Engine) -> None:
        """No-op: the engine's process counts the tokens of requests."""
