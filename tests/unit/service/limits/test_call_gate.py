"""The gate: every method passes it, what a caller has open is bounded, and refusals come before messages are read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from core.errors import Overloaded, Unsupported
from service.access.caller import caller_name
from service.access.permissions import METHODS, Permission
from service.client import CallFailed, SlipstreamClient
from service.config.server_config import ServerConfig
from service.limits.call_gate import CallGate
from service.limits.call_kinds import FEW, KINDS, Kind
from service.metrics.rpc import CALL_KINDS, RpcMetrics
from service.server.server import Server
from tests.security import methods
from tests.support.fakes.fake_engine import FakeEngine, held
from tests.support.fakes.granted import granted
from tests.support.servers import ONCE, Serve, loaded
from tests.support.until import PATIENCE, until
from tests.support.within import within

GENERATE = "/slipstream.v1.InferenceService/Generate"
TOKENIZE = "/slipstream.v1.InferenceService/Tokenize"
ALICE, BOB = (((("authorization", f"Bearer {letter * 20}"),)) for letter in "ab")


def tenants(folder: Path, limits: str) -> dict[str, str]:
    (folder / "tokens").write_text(f"alice:{'a' * 20}\nbob:{'b' * 20}\n")
    (folder / "tenants").write_text(limits)
    return {"auth_token_file": str(folder / "tokens"), "tenants_file": str(folder / "tenants")}


async def test_every_method_that_is_registered_has_its_place(config: Callable[..., ServerConfig]) -> None:
    with methods.registered() as found:
        Server(config(reflection=True), lambda *_: FakeEngine())
    assert set(found) == set(KINDS), "a new method needs a line in service/limits/call_kinds.py; one that is gone, none"
    assert len(found) >= 30, "of both dialects as well"
    assert {kind.value for kind in Kind} == set(CALL_KINDS)


async def test_a_method_without_a_place_is_not_served(
    config: Callable[..., ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new method, of whatever service, that its author has forgotten to put in the table."""
    served: list[str] = []

    async def new(_request: Any, _context: Any) -> Any:
        served.append("new")
        return b""

    permitted = {**METHODS, "/slipstream.v1.Other/New": Permission.CALL}
    monkeypatch.setattr("service.access.auth_interceptor.METHODS", permitted)
    server = Server(config(), lambda *_: FakeEngine())
    handlers = {"New": grpc.unary_unary_rpc_method_handler(new)}
    server._grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("slipstream.v1.Other", handlers),))
    async with loaded(server), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await channel.unary_unary("/slipstream.v1.Other/New")(b"")
    assert (failed.value.code().name, CallFailed(failed.value).reason) == ("UNIMPLEMENTED", "UNSUPPORTED")
    assert not served


async def test_a_tenant_that_is_locked_out_can_call_nothing(
    config: Callable[..., ServerConfig], tmp_path: Path
) -> None:
    """Every registered method, reflection and dialects included, but health, whose callers have no names."""
    with methods.registered() as found:
        server = Server(
            config(reflection=True, admins="alice", **tenants(tmp_path, "alice: {concurrent_requests: 0}")),
            lambda *_: FakeEngine(),
        )
    async with loaded(server), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        codes = {
            method: await methods.code_of(channel, method, handler, metadata=ALICE) for method, handler in found.items()
        }
        others = {
            method: await methods.code_of(channel, method, found[method], metadata=BOB)
            for method in (TOKENIZE, "/slipstream.v1.InferenceService/GetLoad")
        }
    opened = {method for method, code in codes.items() if code is not grpc.StatusCode.PERMISSION_DENIED}
    assert opened == {method for method in found if KINDS[method] is Kind.HEALTH}
    assert set(others.values()) == {grpc.StatusCode.OK}


async def test_a_lock_holds_for_new_calls_of_connections_that_are_open(serve: Serve, tmp_path: Path) -> None:
    named = tenants(tmp_path, "alice: {concurrent_requests: 5}")
    async with serve(FakeEngine(held(asyncio.Event(), after=1)), **named) as serving:
        async with SlipstreamClient(serving.target, token="a" * 20) as alice:
            stream = alice.generate("hi")
            await anext(stream)
            Path(named["tenants_file"]).write_text("alice: {concurrent_requests: 0}")
            for call in (alice.tokenize("x"), alice.load(), alice.abort("x"), anext(alice.attach("x"))):
                with pytest.raises(CallFailed) as failed:
                    await call  # type: ignore[misc]
                assert (failed.value.code.name, failed.value.reason) == ("PERMISSION_DENIED", "TENANT_LOCKED_OUT")
                assert failed.value.retry_after is None, "coming back does not help"
            series = 'slipstream_tenant_refusals_total{reason="TENANT_LOCKED_OUT",tenant="alice"}'
            assert await serving.metric(series) == 4
            await stream.aclose()


class Gate:
    """A gate with callers that the test plays."""

    def __init__(self, refuse_hopeless: Callable[[str | None], None] = lambda _: None, **settings: Any) -> None:
        self.registry = CollectorRegistry()
        config = ServerConfig.of(**settings)
        self.gate = CallGate(config, RpcMetrics(self.registry), None, refuse_hopeless)
        self.stack = AsyncExitStack()

    async def open(self, method: str, peer: str = "ipv4:10.0.0.1:1", name: str | None = None) -> None:
        """One more call that stays open."""
        caller_name.set(name)
        context: Any = SimpleNamespace(peer=lambda: peer)
        await self.stack.enter_async_context(self.gate.around(method, context))

    def turned_away(self, kind: Kind, reason: str) -> float:
        labels = {"kind": kind.value, "reason": reason}
        return self.registry.get_sample_value("slipstream_calls_turned_away_total", labels) or 0.0


async def test_what_one_caller_has_open_is_bounded_over_all_its_connections() -> None:
    gate = Gate()
    for number in range(FEW):
        await gate.open(TOKENIZE, f"ipv4:10.0.0.1:{number}")
    with pytest.raises(Overloaded) as refused:
        await gate.open(TOKENIZE, "ipv4:10.0.0.1:9999")
    assert refused.value.reason == "OPEN_CALLS" and refused.value.retry_after > 0
    assert gate.turned_away(Kind.TEXT, "OPEN_CALLS") == 1
    await gate.open("/slipstream.v1.InferenceService/GetLoad", "ipv4:10.0.0.1:9999")
    await gate.open(TOKENIZE, "ipv4:10.0.0.2:1")
    await gate.open(TOKENIZE, "ipv4:10.0.0.1:1", name="alice")
    await gate.stack.aclose()
    assert not gate.gate._open, "nothing is kept of callers that are gone"
    await gate.open(TOKENIZE)


async def test_one_caller_alone_may_fill_batch_and_queue() -> None:
    gate = Gate(max_running_requests=10, max_queued_requests=20)
    most = 10 + 20 + 256 + FEW
    for _ in range(most):
        await gate.open(GENERATE)
    with pytest.raises(Overloaded):
        await gate.open(GENERATE)
    rejected = gate.registry.get_sample_value("slipstream_requests_rejected_total", {"reason": "OPEN_CALLS"})
    assert rejected == 1, "work that is refused is counted as before"
    await gate.stack.aclose()


async def test_only_work_is_asked_whether_it_could_be_admitted() -> None:
    asked: list[str | None] = []

    def full(tenant: str | None) -> None:
        asked.append(tenant)
        raise Overloaded("the waiting queue is full", reason="QUEUE_FULL")

    gate = Gate(full)
    await gate.open(TOKENIZE)
    with pytest.raises(Overloaded):
        await gate.open(GENERATE, name="alice")
    assert asked == ["alice"] and not [kind for _, kind in gate.gate._open if kind is Kind.WORK]
    with pytest.raises(Unsupported):
        await gate.open("/slipstream.v1.InferenceService/Unheard")
    await gate.stack.aclose()


class Full(FakeEngine):
    """Its queue has no room."""

    def full(self, tenant: str) -> bool:
        """Always."""
        return True

    async def generate(self, request: Any) -> Any:
        raise AssertionError("it is refused before")


async def test_a_full_queue_refuses_before_the_message_is_read(serve: Serve) -> None:
    """The refusal comes although the message never does."""
    async with serve(Full()) as serving:
        client = SlipstreamClient(serving.target, ONCE)
        call: Any = client.channel.stream_stream(GENERATE)()
        async with within(PATIENCE, "the refusal does not wait for the message"):
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = dict(await call.trailing_metadata())
        await client.close()
        assert int(trailers["grpc-retry-pushback-ms"]) > 0
        assert await serving.metric('slipstream_requests_rejected_total{reason="QUEUE_FULL"}') == 1
        assert await serving.metric('slipstream_calls_turned_away_total{kind="work",reason="QUEUE_FULL"}') == 1


async def test_watches_of_one_address_are_bounded_on_both_ports(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.limits.call_kinds.FEW", 3)
    async with serve(health_port=0) as serving:
        assert serving.server.health_port is not None
        for port in (serving.server.port, serving.server.health_port.port):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
                for watch in watches:
                    await watch.read()
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await stub.Check(health_pb2.HealthCheckRequest())
                assert CallFailed(failed.value).reason == "OPEN_CALLS"
                watches.pop().cancel()
                async with within(PATIENCE, "a place is given back"):
                    while await methods.code_of(channel, "/grpc.health.v1.Health/Check", HANDLER) is not OK:
                        await asyncio.sleep(0)
                for watch in watches:
                    watch.cancel()
        assert await serving.metric('slipstream_calls_turned_away_total{kind="health",reason="OPEN_CALLS"}') >= 2


async def test_one_connection_with_more_calls_in_hand_than_batches_are_large_loses_none(serve: Serve) -> None:
    """gRPC refuses at random once a connection is at its limit: at one of 256 this lost 52 to 66 of its 2,400 calls."""
    clients, rounds = 400, 6
    ended: list[grpc.StatusCode] = []
    async with serve(max_concurrent_requests=clients) as serving:
        stub = SlipstreamClient(serving.target, ONCE)

        async def ask() -> None:
            for _ in range(rounds):
                try:
                    await stub.complete("hi", max_tokens=1)
                except CallFailed as failed:
                    ended.append(failed.code)

        async with stub:
            await asyncio.gather(*(ask() for _ in range(clients)))
    assert ended == []


OK = grpc.StatusCode.OK
HANDLER = grpc.unary_unary_rpc_method_handler(lambda *_: None)


async def test_one_callers_texts_keep_nobody_elses_waiting(serve: Serve, tmp_path: Path) -> None:
    """The engine's threads are shared by caller (`test_fair_line.py` of the engine); here are the calls before it."""
    gate, told = asyncio.Event(), list[tuple[str, str]]()

    class Slow(FakeEngine):
        async def tokenize(self, text: str, add_special_tokens: bool = True, caller: str = "") -> list[int]:
            told.append((text, caller))
            if text == "slow":
                await gate.wait()
            return [1]

    named = tenants(tmp_path, "{}")
    async with serve(Slow(), max_text_calls=2, admission_wait=0.05, **named) as serving:
        async with (
            SlipstreamClient(serving.target, ONCE, token="a" * 20) as alice,
            SlipstreamClient(serving.target, ONCE, token="b" * 20) as bob,
        ):
            slow = [asyncio.create_task(alice.tokenize("slow")) for _ in range(2)]
            await until(lambda: len(told) >= 2)
            with pytest.raises(CallFailed) as failed:
                await alice.tokenize("a third")
            assert (failed.value.code.name, failed.value.reason) == ("RESOURCE_EXHAUSTED", "CONCURRENCY_LIMIT")
            with granted("the places of one caller are nobody else's"):
                assert await bob.tokenize("quick") == [1]
            gate.set()
            await asyncio.gather(*slow)
            assert await alice.tokenize("quick") == [1]
    assert told == [("slow", "alice"), ("slow", "alice"), ("quick", "bob"), ("quick", "alice")]
