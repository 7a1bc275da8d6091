"""`grpc.health.v1` alone, in plain text, on a port of its own: a kubelet's gRPC probe cannot speak TLS.

Nothing else is served there, so the open port shows only that the server lives and whether it is ready.
"""

from __future__ import annotations

import grpc.aio
from grpc_health.v1 import health_pb2_grpc  # type: ignore[import-untyped]

from core.errors import StartupError
from service.config.server_config import ServerConfig
from service.limits.call_gate import CallGate
from service.limits.request_reads import PUBLIC, RequestReads
from service.metrics.rpc import RpcMetrics
from service.rpc.channel_options import server_options
from service.rpc.interceptors import AroundInterceptor, errors_to_statuses
from service.server.connections import Connections
from service.servicers.health import HealthServicer


class HealthPort:
    """Serves `health` on `config.health_port`; does nothing if none is configured. `port` is the port in use."""

    def __init__(
        self,
        config: ServerConfig,
        health: HealthServicer,
        metrics: RpcMetrics,
        connections: Connections,
        *,
        shared_port: bool = False,
    ) -> None:
        self.port = 0
        self._connections = connections
        self._shared_port = shared_port
        self._config, self._health, self._metrics = config, health, metrics
        self._grpc: grpc.aio.Server | None = None

    async def listen(self) -> None:
        """Bind the port and answer from now on. Raises StartupError for a taken port."""
        if self._config.health_port is None:
            return
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        address = f"{host}:{self._config.health_port}"
        around = (self._connections.around, errors_to_statuses, CallGate(self._config, self._metrics).around)
        reads = RequestReads(self._config.write_timeout)
        server = grpc.aio.server(
            interceptors=[*map(AroundInterceptor, around), reads],
            options=server_options(self._config, shared_port=self._shared_port, largest_message=PUBLIC.most_bytes),
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            self.port = server.add_insecure_port(address)
        except RuntimeError:
            raise StartupError(f"cannot listen on {address} (health)") from None
        await server.start()
        self._grpc = server

    async def close(self) -> None:
        """Close all connections at once. `Server.close` has closed the servicer before, so watches have ended."""
        if self._grpc is not None:
            await self._grpc.stop(None)
