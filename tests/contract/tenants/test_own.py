"""What a tenant sees and changes is its own: load, cached pages, subscriptions; and tokens are counted by tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from core.types.streams import StreamInfo
from service.client import CallFailed, SlipstreamClient
from service.gateway import subscriptions
from service.limits.usage import CENSUS_SECONDS, TenantLoad, TenantUsage
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.server.server import Server
from tests.security.test_strangers import DIALECTS, flush, subscribe
from tests.support.fakes.granted import granted
from tests.support.servers import serve_checkpoint
from tests.support.until import until

PROMPT = list(range(3, 51))
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def bearer(letter: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {letter * 20}"),)


@asynccontextmanager
async def tenants(
    tiny: Path, folder: Path, **settings: Any
) -> AsyncIterator[tuple[Server, dict[str, SlipstreamClient]]]:
    """A server with alice, bob and the admin ops, and a client of each; the tenants file lists alice alone."""
    (folder / "tokens").write_text("".join(f"{name}:{name[0] * 20}\n" for name in ("alice", "bob", "ops")))
    (folder / "tenants").write_text("alice:\n")
    named = {"auth_token_file": str(folder / "tokens"), "tenants_file": str(folder / "tenants"), "admins": "ops"}
    async with serve_checkpoint(tiny, page_size=8, **named, **settings) as (server, _):
        target = f"127.0.0.1:{server.port}"
        clients = {name: SlipstreamClient(target, token=name[0] * 20) for name in ("alice", "bob", "ops")}
        try:
            yield server, clients
        finally:
            for client in clients.values():
                await client.close()


def series(tenant: str, kind: str) -> str:
    return f'slipstream_tenant_tokens_total{{kind="{kind}",tenant="{tenant}"}}'


async def metric(server: Server, name: str) -> float:
    from tests.support.servers import Serving

    return await Serving(server, None, None).metric(name)  # type: ignore[arg-type]


async def test_a_tenant_sees_its_own_load_and_an_admin_all(tiny: Path, tmp_path: Path) -> None:
    async with tenants(tiny, tmp_path) as (server, clients):
        streams = [clients["alice"].generate(PROMPT, max_tokens=900, **GREEDY) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        await asyncio.sleep(CENSUS_SECONDS)
        found = {
            name: await client.stub.GetLoad(pb.GetLoadRequest(), metadata=bearer(name[0]))
            for name, client in clients.items()
        }
        live = {name: (load.running_requests, load.live_requests) for name, load in found.items()}
        shown = {name: (len(load.pools) > 0, load.step > 0, load.token_usage > 0) for name, load in found.items()}
        for stream in streams:
            await stream.aclose()
        assert server.engine.live_requests >= 0
    assert live == {"alice": (2, 2), "bob": (0, 0), "ops": (2, 2)}
    assert shown == {"alice": (False,) * 3, "bob": (False,) * 3, "ops": (True,) * 3}


async def test_tokens_are_counted_by_tenant_however_requests_end(tiny: Path, tmp_path: Path) -> None:
    async with tenants(tiny, tmp_path) as (server, clients):
        await clients["alice"].complete(PROMPT, max_tokens=5, n=2, **GREEDY)
        await clients["bob"].complete(PROMPT, max_tokens=3, **GREEDY)
        await clients["ops"].embed("a text")
        stream = clients["bob"].generate(PROMPT, max_tokens=900, **GREEDY)
        await anext(stream)
        await stream.aclose()
        await until(lambda: not server.engine.live_requests)
        counted = {
            (tenant, kind): await metric(server, series(tenant, kind))
            for tenant in ("alice", "other")
            for kind in ("prompt", "generated")
        }
        page = await metric(server, series("bob", "prompt"))
    assert (counted["alice", "prompt"], counted["alice", "generated"]) == (len(PROMPT), 10)
    # Of two that the tenants file does not list, one left in the middle.
    assert counted["other", "prompt"] > 2 * len(PROMPT) and 4 <= counted["other", "generated"] < 900
    assert page == 0


async def test_a_flush_takes_the_callers_pages_and_an_admins_all(tiny: Path, tmp_path: Path) -> None:
    async with tenants(tiny, tmp_path) as (_, clients):

        async def hits(name: str, salt: str = "") -> bool:
            done = await clients[name].complete(PROMPT, max_tokens=1, cache_salt=salt, **GREEDY)
            return done[0].end.cached_tokens > 0

        for name, salt in (("alice", ""), ("alice", "s"), ("bob", "")):
            assert not await hits(name, salt)
        answered = await flush(clients["bob"].channel, DIALECTS[0], metadata=bearer("b"))
        assert answered.message == "6 pages evicted"
        assert [await hits("alice"), await hits("alice", "s"), await hits("bob")] == [True, True, False]
        await flush(clients["ops"].channel, DIALECTS[1], metadata=bearer("o"))
        assert [await hits("alice"), await hits("bob")] == [False, False]


async def test_one_caller_takes_so_many_subscriptions_and_leaves_the_others(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "MAX_OF_ONE", 2)
    async with tenants(tiny, tmp_path) as (_, clients):
        held = [subscribe(clients["alice"].channel, DIALECTS[n % 2], metadata=bearer("a")) for n in range(2)]
        for call in held:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await subscribe(clients["alice"].channel, DIALECTS[0], metadata=bearer("a")).read()
        his = subscribe(clients["bob"].channel, DIALECTS[0], metadata=bearer("b"))
        with granted("a subscription for somebody else"):
            await his.read()
        for call in (*held, his):
            call.cancel()
    assert (CallFailed(refused.value).code.name, CallFailed(refused.value).reason) == (
        "RESOURCE_EXHAUSTED",
        "SUBSCRIBERS",
    )


async def test_a_subscriber_is_told_its_own_load(tiny: Path, tmp_path: Path) -> None:
    async with tenants(tiny, tmp_path) as (_, clients):
        stream = clients["alice"].generate(PROMPT, max_tokens=900, **GREEDY)
        await anext(stream)
        await asyncio.sleep(CENSUS_SECONDS)
        told = {}
        for name in ("alice", "bob", "ops"):
            call = subscribe(clients[name].channel, DIALECTS[0], metadata=bearer(name[0]))
            told[name] = (await call.read()).load.running_requests
            call.cancel()
        await stream.aclose()
    assert told == {"alice": 1, "bob": 0, "ops": 1}


class Streams:
    """Streams that were counted so and so often."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 3

    def oldest(self, count: int) -> list[StreamInfo]:
        """One of alice's in the batch, two others that wait."""
        self.asked += 1
        made = [("alice\0x", "decode"), ("alice\0y", "preempted"), ("bob\0x", "waiting")]
        return [StreamInfo(name, state, 10, 5, 0.0, "") for name, state in made][:count]

    def on_end(self, told: object) -> None:
        """Nothing ends here."""


def test_however_often_tenants_ask_streams_are_counted_now_and_then() -> None:
    now, streams = 100.0, Streams()
    usage = TenantUsage(lambda *_: None, str, lambda: now)
    for _ in range(50):
        assert usage.load("alice", streams) == TenantLoad(running=1, waiting=1, tokens=15)
        assert usage.load("bob", streams).live == 1 and usage.load("carol", streams).live == 0
    assert streams.asked == 1
    now += 2 * CENSUS_SECONDS
    usage.load("bob", streams)
    assert streams.asked == 2
