"""Health checks on a port of their own: plain text beside TLS, nothing but health, one for all front ends."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.errors import ConfigError, StartupError
from service.cli.cli import cli
from service.client import SlipstreamClient
from service.config.server_config import ServerConfig
from service.limits.request_reads import PUBLIC
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.server.server import Server
from service.servicers.health import LIVENESS, READINESS
from tests.chaos.device import Faults
from tests.chaos.process import ServerProcess
from tests.security.certificates import Authority, needs_openssl
from tests.security.half_sender import HalfSender
from tests.support.fakes.fake_engine import FakeEngine, held
from tests.support.ports import free_port
from tests.support.servers import Serve, listening
from tests.support.until import PATIENCE, until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def asked(port: int) -> tuple[int, int]:
    """Liveness and readiness as a kubelet asks for them: a new connection without TLS each time."""
    answers = []
    for service in (LIVENESS, READINESS):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE)
            answers.append(answer.status)
    return answers[0], answers[1]


def port_of(server: Server) -> int:
    assert server.health_port is not None
    return server.health_port.port


async def test_it_answers_while_loading_when_ready_and_while_draining(config: Callable[..., ServerConfig]) -> None:
    gate = asyncio.Event()
    async with (
        listening(Server(config(health_port=0), lambda *_: FakeEngine(held(gate)))) as server,
        SlipstreamClient(f"127.0.0.1:{server.port}") as client,
    ):
        assert await asked(port_of(server)) == (SERVING, NOT_SERVING)
        await server.load()
        assert await asked(port_of(server)) == (SERVING, SERVING)
        running = asyncio.create_task(client.complete("hi"))
        await until(lambda: server.engine.live_requests)
        draining = asyncio.create_task(server.drain(0.0, PATIENCE))
        await asyncio.sleep(0)
        assert await asked(port_of(server)) == (SERVING, NOT_SERVING)
        gate.set()
        await running
        await draining
        with pytest.raises(grpc.aio.AioRpcError):
            await asked(port_of(server))


async def test_nothing_else_is_served_there(serve: Serve) -> None:
    async with serve(health_port=0) as serving:
        async with SlipstreamClient(f"127.0.0.1:{port_of(serving.server)}") as client:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port_of(serving.server)}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="nonesuch"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watch_does_not_hold_up_the_end(serve: Serve) -> None:
    async with serve(health_port=0) as serving:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port_of(serving.server)}") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            async with asyncio.timeout(PATIENCE):
                await serving.server.close(grace=0)


async def test_a_taken_port_and_a_bad_number_are_refused(
    config: Callable[..., ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = Server(config(health_port=taken.getsockname()[1]), lambda *_: FakeEngine())
        with pytest.raises(StartupError, match=r"cannot listen on .* \(health\)"):
            await server.listen()
        # What it opened before the other port was found taken is closed again: taken since the ports were looked at.
        monkeypatch.setattr("service.server.server.check", lambda config: None)
        server = Server(config(port=taken.getsockname()[1], health_port=0), lambda *_: FakeEngine())
        with pytest.raises(StartupError, match=r"cannot listen on .* \(gRPC\)"):
            await server.listen()
        assert port_of(server) > 0
        try:
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await asked(port_of(server))
        finally:
            # A server that is left open keeps the process of the tests from its end.
            await server.health_port.close()
    with pytest.raises(ConfigError, match="at most 65535"):
        config(health_port=65536)


@needs_openssl
async def test_it_is_plain_text_where_the_other_port_is_not(serve: Serve, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    pair = authority.issue("server")
    async with serve(health_port=0, tls_cert=str(pair.cert), tls_key=str(pair.key)) as serving:
        assert await asked(port_of(serving.server)) == (SERVING, SERVING)
        with pytest.raises(grpc.aio.AioRpcError):
            await asked(serving.server.port)


async def test_the_command_says_it_with_its_exit_code(config: Callable[..., ServerConfig]) -> None:
    server = Server(config(health_port=0), lambda *_: FakeEngine())

    async def run(*args: str) -> tuple[int, str]:
        command = ("health", "--server", f"127.0.0.1:{port_of(server)}", *args)
        result = await asyncio.to_thread(CliRunner().invoke, cli, command)
        return result.exit_code, result.output.strip()

    async with listening(server):
        assert await run() == (1, "NOT_SERVING")
        assert await run("--live") == (0, "SERVING")
        await server.load()
        assert await run() == (0, "SERVING")
        await server.close(grace=0)
        assert await run("--timeout", "0.5") == (1, "UNAVAILABLE")


async def test_front_ends_have_one_between_them_and_it_follows_the_drain() -> None:
    port = free_port()
    server = ServerProcess(Faults(step_seconds=0.005), frontends=1, health_port=port, drain_linger=1.0, drain_grace=1)
    try:
        await asyncio.to_thread(server.wait_ready)
        assert await asked(port) == (SERVING, SERVING)
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            while await asked(port) != (SERVING, NOT_SERVING):
                await asyncio.sleep(0.01)
        assert await asyncio.to_thread(server.process.wait, 2 * PATIENCE) == 0
    finally:
        server.close()


async def test_a_large_message_is_refused_by_its_header(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that health checks are asked takes more than a few KiB, and the rest of a larger message is not read."""
    monkeypatch.setattr(PUBLIC, "seconds", 3600.0)
    monkeypatch.setattr(PUBLIC, "contended_seconds", 3600.0)
    async with serve(health_port=0) as serving:
        sender = await HalfSender.connect(port_of(serving.server), "127.0.0.9")
        try:
            for _ in range(4):
                sender.begin("/grpc.health.v1.Health/Check", 4 * 1024 * 1024)
            async with asyncio.timeout(PATIENCE):
                await sender.until_ended(4)
        finally:
            await sender.close()


async def test_the_main_port_takes_small_messages_only_for_what_needs_no_token(serve: Serve) -> None:
    async with serve() as serving:
        stub = health_pb2_grpc.HealthStub(serving.client.channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Check(health_pb2.HealthCheckRequest(service="x" * 5000))
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
