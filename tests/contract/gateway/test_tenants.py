"""Tenants in both dialects: limits, ids and salts are those of our own service, and no id of the engine gets out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from service.client import CallFailed, SlipstreamClient
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.contract.gateway.spoken import Spoken
from tests.contract.gateway.test_generate import IDS, failure_of, spoken_of
from tests.support.fakes.fake_engine import FakeEngine, held
from tests.support.servers import ONCE, Serve

SOON = 5.0
ALICE, BOB = ((("authorization", f"Bearer {letter * 20}"),) for letter in "ab")


def files(folder: Path, limits: str) -> dict[str, str]:
    (folder / "tokens").write_text(f"alice:{'a' * 20}\nbob:{'b' * 20}\n")
    (folder / "tenants").write_text(limits)
    return {"auth_token_file": str(folder / "tokens"), "tenants_file": str(folder / "tenants")}


async def test_one_tenant_is_limited_and_the_other_is_not(serve: Serve, spoken: Spoken, tmp_path: Path) -> None:
    gate, named = asyncio.Event(), files(tmp_path, "alice: {concurrent_requests: 1}")
    async with serve(FakeEngine(held(gate)), admission_wait=0.02, **named) as serving:
        stub, once = spoken.stub(serving.client.channel), SlipstreamClient(serving.target, ONCE)
        hers = stub.Generate(spoken.generate(IDS, request_id="same", stream=True), metadata=ALICE)
        first = await hers.read()
        for call in (
            stub.Generate(spoken.generate(IDS, stream=True), metadata=ALICE, timeout=SOON),
            once.stub.Generate(pb.GenerateRequest(text="hi"), metadata=ALICE, timeout=SOON),
        ):
            failed = await failure_of(call)
            assert (failed.code.name, failed.reason) == ("RESOURCE_EXHAUSTED", "TENANT_CONCURRENCY_LIMIT")
        his = [
            stub.Generate(spoken.generate(IDS, request_id=each, stream=True), metadata=BOB) for each in ("same", "more")
        ]
        answers = [first, *[await call.read() for call in his]]
        gate.set()
        for call in (hers, *his):
            assert len((await spoken_of(call))[1]) == 1
        asked = [stream.request for stream in serving.engine.streams]
        series = 'slipstream_tenant_refusals_total{reason="TENANT_CONCURRENCY_LIMIT",tenant="alice"}'
        assert await serving.metric(series) == 2
        await once.close()
        assert "same" not in await serving.metrics()
    assert [(each.request_id, each.cache_salt) for each in asked] == [
        ("alice\0same", "alice\0"),
        ("bob\0same", "bob\0"),
        ("bob\0more", "bob\0"),
    ]
    assert not any(b"\0same" in each.SerializeToString() for each in answers)
    if spoken.name == "sglang":
        assert [each.request_id for each in answers] == ["same", "same", "more"]


async def test_embeddings_count_as_well(serve: Serve, spoken: Spoken, tmp_path: Path) -> None:
    async with serve(
        FakeEngine(), admission_wait=0.02, **files(tmp_path, "alice: {concurrent_requests: 0}")
    ) as serving:
        stub = spoken.stub(serving.client.channel)
        request = spoken.pb.EmbedRequest(tokenized=spoken.pb.TokenizedInput(input_ids=IDS), request_id="e")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Embed(request, metadata=ALICE)
        assert CallFailed(failed.value).reason == "TENANT_LOCKED_OUT"
        assert (await stub.Embed(request, metadata=BOB)).embedding


async def test_the_machine_is_shared_by_caller(serve: Serve, spoken: Spoken, tmp_path: Path) -> None:
    named = files(tmp_path, "alice: {weight: 2}")
    async with serve(FakeEngine(), **named) as serving:
        stub = spoken.stub(serving.client.channel)
        for caller in (ALICE, BOB):
            await spoken_of(stub.Generate(spoken.generate(IDS, stream=True), metadata=caller))
            tokenized = spoken.pb.TokenizedInput(input_ids=IDS)
            await stub.Embed(spoken.pb.EmbedRequest(request_id="e", tokenized=tokenized), metadata=caller)
        asked = [stream.request for stream in serving.engine.streams if stream.request.cache_salt]
        told = [(each.tenant, each.weight) for each in (*asked, *serving.engine.embedded)]
    assert told == [("alice", 2.0), ("bob", 1.0)] * 2
