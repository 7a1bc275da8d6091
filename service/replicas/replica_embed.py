"""An embedding request of a replica: an `EmbedCall` of `core.engine.api`, and its share of the router's book."""

from __future__ import annotations

import time
from collections.abc import Callable

from core.engine.api import EmbedCall
from core.types.io import EmbedResult
from core.types.streams import StreamInfo
from service.replicas.replica_stream import WAITING
from service.replicas.router import Share


class ReplicaEmbedCall:
    """`share` is ended, and `on_end` called with the id, once the vectors are there or the call is closed."""

    def __init__(self, call: EmbedCall, adapter: str, share: Share, on_end: Callable[[str], None]) -> None:
        self.request_id = call.request_id
        self._call, self._adapter, self._share, self._on_end = call, adapter, share, on_end
        self._arrived_at = time.monotonic()

    def info(self) -> StreamInfo:
        """The request as operators see it; how many tokens it has is the engine's knowledge until it ends."""
        return StreamInfo(self.request_id, WAITING, 0, 0, self._arrived_at, self._adapter)

    async def result(self) -> EmbedResult:
        """Wait for every vector; call it once. Raises what `EmbedCall.result` does."""
        try:
            return await self._call.result()
        finally:
            self._over()

    async def aclose(self) -> None:
        """End the call in the engine, which aborts what still runs. Idempotent."""
        self._over()
        await self._call.aclose()

    def _over(self) -> None:
        if not self._share.ended:
            self._share.end()
            self._on_end(self.request_id)
