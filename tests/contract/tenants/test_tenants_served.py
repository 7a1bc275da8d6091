"""Tenants on a real socket: named by token or certificate, limited by their file, with ids and caches of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from core.engine.streams.unread import FREE_TOKENS
from core.types.io import GenerateRequest
from service.access.certificate_names import certificate_name
from service.access.tls_credentials import ClientTls
from service.bench.emulated import Timeline
from service.client import CallFailed, Chunk, SlipstreamClient
from tests.security.certificates import Authority, needs_openssl
from tests.support.fakes.fake_engine import FakeEngine, held
from tests.support.fakes.granted import granted
from tests.support.kept_server import GREEDY, Seen, kept_server
from tests.support.servers import ONCE, Serve, serve_checkpoint
from tests.support.until import until
from tests.system.test_attach import begun, refusal, rest

ALICE, BOB, CAROL = "a" * 20, "b" * 20, "c" * 20
PROMPT = "pack my box with five dozen liquor jugs and the jugs with the liquor. " * 3


def files(folder: Path, limits: str = "") -> dict[str, str]:
    (folder / "tokens").write_text(f"alice:{ALICE}\nbob:{BOB}\ncarol:{CAROL}\n")
    (folder / "tenants").write_text(limits or "{}")
    return {"auth_token_file": str(folder / "tokens"), "tenants_file": str(folder / "tenants")}


async def refused(client: SlipstreamClient, **options: Any) -> CallFailed:
    with pytest.raises(CallFailed) as failed:
        await client.complete("hi", **options)
    return failed.value


async def test_ids_are_the_tenants_own(serve: Serve, tmp_path: Path, logged: Any) -> None:
    gate = asyncio.Event()
    engine = FakeEngine(held(gate))
    async with serve(engine, **files(tmp_path)) as serving:
        async with (
            SlipstreamClient(serving.target, ONCE, token=ALICE) as alice,
            SlipstreamClient(serving.target, ONCE, token=BOB) as bob,
        ):
            hers, his = (client.generate("hi", request_id="same") for client in (alice, bob))
            with granted("each of them may use the id"):
                assert [(await anext(stream)).request_id for stream in (hers, his)] == ["same", "same"]
            assert (await refused(alice, request_id="same")).reason == "DUPLICATE_REQUEST_ID"
            gate.set()
            assert [len([event async for event in stream]) for stream in (hers, his)] == [8, 8]
            vectors = asyncio.create_task(alice.embed("hi", request_id="same"))
            assert len(await vectors) == 1
            assert "same" not in await serving.metrics()
    assert "\0" not in logged.text and "\\x00" not in logged.text, "ids of the engine are nobody's business"


async def test_limits_are_kept_told_counted_and_read_again(serve: Serve, tmp_path: Path, logged: Any) -> None:
    gate = asyncio.Event()
    named = files(tmp_path, "alice: {concurrent_requests: 1}\n")
    async with serve(FakeEngine(held(gate)), admission_wait=0.02, **named) as serving:
        async with (
            SlipstreamClient(serving.target, ONCE, token=ALICE) as alice,
            SlipstreamClient(serving.target, ONCE, token=BOB) as bob,
        ):
            open_ = alice.generate("hi")
            await anext(open_)
            for _ in range(3):
                failed = await refused(alice)
                assert (failed.code.name, failed.reason) == ("RESOURCE_EXHAUSTED", "TENANT_CONCURRENCY_LIMIT")
                assert failed.retry_after is not None and 0.02 <= failed.retry_after <= 0.04
            theirs = bob.generate("hi")
            await anext(theirs)
            Path(named["tenants_file"]).write_text("bob: {concurrent_requests: 1}\nalice:\n")
            more = alice.generate("hi")
            await anext(more)
            # It was let in before there was a limit, so it does not count.
            late = bob.generate("hi")
            await anext(late)
            assert (await refused(bob)).reason == "TENANT_CONCURRENCY_LIMIT"
            gate.set()
            for stream in (open_, theirs, more, late):
                assert len([event async for event in stream]) == 8
        for tenant, count in (("alice", 3), ("bob", 1)):
            series = f'slipstream_tenant_refusals_total{{reason="TENANT_CONCURRENCY_LIMIT",tenant="{tenant}"}}'
            assert await serving.metric(series) == count
        text = await serving.metrics()
        assert "carol" not in text and 'tenant="other"' in text
        assert await serving.metric('slipstream_requests_rejected_total{reason="TENANT_CONCURRENCY_LIMIT"}') == 4
    lines = [line for line in logged.lines if "is refused" in line]
    assert len(lines) == 2, "one line per burst and tenant"


async def test_a_tenants_flood_takes_nothing_of_the_rate_that_all_share(serve: Serve, tmp_path: Path) -> None:
    named = files(tmp_path, "alice: {concurrent_requests: 0}\n")
    async with serve(FakeEngine(), admission_wait=0.01, rate_limit=5, **named) as serving:
        async with (
            SlipstreamClient(serving.target, ONCE, token=ALICE) as alice,
            SlipstreamClient(serving.target, ONCE, token=BOB) as bob,
        ):
            for _ in range(20):
                assert (await refused(alice)).reason == "TENANT_LOCKED_OUT"
            for _ in range(5):
                await bob.complete("hi")


async def test_another_tenants_stream_is_not_there(tmp_path: Path) -> None:
    async with kept_server(**files(tmp_path)) as server:
        async with server.client(token=ALICE) as alice, server.client(token=BOB) as bob:
            call, seen = await begun(alice, "mine", 100)
            call.cancel()
            for name in ("mine", "alice\0mine", "never"):
                assert (await refusal(bob, name))[1] == "STREAM_NOT_FOUND"
            assert not await bob.abort("mine")
            assert len((await rest(alice, "mine", seen)).ids[0]) == 100


async def test_one_tenants_kept_streams_push_out_nobody_elses(tmp_path: Path) -> None:
    # Less than both may have together, so that whoever has most gives way; a stream of hers takes about 2.7 KiB.
    bounds = {"resume_bytes": 42 * 1024, "resume_tenant_bytes": 34 * 1024}
    async with kept_server(0.0005, **files(tmp_path), **bounds) as server:
        async with server.client(token=ALICE) as alice, server.client(token=BOB) as bob:
            call, seen = await begun(bob, "his", 200)
            await rest(bob, "his", seen)
            for number in range(8):
                await alice.complete([3], request_id=f"hers-{number}", resumable=True, max_tokens=100, **GREEDY)
                kept = server.sample("slipstream_kept_stream_bytes")
                assert kept <= bounds["resume_bytes"], "bounded at every moment"
            assert await refusal(alice, "hers-0") == ("NOT_FOUND", "STREAM_EVICTED")
            assert (await rest(bob, "his", Seen())).outcome == seen.outcome
            call.cancel()


@contextmanager
def steps_by_hand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """The device takes so many further steps as the test allows, and after the body any number."""
    allowed, occupy = threading.Semaphore(0), Timeline.occupy

    def occupy_if_allowed(timeline: Timeline) -> None:
        allowed.acquire()
        occupy(timeline)

    monkeypatch.setattr(Timeline, "occupy", occupy_if_allowed)

    def allow(count: int) -> None:
        if count:
            allowed.release(count)

    try:
        yield allow
    finally:
        allow(100_000)


async def test_a_history_that_passes_the_bound_loses_its_beginning_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = files(tmp_path)
    async with (
        kept_server(0.0005, resume_tenant_bytes=34 * 1024, **named) as server,
        server.client(token=ALICE) as alice,
    ):
        with steps_by_hand(monkeypatch) as allow:
            # No further may the device be ahead of the client: much that is unread is not trimmed, but ends its stream.
            allow(FREE_TOKENS // 2)
            call, seen = await begun(alice, "long", 300, logprobs=True, top_logprobs=30)
            allow(len(seen.ids[0]))
            async with asyncio.timeout(60):
                while server.sample("slipstream_kept_streams_gone_total", how="trimmed") < 2:
                    response = await call.read()
                    assert response is not grpc.aio.EOF, "the history has to be trimmed before the stream ends"
                    delta = response.delta
                    seen.ids[0] += delta.token_ids
                    seen.texts[0] += delta.text
                    allow(len(delta.token_ids))
                call.cancel()
                assert await refusal(alice, "long") == ("OUT_OF_RANGE", "POSITION_TOO_OLD")
                async for event in alice.attach("long", seen.received()):
                    seen.note(event)
                    allow(len(event.token_ids) if isinstance(event, Chunk) else 0)
            assert len(seen.ids[0]) == 300
            assert server.sample("slipstream_kept_stream_bytes") <= 34 * 1024
            calls = [asyncio.create_task(begun(alice, f"more-{number}")) for number in range(4)]
            gone: Any = {"series": "slipstream_kept_streams_gone_total", "how": "evicted"}
            await until(lambda: server.sample("slipstream_kept_streams") == 4 and server.sample(**gone) == 1)
            failed = await refused(alice, request_id="too-many", resumable=True)
            assert (failed.code.name, failed.reason) == ("RESOURCE_EXHAUSTED", "RESUME_BYTES") and failed.retry_after
            labels = {"tenant": "other", "reason": "RESUME_BYTES"}
            assert server.sample("slipstream_tenant_refusals_total", **labels) == 1, "told by tenant as well"
            for each in calls:
                each.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


@needs_openssl
async def test_certificates_name_tenants_where_there_are_no_tokens(
    serve: Serve,
    tiny: Path,
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path, "ca")
    server, alice, bob = (authority.issue(name) for name in ("server", "alice", "bob"))
    (tmp_path / "tenants").write_text("alice: {concurrent_requests: 0}\n")
    tls = {"tls_cert": str(server.cert), "tls_key": str(server.key), "tls_client_ca": str(authority.cert)}
    tls["tls_client_names"] = "alice,bob"

    def client(port: int, pair: Any) -> SlipstreamClient:
        return SlipstreamClient(
            f"127.0.0.1:{port}", ONCE, tls=ClientTls.read(str(authority.cert), str(pair.cert), str(pair.key))
        )

    async with serve(FakeEngine(), admission_wait=0.01, tenants_file=str(tmp_path / "tenants"), **tls) as serving:
        async with client(serving.server.port, alice) as hers, client(serving.server.port, bob) as his:
            assert (await refused(hers)).reason == "TENANT_LOCKED_OUT"
            await his.complete("hi", request_id="x")
        asked: GenerateRequest = serving.engine.streams[0].request
        assert (asked.request_id, asked.cache_salt) == ("bob\0x", "bob\0")
    async with serve_checkpoint(tiny, **tls) as (checkpointed, _):
        port = checkpointed.port
        async with client(port, alice) as hers, client(port, bob) as his:
            hits = [
                (await each.complete(PROMPT, **GREEDY, max_tokens=2))[0].end.cached_tokens for each in (hers, his, his)
            ]
    assert [cached > 0 for cached in hits] == [False, False, True]


def test_names_that_could_be_mistaken_are_no_names() -> None:
    def name(**properties: bytes) -> str | None:
        return certificate_name({f"x509_{key}": [value] for key, value in properties.items()})

    assert name(common_name=b"alice", subject_alternative_name=b"other") == "alice"
    assert name(subject_alternative_name=b"spiffe://cluster/ns/a") == "spiffe://cluster/ns/a"
    for bad in (b"", b"alice\0bob", b"al\xc3\xafce", b"a\nb", b"x" * 300):
        assert name(common_name=bad, subject_alternative_name=b"alice") is None
    assert name() is None
