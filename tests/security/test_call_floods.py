"""More calls at once than gRPC keeps for Python to see: each is answered, with a reason, and others are served."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from service.client import CallFailed, SlipstreamClient
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.chaos.process import ServerProcess
from tests.support.scorecard import Scorecard

pytestmark = pytest.mark.alone

CONNECTIONS, STREAMS = 40, 50
PATIENCE = 120.0
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
ALICE, MALLORY = "a" * 20, "m" * 20


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    """A token file of two tenants."""
    (tmp_path / "tokens").write_text(f"alice:{ALICE}\nmallory:{MALLORY}\n")
    return str(tmp_path / "tokens")


@pytest.fixture
def started() -> Iterator[list[ServerProcess]]:
    """Servers that a test has started; they are ended with it."""
    servers: list[ServerProcess] = []
    yield servers
    for server in servers:
        server.close()


def request(number: int, tokens: int = 2) -> pb.GenerateRequest:
    asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6]), request_id=f"flood-{number}")
    asked.sampling_params.max_tokens = tokens
    return asked


async def outcome(call: Any) -> str:
    """How a call ends: its code, the server's word for it, and whether it says when to come back."""
    try:
        async for _ in call:
            pass
        return "OK"
    except grpc.aio.AioRpcError as error:
        hint = " with a hint" if "grpc-retry-pushback-ms" in dict(error.trailing_metadata() or ()) else ""
        return f"{error.code().name} {CallFailed(error).reason}{hint}"


async def flood(server: ServerProcess, calls: int, connections: int, token: str | None = None) -> Counter[str]:
    """So many Generate calls, all begun in one moment."""
    clients = [SlipstreamClient(server.target, OWN_CONNECTION, token=token) for _ in range(connections)]
    for client in clients:
        await client.channel.channel_ready()

    def begin(number: int) -> Any:
        client = clients[number % connections]
        return client.stub.Generate(request(number), timeout=PATIENCE, metadata=client.metadata)

    async with asyncio.timeout(PATIENCE):
        ended = Counter(await asyncio.gather(*(outcome(begin(number)) for number in range(calls))))
    for client in clients:
        await client.close()
    return ended


async def test_no_call_of_a_flood_is_dropped(started: list[ServerProcess], scorecard: Scorecard) -> None:
    """2,000 streams over 40 connections, all begun in one moment. gRPC's own limit is 1,000."""
    server = ServerProcess()
    started.append(server)
    server.wait_ready()
    ended = await flood(server, CONNECTIONS * STREAMS, CONNECTIONS)
    fine = ("OK", "RESOURCE_EXHAUSTED QUEUE_FULL with a hint", "RESOURCE_EXHAUSTED CONCURRENCY_LIMIT with a hint")
    dropped = sum(count for how, count in ended.items() if how not in fine)
    scorecard(35, f"of {CONNECTIONS * STREAMS} calls begun at once, dropped", dropped, equals=0)
    assert ended["OK"] > 0, ended


async def test_a_caller_has_a_bounded_number_of_calls_open(started: list[ServerProcess], scorecard: Scorecard) -> None:
    """Over all its connections, each of which stays below its own bound; what is beyond is told to come back."""
    server = ServerProcess(max_running_requests=8, max_queued_requests=8, max_concurrent_requests=16)
    started.append(server)
    server.wait_ready()
    # Some of them end meanwhile, because their messages never come.
    beyond = 16 + 1024 + 64
    holders = [SlipstreamClient(server.target, OWN_CONNECTION) for _ in range(8)]
    method = "/slipstream.v1.InferenceService/Attach"
    calls: list[Any] = []
    for number in range(beyond):
        call: Any = holders[number % len(holders)].channel.stream_stream(method)()
        # The headers are sent, and the message never is: it waits for its turn, and is held open.
        calls.append(call)
    async with SlipstreamClient(server.target, OWN_CONNECTION) as other:
        series = 'slipstream_calls_turned_away_total{kind="stream",reason="OPEN_CALLS"}'
        async with asyncio.timeout(PATIENCE):
            while not (turned_away := (await server.metrics())[series]):
                await asyncio.sleep(0.05)
            assert await other.tokenize("still served"), "calls of another kind are"
        scorecard(35, "calls of one caller turned away", turned_away, at_least=1)
    for call in calls:
        call.cancel()
    for holder in holders:
        await holder.close()


async def test_a_flood_without_a_token_fails_no_call_of_a_tenant(
    started: list[ServerProcess], tokens: str, scorecard: Scorecard
) -> None:
    """40 calls of a valid tenant beside waves of 2,000 that are refused before anything is read or held."""
    server = ServerProcess(auth_token_file=tokens)
    started.append(server)
    server.wait_ready()
    refused: Counter[str] = Counter()
    done = asyncio.Event()

    async def attack() -> None:
        while not done.is_set():
            refused.update(await flood(server, CONNECTIONS * STREAMS, CONNECTIONS))

    async with SlipstreamClient(server.target, OWN_CONNECTION, token=ALICE) as alice:
        before = (await server.probe()).rss
        attacking = asyncio.create_task(attack())
        served: Counter[str] = Counter()

        async def worker(place: int) -> None:
            for number in range(10):
                asked = request(1000 * place + number, tokens=4)
                served[await outcome(alice.stub.Generate(asked, timeout=PATIENCE, metadata=alice.metadata))] += 1

        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(worker(place) for place in range(4)))
        held = (await server.probe()).rss - before
        done.set()
        await attacking
    scorecard(35, "calls of a tenant beside a flood without a token, served", served["OK"], equals=40)
    assert served == {"OK": 40}
    assert set(refused) == {"UNAUTHENTICATED UNAUTHENTICATED"} and refused.total() >= CONNECTIONS * STREAMS
    scorecard(35, "RSS that it added, MB", round(held / 1e6), at_most=200)


async def test_one_tenants_flood_leaves_the_others_their_calls(
    started: list[ServerProcess], tokens: str, tmp_path: Path, scorecard: Scorecard
) -> None:
    """Of every kind that is no work of a batch: texts, streams that are not there, facts."""
    (tmp_path / "tenants").write_text("mallory: {concurrent_requests: 4}\n")
    server = ServerProcess(auth_token_file=tokens, tenants_file=tmp_path / "tenants", admission_wait=0.05)
    started.append(server)
    server.wait_ready()
    ended: Counter[str] = Counter()
    async with SlipstreamClient(server.target, OWN_CONNECTION, token=ALICE) as alice:
        async with SlipstreamClient(server.target, OWN_CONNECTION, token=MALLORY) as mallory:
            done = asyncio.Event()

            ways: tuple[Callable[[], Any], ...] = (
                lambda: mallory.tokenize("x y " * 20_000),
                mallory.load,
                lambda: anext(mallory.attach("nothing")),
            )

            async def attack(way: Callable[[], Any]) -> None:
                try:
                    await way()
                except CallFailed as failed:
                    ended[failed.reason] += 1
                else:
                    ended["OK"] += 1

            async def attacker(way: Callable[[], Any]) -> None:
                while not done.is_set():
                    await attack(way)

            attackers = [asyncio.create_task(attacker(ways[number % 3])) for number in range(60)]
            served = 0
            async with asyncio.timeout(PATIENCE):
                for number in range(20):
                    asked = request(number, tokens=4)
                    call = alice.stub.Generate(asked, timeout=PATIENCE, metadata=alice.metadata)
                    served += (await outcome(call)) == "OK"
                    served += bool(await alice.tokenize("one two three"))
            done.set()
            await asyncio.gather(*attackers)
    scorecard(35, "calls of a tenant beside a flood of another's, served", served, equals=40)
    assert ended["OK"] and ended["STREAM_NOT_FOUND"], ended
