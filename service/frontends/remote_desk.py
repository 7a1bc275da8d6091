"""The desk as a front end sees it: tenants are let in, and streams are kept, in the engine process."""

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
    """The `TenantDesk` of `service.calls.desk`. Without `limited` no place is asked for: there is no tenants file."""

    def __init__(self, engine: RemoteEngine, limited: bool) -> None:
        self._engine, self._limited = engine, limited

    def refuse_hopeless(self, tenant: str | None) -> None:
        """Nothing is known here: lines and budgets are the engine process's."""

    async def enter(self, tenant: str | None, deadline: float | None, work: Work = ONE_SEQUENCE) -> Hold:
        """See `TenantDesk.enter`."""
        if not self._limited or tenant is None:
            return Hold()
        number, weight = await self._engine.entered(tenant, deadline, work)
        return Hold(lambda used: self._engine.end(number, used), number, weight=weight)

    async def open(self, asked: GenerateRequest, tenant: str | None, hold: Hold) -> RemoteReader:
        """See `TenantDesk.open`."""
        return await self._engine.resumed(
            "open", asked.request_id, request=to_plain(asked), tenant=tenant, hold=hold.number
        )

    async def attach(self, request_id: str, positions: dict[int, Position]) -> RemoteReader:
        """See `TenantDesk.attach`."""
        places = {str(index): asdict(position) for index, position in positions.items()}
        return await self._engine.resumed("attach", request_id, request_id=request_id, positions=places)

    async def load(self, tenant: str) -> TenantLoad:
        """See `TenantDesk.load`."""
        return from_plain(TenantLoad, await self._engine.call("tenant_load", tenant=tenant))

    def follow(self, engine: Engine) -> None:
        """The engine's process counts."""
