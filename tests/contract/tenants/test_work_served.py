"""Limits that count work, on a real socket: sequences of Generate and Embed in every dialect, tokens by their use."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from core.errors import Overloaded
from service.client import CallFailed, SlipstreamClient
from tests.contract.gateway.spoken import DIALECTS, Spoken
from tests.contract.gateway.test_generate import failure_of
from tests.contract.tenants.test_tenants_served import ALICE, BOB, files, refused
from tests.support.fakes.fake_engine import FakeEngine, count_up, held
from tests.support.fakes.granted import granted
from tests.support.kept_server import GREEDY, kept_server
from tests.support.servers import ONCE, Serve
from tests.support.until import until
from tests.system.test_attach import begun

SOON = 5.0
AS_ALICE, AS_BOB = ((("authorization", f"Bearer {token}"),) for token in (ALICE, BOB))


async def test_outputs_and_inputs_are_sequences_whatever_the_calls(serve: Serve, tmp_path: Path) -> None:
    gate = asyncio.Event()
    named = files(tmp_path, '"*": {concurrent_sequences: 64}\n')
    async with serve(FakeEngine(held(gate, after=1)), admission_wait=0.02, **named) as serving:
        async with (
            SlipstreamClient(serving.target, ONCE, token=ALICE) as alice,
            SlipstreamClient(serving.target, ONCE, token=BOB) as bob,
        ):
            hers = alice.generate("hi", n=60)
            await anext(hers)
            vectors = asyncio.create_task(alice.embed("a", "b", "c", "d"))
            await serving.engine.stream_number(2)
            for call in (refused(alice, timeout=SOON), _refused(alice.embed("one more", timeout=SOON))):
                failed = await call
                assert (failed.code.name, failed.reason) == ("RESOURCE_EXHAUSTED", "TENANT_SEQUENCE_LIMIT")
                assert failed.retry_after
            his = bob.generate("hi", n=64)
            await anext(his)
            gate.set()
            assert len(await vectors) == 4
            for stream in (hers, his):
                async for _ in stream:
                    pass
            assert len(await alice.complete("hi", n=64, max_tokens=2)) == 64
            failed = await _refused(alice.embed(*"x" * 65))
            assert (failed.code.name, failed.reason, failed.retry_after) == (
                "PERMISSION_DENIED",
                "TENANT_SEQUENCES",
                None,
            )


async def _refused(call: Any) -> CallFailed:
    with pytest.raises(CallFailed) as failed:
        await call
    return failed.value


@pytest.mark.parametrize("spoken", DIALECTS, ids=lambda each: each.name)
async def test_dialects_count_their_outputs_and_tokens(serve: Serve, spoken: Spoken, tmp_path: Path) -> None:
    gate, ids = asyncio.Event(), [5, 6, 7]
    named = files(tmp_path, "alice: {concurrent_sequences: 4}\nbob: {tokens_per_minute: 103}\n")

    def script(request: Any) -> Any:
        return held(gate, after=40 if request.sampling.max_tokens == 50 else 1)(request)

    async with serve(FakeEngine(script), admission_wait=0.02, **named) as serving:
        stub = spoken.stub(serving.client.channel)

        def ask(metadata: Any, **params: Any) -> Any:
            return stub.Generate(spoken.generate(ids, params=params, stream=True), metadata=metadata, timeout=5)

        hers = ask(AS_ALICE, n=4, max_tokens=3)
        await hers.read()
        assert (await failure_of(ask(AS_ALICE, max_tokens=3))).reason == "TENANT_SEQUENCE_LIMIT"
        his = ask(AS_BOB, n=2, max_tokens=50)
        for _ in range(40):
            await his.read()
        assert (await failure_of(ask(AS_BOB, max_tokens=40))).reason == "TENANT_TOKEN_LIMIT"
        his.cancel()
        # Only then the gate: a call that the server has not heard the end of would make tokens, which count.
        await until(lambda: serving.engine.live_requests == 1)
        gate.set()
        while await hers.read():
            pass
        await until(lambda: not serving.engine.live_requests)
        # Of the 103 that were charged, the prompt and what was made before the call was left are used: 60 are there.
        assert (await failure_of(ask(AS_BOB, max_tokens=80))).reason == "TENANT_TOKEN_LIMIT"
        with granted("the rest was given back"):
            assert await ask(AS_BOB, max_tokens=40).read()


@pytest.mark.parametrize("whole", [True, False], ids=["read to its end", "left early"])
async def test_the_unused_is_given_back_at_the_end(serve: Serve, tmp_path: Path, whole: bool) -> None:
    """Prompts count as the engine counts them: 3 tokens here, whatever the estimate was."""
    named = files(tmp_path, "alice: {tokens_per_minute: 1000}\n")
    engine = FakeEngine(held(asyncio.Event(), after=2))
    async with serve(engine, admission_wait=0.02, **named) as serving:
        async with SlipstreamClient(serving.target, ONCE, token=ALICE) as alice:
            if whole:
                engine.script = count_up
            stream = alice.generate("x" * 400, max_tokens=2 if whole else 800)
            if whole:
                assert [event async for event in stream]
            else:
                await anext(stream)
                failed = await refused(alice, max_tokens=200, timeout=SOON)
                assert failed.reason == "TENANT_TOKEN_LIMIT" and failed.retry_after and failed.retry_after < 20
                await stream.aclose()
            await until(lambda: not engine.live_requests)
            engine.script = count_up
            with granted("3 of the prompt and 2 that were made are gone, and no more"):
                await alice.complete("hi", max_tokens=980)
            assert (await refused(alice, max_tokens=900, timeout=SOON)).reason == "TENANT_TOKEN_LIMIT"


async def test_an_embedding_counts_its_tokens_even_if_nobody_waits_for_it(serve: Serve, tmp_path: Path) -> None:
    named = files(tmp_path, "alice: {tokens_per_minute: 100}\n")
    engine = FakeEngine(held(asyncio.Event(), after=0))
    async with serve(engine, admission_wait=0.02, **named) as serving:
        async with SlipstreamClient(serving.target, ONCE, token=ALICE) as alice:
            call = asyncio.create_task(alice.embed(list(range(80))))
            await engine.stream_number(1)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await until(lambda: not engine.live_requests)
            assert (await _refused(alice.embed(list(range(40)), timeout=SOON))).reason == "TENANT_TOKEN_LIMIT"
            engine.refuse_with = Overloaded("full", reason="QUEUE_FULL")
            for _ in range(5):
                failed = await _refused(alice.embed([1] * 15, timeout=SOON))
                assert failed.reason == "QUEUE_FULL", "what is refused costs nothing"


async def test_a_kept_stream_counts_what_it_made_without_a_reader(tmp_path: Path) -> None:
    async with kept_server(0.0005, **files(tmp_path, "alice: {tokens_per_minute: 1000}\n")) as server:
        async with server.client(token=ALICE) as alice:
            call, _ = await begun(alice, "kept", 400)
            call.cancel()
            await until(lambda: not server.server.handle.require().live_requests, within=20)
            failed = await refused(alice, max_tokens=900, **GREEDY)
            assert failed.reason == "TENANT_TOKEN_LIMIT"
            with granted("the rest is there"):
                await alice.complete("hi", max_tokens=300, **GREEDY)
