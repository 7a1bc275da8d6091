"""Front ends in processes of their own, over real sockets: exactly once, and what dies takes only its own along."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from service.access.tls_credentials import ClientTls
from service.client import CallFailed, Chunk, SlipstreamClient
from tests.chaos.device import Faults
from tests.chaos.history import FULL, Verdict
from tests.chaos.process import PATIENCE, ServerProcess, settled
from tests.chaos.readers import ask, endings, read, verdict

FRONT_ENDS = 2
LONG = 6000


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    started = ServerProcess(
        Faults(step_seconds=0.005),
        frontends=FRONT_ENDS,
        max_running_requests=64,
        max_total_tokens=64 * 1024,
        drain_grace=4,
    )
    try:
        yield started.wait_ready()
    finally:
        children = front_ends(started)
        started.close()
        _, left = psutil.wait_procs(children, timeout=PATIENCE)
        assert not left, "front ends outlived the engine's process"


def front_ends(server: ServerProcess) -> list[psutil.Process]:
    if server.process.poll() is not None:
        return []
    return psutil.Process(server.pid).children()


def serving(server: ServerProcess, port: int) -> dict[int, psutil.Process]:
    """The front end behind each local port of a client's connection."""
    return {
        connection.raddr.port: child
        for child in front_ends(server)
        for connection in child.net_connections("tcp")
        if connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == port
    }


class Places:
    """Clients, one per front end at least: connections are made until every front end has one."""

    def __init__(self, server: ServerProcess, token: str | None = None, tls: ClientTls | None = None) -> None:
        self._server, self._token, self._tls = server, token, tls
        self.clients: dict[int, SlipstreamClient] = {}

    async def __aenter__(self) -> dict[int, SlipstreamClient]:
        seen = set(serving(self._server, self._server.port))
        for _ in range(64):
            own = (("grpc.use_local_subchannel_pool", 1),)
            client = SlipstreamClient(self._server.target, own, token=self._token, tls=self._tls)
            await client.load()
            now = serving(self._server, self._server.port)
            (new,) = set(now) - seen
            seen = set(now)
            if now[new].pid in self.clients:
                await client.close()
                await asyncio.sleep(0.05)
                seen &= set(serving(self._server, self._server.port))
            else:
                self.clients[now[new].pid] = client
            if len(self.clients) == FRONT_ENDS:
                return self.clients
        raise AssertionError("the kernel gave every connection to one front end")

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients.values():
            await client.close()


async def begun(client: SlipstreamClient, tokens: int = LONG) -> tuple[asyncio.Task[list[Chunk]], str]:
    """A stream that has brought its first tokens; its task ends as the stream does."""
    first = asyncio.Event()
    name = f"s{random.getrandbits(48):x}"

    async def follow() -> list[Chunk]:
        chunks = []
        async for event in client.generate(
            [5, 6, 7], request_id=name, max_tokens=tokens, temperature=0.0, ignore_eos=True, want_text=False
        ):
            if isinstance(event, Chunk):
                chunks.append(event)
                first.set()
        return chunks

    task = asyncio.create_task(follow())
    waiting = asyncio.create_task(first.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE)
    assert first.is_set(), task
    return task, name


async def failure(task: asyncio.Task[list[Chunk]]) -> CallFailed:
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(CallFailed) as failed:
            await task
    return failed.value


async def test_every_token_once_through_two_front_ends(server: ServerProcess) -> None:
    rng = random.Random(5)
    async with Places(server) as clients:
        vocab = (await next(iter(clients.values())).model_info()).vocab_size
        streams = await asyncio.gather(
            *(read(client, ask(vocab, 150, rng)) for client in clients.values() for _ in range(32))
        )
        assert verdict(list(streams), vocab) == Verdict()
        assert endings(list(streams)) == {FULL: 64}
        one, other = clients.values()
        text = "The fox"
        assert await one.detokenize(await other.tokenize(text)) == text
        vectors = [await client.embed([3, 4], [5, 6]) for client in (one, other)]
        assert [each.values for each in vectors[0]] == [each.values for each in vectors[1]]
        with pytest.raises(CallFailed) as refused:
            await one.complete([3], max_tokens=4, temperature=-1.0)
        assert refused.value.code.name == "INVALID_ARGUMENT" and refused.value.fields
        task, name = await begun(one)
        with pytest.raises(CallFailed) as doubled:
            await other.complete([3], request_id=name, max_tokens=4)
        assert doubled.value.reason == "DUPLICATE_REQUEST_ID", "ids are unique over all front ends"
        assert (await other.load()).live_requests >= 0
        assert await other.abort(name), "a request can be ended through another front end"
        assert not await other.abort("nobody's")
        await asyncio.wait_for(task, PATIENCE)
    await settled(server)
    method = "slipstream.v1.InferenceService/Generate"
    await counted(server, f'slipstream_rpc_started_total{{method="{method}"}}', 67)


async def counted(server: ServerProcess, series: str, value: float) -> None:
    """Wait until the one metrics endpoint shows it."""
    async with asyncio.timeout(PATIENCE):
        while (found := (await server.metrics()).get(series)) != value:
            assert found is None or found < value, found
            await asyncio.sleep(0.05)


async def test_only_who_started_a_request_ends_it_from_another_front_end(tmp_path: Path) -> None:
    alice, bob = "a" * 20, "b" * 20
    (tmp_path / "tokens").write_text(f"alice:{alice}\nbob:{bob}\n")
    server = ServerProcess(Faults(step_seconds=0.005), frontends=FRONT_ENDS, auth_token_file=tmp_path / "tokens")
    try:
        server.wait_ready()
        async with Places(server, alice) as hers, Places(server, bob) as his:
            one, other = hers.values()
            task, name = await begun(one)
            assert [await client.abort(name) for client in his.values()] == [False, False]
            assert not task.done()
            assert await other.abort(name)
            await asyncio.wait_for(task, PATIENCE)
    finally:
        server.close()


async def test_a_killed_front_end_loses_its_own_streams_only_and_comes_back(server: ServerProcess) -> None:
    async with Places(server) as clients:
        (dying, lost_client), (_, kept_client) = clients.items()
        (lost, _), (kept, _) = await begun(lost_client), await begun(kept_client, 600)
        os.kill(dying, signal.SIGKILL)
        assert (await failure(lost)).code.name == "UNAVAILABLE"
        chunks = await asyncio.wait_for(kept, PATIENCE)
        places = [place for c in chunks for place in range(c.position, c.position + len(c.token_ids))]
        assert places == list(range(600)), "the other front end's stream is whole"
        await settled(server, within=5.0)
        async with asyncio.timeout(PATIENCE):
            while len(front_ends(server)) < FRONT_ENDS or dying in {child.pid for child in front_ends(server)}:
                await asyncio.sleep(0.05)
    async with Places(server) as clients:
        for client in clients.values():
            (done,) = await client.complete([4, 5], max_tokens=8, temperature=0.0, ignore_eos=True)
            assert len(done.token_ids) == 8


async def test_a_killed_engine_ends_all_streams_as_unavailable(server: ServerProcess) -> None:
    async with Places(server) as clients:
        children = front_ends(server)
        tasks = [(await begun(client))[0] for client in clients.values()]
        server.send(signal.SIGKILL)
        for task in tasks:
            failed = await failure(task)
            assert (failed.code.name, failed.reason) == ("UNAVAILABLE", "ENGINE_DEAD")
            assert failed.tokens_emitted > 0
    gone, left = await asyncio.to_thread(psutil.wait_procs, children, PATIENCE)
    assert len(gone) == FRONT_ENDS and not left


async def test_a_closed_terminal_ends_no_front_end_before_its_streams(server: ServerProcess) -> None:
    async with Places(server) as clients:
        children = front_ends(server)
        streams = [(await begun(client, 60))[0] for client in clients.values()]
        # A terminal tells all processes that it started.
        for child in children:
            child.send_signal(signal.SIGHUP)
        server.send(signal.SIGHUP)
        ended = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), PATIENCE)
        assert [each for each in ended if isinstance(each, BaseException)] == []
        code, _ = await server.exit_code(PATIENCE)
    assert code == 0


async def test_sigterm_drains_every_front_end(server: ServerProcess) -> None:
    async with Places(server) as clients:
        short = [(await begun(client, 60))[0] for client in clients.values()]
        long = [(await begun(client))[0] for client in clients.values()]
        server.send(signal.SIGTERM)
        for task in short:
            assert sum(len(chunk.token_ids) for chunk in await asyncio.wait_for(task, PATIENCE)) == 60
        for task in long:
            assert (await failure(task)).reason == "DRAINING"
        code, _ = await server.exit_code(PATIENCE)
    assert code == 0
