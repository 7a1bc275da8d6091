"""The server: binds, loads, serves, drains. `service.cli.lifecycle` calls it on signals and on the engine's death."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from core.engine.api import Engine
from core.errors import StartupError
from service.access.access_files import AccessFiles
from service.access.audit import Audit
from service.access.auth_interceptor import Authentication, Authorization, needs_no_permission
from service.access.certificate_names import CertificateNames
from service.access.permissions import Permissions, is_public
from service.access.tls_credentials import server_credentials
from service.calls.desk import LocalDesk, TenantDesk
from service.calls.open_calls import OpenCalls
from service.config.server_config import ServerConfig
from service.engine.builder import EngineBuilder, Progress, in_daemon_thread
from service.engine.handle import EngineHandle
from service.gateway.registration import gateway_of
from service.limits.admission import Admission
from service.limits.call_gate import CallGate
from service.limits.memory_gate import MemoryGate, MemoryWatch
from service.limits.request_reads import RequestReads
from service.metrics.rpc import RpcMetrics
from service.pb.slipstream.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)
from service.process.version import installed_version
from service.rpc.channel_options import server_options
from service.rpc.interceptors import AroundInterceptor, HandlerTracker, count_calls, errors_to_statuses
from service.server.connections import Connections
from service.server.health_port import HealthPort
from service.server.metrics_port import MetricsPort
from service.server.served_engine import DRAIN_MARGIN_SECONDS, ServedEngine
from service.server.startup_checks import check
from service.servicers.adapters import AdapterServicer
from service.servicers.control import ControlServicer
from service.servicers.health import LIVENESS, READINESS, HealthServicer
from service.servicers.inference import InferenceServicer
from service.tracing.endpoint import otlp_endpoint

if TYPE_CHECKING:
    from service.tracing.otlp import OtlpTracer

log = logging.getLogger(__name__)

STATUS_FLUSH_SECONDS = 2.0
"""Seconds that ended streams have to write their last status before the transport is closed."""

STOP_GRACE_SECONDS = 1.0


class Server:
    """One gRPC server with its engine and its metrics endpoint.

    `listen` binds both ports and answers health checks; `load` makes it ready; `drain` or `close` ends it. It listens
    before it loads, so that a taken port is noticed at once and liveness is true while weights are read.
    """

    def __init__(
        self,
        config: ServerConfig,
        build: EngineBuilder,
        progress: Progress | None = None,
        counts: RpcMetrics | None = None,
        desk: TenantDesk | None = None,
    ) -> None:
        self.config = config
        # A front end shares its port with others; the engine's process counts its calls and knows its tenants.
        self._counts, self._desk = counts, desk
        self.handle = EngineHandle()
        self.tracker = HandlerTracker()
        self.health = HealthServicer({LIVENESS: True, READINESS: False}, config.write_timeout)
        self.port = 0
        self._served = ServedEngine(config, build, progress, self.handle)
        self._version = installed_version()
        self._files = AccessFiles(config)
        self.metrics = MetricsPort(config, self.handle, self._files)
        metrics = counts or self.metrics.calls
        self.connections = Connections(lambda: {self.port, self.health_port.port})
        self.health_port = HealthPort(config, self.health, metrics, self.connections, shared_port=counts is not None)
        self._leaving: asyncio.Task[None] | None = None
        self._memory = MemoryWatch()
        self._tracer = self._open_tracer()
        self._grpc = self._assemble(metrics)

    def _assemble(self, metrics: RpcMetrics) -> grpc.aio.Server:
        admission = Admission(
            self.config.concurrency_limit, self.config.rate_limit, max_wait=self.config.admission_wait
        )
        self._desk = self._desk or LocalDesk(self.handle, self.config, metrics, self._files)
        calls = OpenCalls(self.handle, self.config, admission, self._desk, metrics)
        options = server_options(self.config, shared_port=self._counts is not None)
        server = grpc.aio.server(interceptors=self._interceptors(calls, metrics), options=options)
        servicer = InferenceServicer(calls, self._version)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        adapters = AdapterServicer(self.handle)
        adapters_pb2_grpc.add_AdapterServiceServicer_to_server(adapters, server)  # type: ignore[no-untyped-call]
        control = ControlServicer(self.handle)
        control_pb2_grpc.add_ControlServiceServicer_to_server(control, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        self._gateway = gateway_of(self.config, calls, self._version)
        if self._gateway is not None:
            self._gateway.register(server)
        if self.config.reflection:
            services = [
                *(
                    service.full_name
                    for module in (inference_pb2, adapters_pb2, control_pb2, health_pb2)
                    for service in module.DESCRIPTOR.services_by_name.values()
                ),
                *(self._gateway.service_names if self._gateway else ()),
                reflection.SERVICE_NAME,
            ]
            reflection.enable_server_reflection(services, server)
        return server

    def _interceptors(self, calls: OpenCalls, metrics: RpcMetrics) -> list[grpc.aio.ServerInterceptor]:
        """The interceptors, outermost first.

        (1) The tracker must outlive the error mapping, and calls are counted by their final code. (2) Callers are
        named and refused before the gates, which count by caller. (3) `RequestReads` is last, so that a refused call
        never has its message read.
        """
        spans = () if self._tracer is None else (self._tracer.around,)
        outer = (self.tracker.around, self.connections.around, count_calls(metrics))
        around = (*outer, *spans, errors_to_statuses, Audit(metrics).around)
        interceptors: list[grpc.aio.ServerInterceptor] = [AroundInterceptor(each) for each in around]
        if self._files.tokens is not None:
            authentication = Authentication(self._files.tokens, self.config.auth_recheck_seconds)
            interceptors.append(AroundInterceptor(authentication.around, spares=is_public))
        if self.config.tls_client_ca is not None:
            names = CertificateNames(self.config.client_names, naming=self._files.tokens is None)
            interceptors.append(AroundInterceptor(names.around))
        authorization = Authorization(Permissions(self.config))
        interceptors.append(AroundInterceptor(authorization.around, spares=needs_no_permission))
        gate = CallGate(self.config, metrics, self._files.tenants, calls.refuse_hopeless)
        interceptors.append(AroundInterceptor(gate.around))
        interceptors.append(AroundInterceptor(MemoryGate(self._memory, metrics).around))
        interceptors.append(RequestReads(self.config.write_timeout))
        return interceptors

    def _open_tracer(self) -> OtlpTracer | None:
        endpoint = otlp_endpoint(self.config.otlp_endpoint, os.environ)
        if endpoint is None:
            return None
        from service.tracing.otlp import OtlpTracer

        return OtlpTracer(endpoint, self._version)

    @property
    def engine(self) -> Engine:
        """The engine; only after `load`."""
        return self._served.engine

    @property
    def metrics_port(self) -> int:
        """The port of the metrics endpoint; 0 before `listen`, and in a front end."""
        return self.metrics.port

    async def listen(self) -> None:
        """Check the checkpoint's files and both ports, bind, and answer health checks. Raises StartupError."""
        if self._counts is None:
            check(self.config)
            self.metrics.listen()
        try:
            await self.health_port.listen()
            self.port = self._bind()
        except StartupError:
            await self.health_port.close()
            self.metrics.close()
            raise
        self._memory.start()
        self.connections.start()
        await self._grpc.start()

    def _bind(self) -> int:
        """Bind the gRPC port, with TLS if there are files for it. Returns the port. Raises StartupError."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        address, tls = f"{host}:{self.config.port}", self._files.certificates
        try:
            if tls is None:
                return self._grpc.add_insecure_port(address)
            return self._grpc.add_secure_port(address, server_credentials(tls))
        except RuntimeError:
            raise StartupError(f"cannot listen on {address} (gRPC)") from None

    async def load(self) -> None:
        """Build and start the engine, then report ready. Raises StartupError."""
        engine = await self._served.load()
        if self._desk is not None:
            self._desk.follow(engine)
        if self._tracer is not None:
            self._tracer.model = engine.model_info.name
        if self._gateway is not None:
            self._gateway.tell()
        engine.control.follow(lambda _: self._tell_readiness())

    def refuse_readiness(self) -> None:
        """First step of a drain: report not ready, so that clients send new work elsewhere. Liveness stays true."""
        self.handle.draining = True
        self.health.set(READINESS, False)

    def heard(self, *, alive: bool, ready: bool) -> None:
        """In a front end: set readiness and liveness by the silence of the engine's process.

        Without `ready` calls are refused with EngineSilent. A server that drains or loads stays not ready.
        """
        self.handle.silent = not ready
        self.health.set(LIVENESS, alive)
        self._tell_readiness()

    def _tell_readiness(self) -> None:
        """Ready is a server that has its weights and wants requests. One that draws back never is again."""
        handle = self.handle
        engine, leaves = handle.engine, handle.draining or handle.silent
        # A front end that was started again may load while its server drains.
        self.health.set(READINESS, engine is not None and not leaves and engine.stats.activity.invites)

    def turn_away(self, grace: float) -> None:
        """Second step of a drain: close the port, and have clients leave by GOAWAY. Open calls go on.

        Staying and refusing calls would be worse for a client that spreads its calls by itself: it would come back with
        every second call, and with its retries, until they are spent.
        """
        self._leaving = asyncio.create_task(self._grpc.stop(grace + DRAIN_MARGIN_SECONDS + STATUS_FLUSH_SECONDS))

    async def drain(self, linger: float, grace: float) -> int:
        """Report not ready, take requests for `linger` seconds more, let streams finish within `grace` seconds, close.

        Returns the number of streams cut. The linger is there because clients learn of the drain only after a while.
        Clients that watch readiness have left when it ends.
        """
        self.refuse_readiness()
        await asyncio.sleep(linger)
        self.turn_away(grace)
        cut = await self._served.drain(grace)
        await self.close()
        return cut

    async def die(self) -> None:
        """The engine is dead: report neither ready nor alive, then close."""
        self.handle.draining = True
        for service in (LIVENESS, READINESS):
            self.health.set(service, False)
        await self.close()

    async def close(self, grace: float = STOP_GRACE_SECONDS) -> None:
        """End watches, let handlers write their statuses, stop the transport, then the engine. Each wait is bounded."""
        self.health.close()
        self._memory.close()
        self.connections.close()
        if self._gateway is not None:
            self._gateway.close()
        if grace > 0:
            await self.tracker.wait_idle(STATUS_FLUSH_SECONDS)
        await self._grpc.stop(grace)
        if self._leaving is not None:
            await self._leaving
        # stop() returns before the handlers that it cancelled have run their finally blocks.
        if not await self.tracker.wait_idle(STATUS_FLUSH_SECONDS):
            log.warning("%d calls did not end in time", len(self.tracker))
        await self._served.stop(grace)
        await self.health_port.close()
        if self._tracer is not None:
            await in_daemon_thread(self._tracer.close)
        # This blocks the loop, which has nothing else to do.
        self.metrics.close()
