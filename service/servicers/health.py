"""`grpc.health.v1` over two states: liveness (service "") and readiness (the inference service).

Written here for three reasons. (1) The packaged servicer holds a lock while it writes to a watcher, so one watcher that
does not read could stall every change of state, a drain included. (2) Its graceful shutdown also clears liveness.
(3) An open Watch would hold up `server.stop`; here `close` ends the watches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from core.errors import Draining, SlowConsumer
from service.errors import UnknownService

LIVENESS = ""
READINESS = "slipstream.v1.InferenceService"

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

Context = grpc.aio.ServicerContext[Any, Any]


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Check, Watch and List of the services given at construction; the set of services never changes."""

    def __init__(self, serving: Mapping[str, bool], write_timeout: float) -> None:
        self._serving = dict(serving)
        self._write_timeout = write_timeout
        self._changed = asyncio.Event()
        self._closed = False

    def set(self, service: str, serving: bool) -> None:
        """Change one service's state and wake the watchers. Never waits for them."""
        assert service in self._serving, "the set of services is fixed"
        if self._serving[service] != serving:
            self._serving[service] = serving
            self._wake()

    def close(self) -> None:
        """End every Watch with Draining, in gRPC UNAVAILABLE, after its last state was written."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        woken, self._changed = self._changed, asyncio.Event()
        woken.set()

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        serving = self._serving.get(service)
        if serving is None:
            return _UNKNOWN
        return _SERVING if serving else _NOT_SERVING

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """State of one service. Raises UnknownService, in gRPC NOT_FOUND."""
        if request.service not in self._serving:
            raise UnknownService("unknown service")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        """States of all services."""
        return health_pb2.HealthListResponse(
            statuses={name: health_pb2.HealthCheckResponse(status=self._status(name)) for name in self._serving}
        )

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Write the state now and after each change; SERVICE_UNKNOWN for an unknown service.

        A watcher that reads slowly may miss states in between. Raises Draining when the server closes, SlowConsumer.
        """
        sent: health_pb2.HealthCheckResponse.ServingStatus | None = None
        while True:
            # Read together, with no await between them and the wait: so no change is missed.
            changed, status = self._changed, self._status(request.service)
            if status != sent:
                await self._write(context, status)
                sent = status
            elif self._closed:
                raise Draining("the server is shutting down")
            else:
                await changed.wait()

    async def _write(self, context: Context, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        try:
            async with asyncio.timeout(self._write_timeout):
                await context.write(health_pb2.HealthCheckResponse(status=status))
        except TimeoutError:
            raise SlowConsumer("the client does not read its stream") from None
