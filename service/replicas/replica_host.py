"""A replica's own side of the connection: runs its calls, and tells what the server needs to know of its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from core.errors import StartupError
from core.types.plain import to_plain
from core.types.streams import StreamInfo
from service.calls.desk import TenantDesk
from service.engine.handle import EngineHandle
from service.frontends.host import METHODS, FrontEndHost, Method
from service.frontends.wire import Kind, pack_json
from service.metrics.rpc import RpcMetrics

HISTOGRAMS_EVERY: Final = 10
"""Of so many snapshots one has the histograms, which take longer to write than all the rest."""
OF_THE_DESK: Final = frozenset({"enter", "open", "attach", "tenant_load"})
"""Done by the server itself, which sees all replicas."""


class ReplicaHost(FrontEndHost):
    """A `FrontEndHost` for the server, which may also drain and stop the engine. Event-loop thread only."""

    def __init__(
        self, handle: EngineHandle, desk: TenantDesk, metrics: RpcMetrics, on_lost: Callable[[], None]
    ) -> None:
        super().__init__(handle, desk, metrics, on_lost)
        self.stopped = asyncio.Event()
        """Set once the server has had the engine stopped; the answer is on its way then."""

    @property
    def methods(self) -> Mapping[str, Method]:
        """What the server may call."""
        return _METHODS

    def follow(self, handle: EngineHandle) -> None:
        """Tell of each request that ends from now on."""
        streams = handle.require().open_streams
        if streams is not None:
            streams.on_end(self._ended)

    def _ended(self, info: StreamInfo) -> None:
        # Past `send`, which would read streams: the engine calls this in the middle of a step's results.
        self.link.send(pack_json(Kind.ENDED, list(info)))

    def tell_loading(self, stage: str, part: float) -> None:
        """Tell how far the load is."""
        self.send(Kind.LOADING, [stage, part])

    def tell_failed(self, error: StartupError) -> None:
        """Tell why the engine cannot start."""
        told = {"error": type(error).__name__, "message": error.message, "exit_code": error.exit_code}
        self.send(Kind.FAILED, told)

    def tell_state(self, handle: EngineHandle, count: int) -> None:
        """Send the `count`-th snapshot. What the peer has not read is not added to: the next one replaces it."""
        if self.link.full:
            return
        stats = handle.stats if count % HISTOGRAMS_EVERY == 0 else replace(handle.stats, histograms={})
        live = 0 if handle.engine is None else handle.engine.live_requests
        told = {"state": handle.state.value, "draining": False, "leaving": False, "live": live}
        self.send(Kind.STATE, told | {"stats": to_plain(stats)})

    async def _drain(self, _number: int, value: dict[str, Any]) -> int:
        return await self._engine.drain(value["timeout"])

    async def _stop(self, _number: int, _value: dict[str, Any]) -> None:
        await self._engine.stop()
        self.stopped.set()


_METHODS: Final[Mapping[str, Method]] = {
    **{name: method for name, method in METHODS.items() if name not in OF_THE_DESK},
    "drain": ReplicaHost._drain,
    "stop": ReplicaHost._stop,
}
