"""How long a command waits for the answers of a server that gives them late or not at all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import grpc.aio
import pytest

from service.access.tls_credentials import ClientTls
from service.cli.commands import waiting
from service.cli.commands.waiting import wait_until_loaded
from service.client import SlipstreamClient
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.pb.slipstream.v1 import inference_pb2_grpc
from tests.security.certificates import Authority, needs_openssl
from tests.support.until import PATIENCE
from tests.support.within import within

LOADING, READY = pb.SERVER_STATE_STARTING, pb.SERVER_STATE_READY


class Scripted(inference_pb2_grpc.InferenceServiceServicer):
    """Says `states` in turn; None is a question that is never answered, and so is each one after the last."""

    def __init__(self, states: tuple[Any, ...]) -> None:
        self._states = iter(states)
        self.remaining: list[float | None] = []
        """Seconds that each question left."""

    async def GetServerInfo(self, request: Any, context: Any) -> pb.GetServerInfoResponse:
        self.remaining.append(context.time_remaining())
        state = next(self._states, None)
        if state is None:
            await asyncio.Event().wait()
        return pb.GetServerInfoResponse(state=state)


@asynccontextmanager
async def answering(*states: Any) -> AsyncIterator[tuple[Scripted, str]]:
    """Such a server, and where it is."""
    server, servicer = grpc.aio.server(), Scripted(states)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def waited(target: str, seconds: float) -> str:
    """What the command says if it gives up; empty if it goes on to its call."""
    async with SlipstreamClient(target) as client, within(PATIENCE, "the wait ends"):
        try:
            await wait_until_loaded(client, target, seconds)
        except click.ClickException as told:
            return told.message
    return ""


async def test_a_question_that_is_not_answered_while_it_loads_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "ANSWER_SECONDS", 1.0)
    async with answering(LOADING, None, LOADING, READY) as (server, target):
        assert await waited(target, 60.0) == ""
    assert len(server.remaining) == 4


async def test_a_server_that_stops_answering_is_waited_for_as_long_as_was_asked() -> None:
    async with answering(LOADING) as (server, target):
        told = await waited(target, 1.5)
    assert told == (
        f"the server at {target} was loading and no longer answers: waited 1.5 s, the last 1.5 s without an answer; "
        "its log may say why"
    )
    assert all(left is not None and left <= 1.5 for left in server.remaining[1:]), "no question outlasts the wait"


@needs_openssl
async def test_a_server_with_another_certificate_is_not_called_missing(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path, "ca"), Authority(tmp_path, "other")
    pair = other.issue("server", names=("localhost",))
    keys = grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.cert.read_bytes())])
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", keys)
    await server.start()
    try:
        async with SlipstreamClient(f"localhost:{port}", tls=ClientTls(authority.cert.read_bytes())) as client:
            with pytest.raises(click.ClickException) as told:
                await wait_until_loaded(client, f"localhost:{port}", 0.0)
    finally:
        await server.stop(0)
    assert told.value.message.startswith("--tls-ca, --tls-cert: the server and this client do not accept")
    assert "CERTIFICATE_VERIFY_FAILED" in told.value.message


@pytest.mark.parametrize("seconds", [0.0, 300.0])
async def test_a_port_that_says_nothing_is_no_server(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "ANSWER_SECONDS", 0.5)
    # The kernel accepts, as it does for a process that is stopped.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        told = await waited(target, seconds)
    advice = "start one with: slipstream serve"
    assert told == f"no server answers at {target}; {advice} (no answer within 0.5 s)"
