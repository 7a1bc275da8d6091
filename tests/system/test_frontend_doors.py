"""What one process does at its door, two front ends do at theirs: certificates, tokens, limits, adapters, slow readers.

The engine is in this process, over the emulated device; the front ends are processes of their own behind real sockets.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import ssl
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from core.engine.async_engine import AsyncEngine
from service.access.tls_credentials import ClientTls
from service.client import CallFailed, SlipstreamClient
from service.client.adapters import AdapterClient
from service.config.server_config import ServerConfig
from service.frontends.group import FrontEndGroup
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.chaos.process import ServerProcess
from tests.contract.api.raw_http2 import DeafClient
from tests.security.certificates import Authority, Pair, needs_openssl
from tests.support.fakes.adapter_shelf import AdapterShelf
from tests.support.kept_server import small_engine
from tests.support.servers import loaded
from tests.support.until import until
from tests.system.test_frontends import FRONT_ENDS, PATIENCE, Places, begun, failure, serving

GENERATE = "/slipstream.v1.InferenceService/Generate"
ALICE, BOB, CAROL = "a" * 20, "b" * 20, "c" * 20
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


class ShelvedEngine(AdapterShelf):
    """The production engine, with adapters that are only names."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Shelved:
    """What such an engine is started from."""

    async def start(self) -> Any:
        return ShelvedEngine(await small_engine().start())


class Group:
    """An engine with its front ends, spelled as `Places` asks for a server."""

    def __init__(self, inner: FrontEndGroup) -> None:
        self.inner, self.engine = inner, inner.engine
        self.pid = os.getpid()
        self.process = SimpleNamespace(poll=lambda: None)

    @property
    def port(self) -> int:
        return self.inner.port

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def places(self, token: str | None = None, tls: ClientTls | None = None) -> Places:
        """A client for each front end."""
        return Places(cast(ServerProcess, self), token, tls)

    def connections(self) -> dict[int, int]:
        """The front end of each connection, by the client's port."""
        return {port: child.pid for port, child in serving(cast(ServerProcess, self), self.port).items()}

    async def metric(self, series: str) -> float:
        """One value of the one metrics endpoint."""

        def scrape() -> str:
            address = f"http://127.0.0.1:{self.inner.metrics_port}/metrics"
            with urllib.request.urlopen(address, timeout=PATIENCE) as response:
                return str(response.read().decode())

        lines = (await asyncio.to_thread(scrape)).splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{series} ")), 0.0)

    async def counted(self, series: str, value: float) -> None:
        """Wait until it says so, which takes as long as a front end keeps its counts."""
        async with asyncio.timeout(PATIENCE):
            while await self.metric(series) < value:
                await asyncio.sleep(0.05)
        assert await self.metric(series) == value


@asynccontextmanager
async def group(**settings: Any) -> AsyncIterator[Group]:
    config = ServerConfig.of(port=0, metrics_port=0, frontends=FRONT_ENDS, max_running_requests=64, **settings)
    async with loaded(FrontEndGroup(config, lambda *_: Shelved())) as inner:
        yield Group(inner)


def install(pair: Pair, folder: Path) -> dict[str, str]:
    """Put the pair where the server looks, each file by a rename; the settings that name them."""
    for source, name in ((pair.cert, "tls.crt"), (pair.key, "tls.key")):
        shutil.copy(source, folder / f"{name}.fresh")
        (folder / f"{name}.fresh").replace(folder / name)
    return {"tls_cert": str(folder / "tls.crt"), "tls_key": str(folder / "tls.key")}


async def shown(server: Group, authority: Authority) -> tuple[int, str]:
    """The front end that took a new connection, and the serial number of the certificate it showed."""

    def shake() -> tuple[int, str]:
        context = ssl.create_default_context(cafile=str(authority.cert))
        context.set_alpn_protocols(["h2"])
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as raw:
            with context.wrap_socket(raw, server_hostname="127.0.0.1") as secured:
                place = server.connections()[secured.getsockname()[1]]
                return place, str((secured.getpeercert() or {})["serialNumber"])

    return await asyncio.to_thread(shake)


@needs_openssl
async def test_every_front_end_shows_a_renewed_certificate_and_breaks_no_stream(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    authority = Authority(tmp_path_factory.mktemp("authority"), "ca")
    first, second = authority.issue("first"), authority.issue("second")
    tls = ClientTls.read(str(authority.cert))
    async with group(**install(first, tmp_path)) as server, server.places(tls=tls) as clients:
        streams = [(await begun(client, 800))[0] for client in clients.values()]
        assert {(await shown(server, authority))[1] for _ in range(4)} == {first.serial}
        install(second, tmp_path)
        renewed: set[int] = set()
        async with asyncio.timeout(PATIENCE):
            while renewed != set(clients):
                place, serial = await shown(server, authority)
                if serial == second.serial:
                    renewed.add(place)
        for stream in streams:
            assert sum(len(chunk.token_ids) for chunk in await asyncio.wait_for(stream, PATIENCE)) == 800


async def test_every_front_end_reads_its_tokens_again_and_ends_what_a_revoked_one_started(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice:{ALICE}\nbob:{BOB}\n")
    async with group(auth_token_file=str(tokens), auth_recheck_seconds=0.1) as server:
        async with server.places(ALICE) as hers, server.places(BOB) as his:
            revoked = [(await begun(client))[0] for client in hers.values()]
            kept = [(await begun(client, 800))[0] for client in his.values()]
            fresh = tmp_path / "fresh"
            fresh.write_text(f"bob:{BOB}\ncarol:{CAROL}\n")
            fresh.replace(tokens)
            for stream in revoked:
                assert (await failure(stream)).code.name == "UNAUTHENTICATED"
            for stream in kept:
                assert sum(len(chunk.token_ids) for chunk in await asyncio.wait_for(stream, PATIENCE)) == 800
            for client in hers.values():
                with pytest.raises(CallFailed) as refused:
                    await client.load()
                assert refused.value.code.name == "UNAUTHENTICATED"
        async with server.places(CAROL) as theirs:
            assert len(theirs) == FRONT_ENDS
        await until(lambda: not server.engine.live_requests, within=PATIENCE)


async def test_a_rate_limit_is_one_for_all_front_ends_and_each_has_its_part() -> None:
    """One call in 50 seconds for all is one in 100 at each of two doors, which is later than a client comes back."""
    async with group(rate_limit=0.02, admission_wait=0.05) as server, server.places() as clients:

        async def ask(client: SlipstreamClient) -> str:
            try:
                await client.complete([3, 4], max_tokens=2, **GREEDY)
            except CallFailed as error:
                assert error.code.name == "RESOURCE_EXHAUSTED"
                return error.reason
            return "served"

        for client in clients.values():
            said = sorted([await ask(client) for _ in range(4)])
            assert said == ["RATE_LIMIT"] * 3 + ["served"]
        await server.counted('slipstream_requests_rejected_total{reason="RATE_LIMIT"}', 3.0 * FRONT_ENDS)


async def test_the_limit_of_calls_at_once_is_divided_too() -> None:
    async with group(max_concurrent_requests=3, admission_wait=0.05) as server, server.places() as clients:
        for client in clients.values():
            held = [(await begun(client))[0] for _ in range(2)]
            with pytest.raises(CallFailed) as refused:
                await client.complete([3], max_tokens=2, **GREEDY)
            assert refused.value.reason == "CONCURRENCY_LIMIT"
            for task in held:
                task.cancel()
        await until(lambda: not server.engine.live_requests, within=PATIENCE)


async def test_adapters_are_the_same_through_every_front_end() -> None:
    async with group(unnamed_callers="all") as server, server.places() as clients:
        one, other = map(AdapterClient, clients.values())
        loaded = await one.load("wise", "somewhere", pinned=True)
        assert (loaded.adapter.name, loaded.adapter.pinned) == ("wise", True)
        assert list((await one.load("older", "evicts")).evicted) == ["older"]
        assert [each.name for each in (await other.list()).adapters] == ["wise", "older"]
        for call, code, reason in (
            (lambda: other.load("wise"), "ALREADY_EXISTS", "ADAPTER_EXISTS"),
            (lambda: other.unload("nobody"), "NOT_FOUND", "ADAPTER_NOT_FOUND"),
        ):
            with pytest.raises(CallFailed) as refused:
                await cast(Any, call())
            assert (refused.value.code.name, refused.value.reason) == (code, reason)
        assert await other.unload("wise") == 0
        assert [each.name for each in (await one.list()).adapters] == ["older"]


async def deaf_client(server: Group) -> tuple[DeafClient, int]:
    """A client that reads nothing, and the front end it came to."""
    known = set(server.connections())
    client = await DeafClient.connect(server.port, 500, answers_pings=True)
    # The front end takes the connection a little after the kernel has made it.
    await until(lambda: set(server.connections()) - known, within=PATIENCE)
    now = server.connections()
    return client, now[next(iter(set(now) - known))]


async def test_readers_that_do_not_read_are_evicted_at_every_front_end() -> None:
    sampling = pb.SamplingParams(max_tokens=8000, **GREEDY)
    endless = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling_params=sampling).SerializeToString()
    async with group(write_timeout=0.5) as server, server.places() as clients:
        deaf: dict[int, DeafClient] = {}
        others: list[DeafClient] = []
        while set(deaf) != set(clients):
            client, place = await deaf_client(server)
            others.append(client)
            deaf.setdefault(place, client)
        for client in deaf.values():
            for _ in range(3):
                await client.call(GENERATE, endless)
        streams = [(await begun(client, 600))[0] for client in clients.values()]
        await server.counted("slipstream_slow_consumer_evictions_total", 3.0 * FRONT_ENDS)
        for stream in streams:
            assert sum(len(chunk.token_ids) for chunk in await asyncio.wait_for(stream, PATIENCE)) == 600
        await until(lambda: not server.engine.live_requests, within=PATIENCE)
        for client in others:
            await client.close()


async def test_counts_of_a_drain_and_of_a_front_end_that_died_stay() -> None:
    """The one metrics endpoint has every call that ended while a front end lived, and goes on after its death."""
    series = f'slipstream_rpc_handled_total{{code="OK",method="{GENERATE[1:]}"}}'
    async with group() as server:
        async with server.places() as clients:
            for client in clients.values():
                await client.complete([3, 4], max_tokens=2, **GREEDY)
            await server.counted(series, FRONT_ENDS)
            killed = next(iter(clients))
            os.kill(killed, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE):
            # Nobody has noticed yet: until then the killed one still counts as serving.
            while True:
                there = {each.process.pid for each in server.inner._running() if each.host.serving.is_set()}
                if len(there) == FRONT_ENDS and killed not in there:
                    break
                await asyncio.sleep(0.05)
        async with server.places() as clients:
            streams = [(await begun(client, 400))[0] for client in clients.values()]
            draining = asyncio.create_task(server.inner.drain(0.0, PATIENCE))
            for stream in streams:
                assert sum(len(chunk.token_ids) for chunk in await asyncio.wait_for(stream, PATIENCE)) == 400
            assert await draining == 0
        registry = server.inner.metrics.registry
        handled = registry.get_sample_value("slipstream_rpc_handled_total", {"method": GENERATE[1:], "code": "OK"})
        assert handled == 2 * FRONT_ENDS
