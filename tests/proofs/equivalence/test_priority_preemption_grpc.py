"""Requests that gave way to a higher class say what they say alone: through gRPC, for every kind of pool and request.

Two rows are taken by requests of a lower class, and others of a higher class keep coming. The outputs are sampled, so a
position or a seed that is off by one shows as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from service.client import Chunk, SlipstreamClient
from tests.proofs.constraints.asks import BACKENDS
from tests.support.checkpoints import make_checkpoint
from tests.support.encoder_decoders import make_encoder_decoder
from tests.support.servers import serve_checkpoint
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, make_adapter

LOW, HIGH = 10, -10
ROWS = 2
SETTINGS: dict[str, Any] = {
    "schedule_policy": "priority",
    "max_running_requests": ROWS,
    "page_size": 8,
    "chunked_prefill_size": 32,
}
OPTIONS: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True, "max_tokens": 60}


def asks(count: int, **extra: Any) -> list[dict[str, Any]]:
    prompts = ([3 + (7 * number + at) % 200 for at in range(5 + 9 * number)] for number in range(count))
    return [{**OPTIONS, "prompt": prompt, "seed": number, **extra} for number, prompt in enumerate(prompts)]


async def tokens(client: SlipstreamClient, ask: dict[str, Any], started: asyncio.Event) -> tuple[int, ...]:
    """Of one output; `started` is set by its first."""
    found: list[int] = []
    async for event in client.generate(**ask):
        if isinstance(event, Chunk):
            found += event.token_ids
            started.set()
    return tuple(found)


async def urgent(client: SlipstreamClient, prompt: list[int], running: list[Awaitable[Any]]) -> int:
    """Ask for one token after another, with the higher class, until `running` are done; how often."""
    everything = asyncio.ensure_future(asyncio.gather(*running))
    asked = 0
    while not everything.done():
        await client.complete(prompt, max_tokens=1, priority=HIGH, temperature=0.0)
        asked += 1
    return asked


async def check(client: SlipstreamClient, server: Any, low: list[dict[str, Any]]) -> None:
    """`low` one by one, and then together while requests of a higher class arrive: the same tokens."""
    alone = [await tokens(client, ask, asyncio.Event()) for ask in low]
    assert server.engine.stats.preemptions == 0
    started = [asyncio.Event() for _ in low]
    running = [
        asyncio.ensure_future(tokens(client, {**ask, "priority": LOW}, event))
        for ask, event in zip(low, started, strict=True)
    ]
    for event in started[:ROWS]:
        await event.wait()
    await urgent(client, low[0]["prompt"], list(running))
    assert [await each for each in running] == alone
    stats = server.engine.stats
    assert stats.priority_preemptions > 0, "no request gave way"
    assert stats.priority_preemptions == stats.preemptions and not any(stats.assert_failures.values())


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "inline"])
@pytest.mark.parametrize("kind", ["llama", "bamba", "gemma3_text", "bart"])
async def test_who_gave_way_goes_on_as_if_it_had_not(kind: str, overlap: bool, tmp_path: Path) -> None:
    """Keys and values alone, recurrent states, sliding windows, an encoder."""
    directory = make_encoder_decoder(kind, tmp_path) if kind == "bart" else make_checkpoint(kind, tmp_path)
    async with serve_checkpoint(directory, overlap=overlap, **SETTINGS) as (server, client):
        await check(client, server, asks(ROWS))


async def test_adapters_come_back_with_their_requests(tmp_path: Path) -> None:
    base = make_checkpoint("qwen3", tmp_path / "base")
    path = make_adapter(base, tmp_path / "adapter", 1, **next(iter(ADAPTERS.values())))
    async with serve_checkpoint(base, adapter=(("mine", str(path)),), **SETTINGS) as (server, client):
        await check(client, server, asks(ROWS, adapter="mine"))


@pytest.mark.parametrize("backend", BACKENDS)
async def test_constraints_go_on_where_they_were(backend: str, tmp_path: Path) -> None:
    pattern = {"constraint": {"regex": "[a-z]{60,90}"}, "ignore_eos": False, "max_tokens": 100}
    async with serve_checkpoint(make_checkpoint("qwen3", tmp_path), grammar_backend=backend, **SETTINGS) as (
        server,
        client,
    ):
        await check(client, server, asks(ROWS, **pattern))


async def test_embeddings_start_over(tmp_path: Path) -> None:
    """Without a row for it, a request of a higher class interrupts a long embedding, once."""
    prompt = [3 + at % 200 for at in range(900)]
    async with serve_checkpoint(
        make_checkpoint("llama", tmp_path), **SETTINGS | {"max_running_requests": 1, "chunked_prefill_size": 4}
    ) as (server, client):
        (alone,) = await client.embed(prompt, pooling="mean")
        vector = asyncio.ensure_future(client.embed(prompt, pooling="mean", priority=LOW))
        while server.engine.stats.running == 0:
            await asyncio.sleep(0)
        await client.complete(prompt[:5], max_tokens=1, priority=HIGH, temperature=0.0)
        assert not vector.done(), "the request of the higher class came first"
        (found,) = await vector
        assert server.engine.stats.priority_preemptions == 1
    assert found.values == pytest.approx(alone.values, abs=1e-6)
