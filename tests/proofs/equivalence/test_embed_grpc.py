"""Embed through gRPC sockets and the real engine: equal to transformers' hidden states pooled by hand, beside streams,
and never in the way of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.types.io import EMBEDDINGS, Pooling
from service.client import CallFailed, Chunk, SlipstreamClient, Vector
from service.server.server import Server
from tests.proofs.equivalence.oracle import OUTPUT_TOKENS, Example, decided_examples, make_prompts
from tests.proofs.equivalence.test_embeddings import pooled_by_hand
from tests.support.servers import ONCE, serve_checkpoint
from tests.support.until import PATIENCE, until

LONGEST = 200
ROWS = 8
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "want_text": False}


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[tuple[Server, SlipstreamClient]]:
    """A server of few rows, in chunks of 32 and pages of 8, that holds nothing at its end."""
    small: dict[str, Any] = {"page_size": 8, "max_running_requests": ROWS, "chunked_prefill_size": 32}
    async with serve_checkpoint(folder, **({"max_total_tokens": 8192} | small | settings)) as (server, client):
        yield server, client
        await until(lambda: not server.engine.live_requests)
        assert await server.tracker.wait_idle(PATIENCE)
        stats = server.engine.stats
        assert [pool for pool in stats.pools if pool.used] == []
        assert not any(stats.assert_failures.values())


@pytest.fixture(scope="module", params=["llama", "bamba", "deepseek_v3"])
def checkpoint(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of(request.param)


@pytest.fixture(scope="module")
def llama(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("llama")


async def output_of(client: SlipstreamClient, prompt: tuple[int, ...]) -> tuple[int, ...]:
    (done,) = await client.complete(prompt, max_tokens=OUTPUT_TOKENS, **GREEDY)
    return done.token_ids


def assert_equal(found: Vector, states: dict[Pooling, np.ndarray], pooling: Pooling, normalize: bool) -> None:
    want = states[pooling]
    want = want / np.linalg.norm(want) if normalize else want
    np.testing.assert_allclose(found.values, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


async def test_vectors_beside_streams_equal_transformers(checkpoint: Path) -> None:
    prompts = make_prompts(48, LONGEST, seed=7)
    states = pooled_by_hand(checkpoint, prompts)
    examples: list[Example] = decided_examples(checkpoint, 8, LONGEST, seed=8)
    kinds = [(pooling, normalize) for pooling in EMBEDDINGS for normalize in (True, False)]
    groups = [range(at, at + 8) for at in range(0, len(prompts), 8)]
    async with serving(checkpoint) as (_, client):
        calls = [
            client.embed(*(prompts[i] for i in group), pooling=pooling.value, normalize=normalize)
            for group, (pooling, normalize) in zip(groups, kinds, strict=True)
        ]
        answers: list[Any] = await asyncio.gather(*(output_of(client, each.prompt) for each in examples), *calls)
        for example, output in zip(examples, answers, strict=False):
            assert output == example.output
        for group, kind, vectors in zip(groups, kinds, answers[len(examples) :], strict=True):
            for i, vector in zip(group, vectors, strict=True):
                assert_equal(vector, states[i], *kind)
                assert vector.prompt_tokens == len(prompts[i])
        info = await client.model_info()
    assert info.embedding_dimension == len(answers[-1][0].values)


async def test_a_text_is_embedded_as_its_tokens(llama: Path) -> None:
    async with serving(llama) as (_, client):
        text = "the quick brown fox"
        ids = await client.tokenize(text)
        as_text, as_ids = await client.embed(text, ids, pooling="mean")
        assert as_text == as_ids and as_text.prompt_tokens == len(ids)
        assert abs(float(np.linalg.norm(as_text.values)) - 1) < 1e-5


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_burst_of_prefills_ends_and_lets_a_stream_through(llama: Path, overlap: bool) -> None:
    """Sixteen times the rows, all of it prefill-only, some of it of many chunks, and a stream in the middle of it."""
    async with serving(llama, overlap=overlap) as (server, client), asyncio.timeout(60):
        prompts = make_prompts(16 * ROWS, LONGEST, seed=9)
        expected = await output_of(client, (5, 6, 7))
        half = len(prompts) // 2
        calls = [asyncio.create_task(client.embed(prompt, pooling="mean")) for prompt in prompts[:half]]
        calls.append(asyncio.create_task(client.embed(*prompts[half:])))
        await until(lambda: server.engine.stats.waiting > ROWS)
        assert await output_of(client, (5, 6, 7)) == expected
        vectors = [vector for found in await asyncio.gather(*calls) for vector in found]
        assert [vector.prompt_tokens for vector in vectors] == [len(prompt) for prompt in prompts]
        assert await output_of(client, (5, 6, 7)) == expected


async def test_cancelling_aborting_and_running_late_free_everything(llama: Path) -> None:
    long = [tuple(3 + (i * step) % 300 for i in range(900)) for step in range(1, 4 * ROWS)]
    async with serving(llama, max_total_tokens=16 * 1024) as (server, client):
        for way in ("cancel", "abort", "deadline"):
            timeout = 0.1 if way == "deadline" else None
            call = asyncio.create_task(client.embed(*long, request_id="long", timeout=timeout, cache_salt=way))
            await until(lambda: server.engine.stats.running > 0)
            if way == "cancel":
                call.cancel()
            elif way == "abort":
                assert await client.abort("long")
            (ended,) = await asyncio.gather(call, return_exceptions=True)
            if way == "cancel":
                assert isinstance(ended, asyncio.CancelledError)
            else:
                assert isinstance(ended, CallFailed)
                assert ended.code.name == ("CANCELLED" if way == "abort" else "DEADLINE_EXCEEDED")
            await until(lambda: not any(pool.used for pool in server.engine.stats.pools))
            assert server.engine.live_requests == 0
        assert len(await client.embed("a", request_id="long")) == 1


async def test_every_refusal_names_its_field(llama: Path) -> None:
    async with serving(llama, max_total_tokens=512, max_queued_requests=40) as (_, client):
        longest = tuple(3 + i % 300 for i in range(512))
        assert (await client.embed(longest))[0].prompt_tokens == 512
        for inputs, fields, named in (
            (("fine", (5, 320), (5, -1)), {}, ["inputs[1].token_ids.ids[1]", "inputs[2].token_ids.ids[1]"]),
            (((*longest, 5),), {}, ["inputs[0].token_ids.ids"]),
            (("a", "z" * 4000), {}, ["inputs[1].text"]),
            (("z" * 100_000,), {}, ["inputs[0].text"]),
            (("a",) * 41, {}, ["inputs"]),
            (("a",), {"dimensions": 0}, ["dimensions"]),
            (("a",), {"dimensions": 65}, ["dimensions"]),
            (("a",), {"adapter": "no name"}, ["adapter"]),
        ):
            with pytest.raises(CallFailed) as failed:
                await client.embed(*inputs, **fields)
            assert (failed.value.code.name, sorted(failed.value.fields)) == ("INVALID_ARGUMENT", named)
        with pytest.raises(CallFailed) as unknown:
            await client.embed("a", adapter="nobody")
        assert (unknown.value.code.name, unknown.value.reason) == ("NOT_FOUND", "ADAPTER_NOT_FOUND")


async def test_a_full_queue_and_a_short_wait(llama: Path) -> None:
    async with serving(llama, max_queued_requests=40) as (server, client):
        long = [tuple(3 + (i * step) % 300 for i in range(300)) for step in range(1, 40)]
        first = asyncio.create_task(client.embed(*long))
        await until(lambda: server.engine.stats.running > 0)
        async with SlipstreamClient(f"127.0.0.1:{server.port}", ONCE) as other:
            with pytest.raises(CallFailed) as full:
                await other.embed(*["a"] * 40)
        assert full.value.reason == "QUEUE_FULL" and full.value.retry_after
        with pytest.raises(CallFailed) as late:
            await client.embed("a", queue_timeout={"nanos": 1})
        assert late.value.reason == "QUEUE_TIMEOUT"
        assert len(await first) == len(long)


async def test_prefixes_are_shared_with_streams_and_counted(llama: Path) -> None:
    prompt = tuple(range(3, 103))
    async with serving(llama) as (server, client):
        await output_of(client, prompt)
        before = server.engine.stats.cached_tokens
        last, mean = [await client.embed(prompt, pooling=pooling) for pooling in ("last", "mean")]
        (other,) = await client.embed(prompt, cache_salt="other")
        assert [last[0].cached_tokens > 0, mean[0].cached_tokens, other.cached_tokens] == [True, 0, 0]
        assert server.engine.stats.cached_tokens - before == last[0].cached_tokens
        stats = server.engine.stats
        assert stats.histograms["embedding_latency_seconds"].counts[-1] == 3
        assert stats.finished["stop"] == 3
        events = client.generate(prompt, max_tokens=4, **GREEDY)
        assert isinstance(await anext(events), Chunk)
        await events.aclose()
