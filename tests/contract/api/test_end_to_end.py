"""The real engine behind the real server: what a client sees of a random-weight model, and what is left over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from core.types.stats import EngineStats
from service.client import CallFailed, Chunk, SlipstreamClient
from service.config.server_config import ServerConfig
from service.engine.builder import build_core_engine
from service.server.server import Server
from tests.support.checkpoints import make_checkpoint
from tests.support.servers import loaded
from tests.support.until import PATIENCE

PROMPTS = ("the quick brown fox", "pack my box with", "a token is a token until")


def in_use(stats: EngineStats) -> dict[str, int]:
    """Units held by live requests, by pool."""
    return {pool.name: pool.used for pool in stats.pools if pool.used}


@pytest.mark.parametrize("overlap", [True, False])
async def test_streams_refusals_aborts_deadlines_and_drain(
    tmp_path: Path, config: Callable[..., ServerConfig], overlap: bool
) -> None:
    folder = make_checkpoint("llama", tmp_path / "llama")
    stages: list[str] = []
    asked = config(model=str(folder), overlap=overlap, device="cpu", cpu_threads=1, max_total_tokens=8192, seed=3)
    server = Server(asked, build_core_engine, lambda stage, fraction: stages.append(stage))
    async with loaded(server), SlipstreamClient(f"127.0.0.1:{server.port}") as client:
        assert stages, "loading shows progress"

        async def one(number: int) -> tuple[int, ...]:
            prompt = PROMPTS[number % len(PROMPTS)]
            (done,) = await client.complete(prompt, max_tokens=20, seed=7, ignore_eos=True)
            assert (done.end.reason, done.end.completion_tokens, len(done.token_ids)) == ("length", 20, 20)
            return done.token_ids

        alone = [await one(number) for number in range(len(PROMPTS))]
        together = await asyncio.gather(*(one(number) for number in range(24)))
        assert together == [alone[number % len(PROMPTS)] for number in range(24)], "a seed does not depend on the batch"

        with pytest.raises(CallFailed) as failed:
            await client.complete([0, 10**6])
        assert list(failed.value.fields) == ["token_ids.ids[1]"]
        with pytest.raises(CallFailed) as failed:
            await client.complete("x", max_tokens=10**6)
        assert list(failed.value.fields) == ["sampling_params.max_tokens"]

        events = client.generate("x", max_tokens=900, ignore_eos=True, request_id="long")
        assert isinstance(await anext(events), Chunk)
        assert await client.abort("long")
        rest = [event async for event in events]
        assert rest[-1].reason == "cancelled"  # type: ignore[union-attr]

        with pytest.raises(CallFailed) as failed:
            await client.complete("x", max_tokens=900, ignore_eos=True, timeout=0.1)
        assert failed.value.code is grpc.StatusCode.DEADLINE_EXCEEDED

        chat = await client.complete([{"role": "user", "content": "hello"}], max_tokens=3, ignore_eos=True)
        assert chat[0].end.completion_tokens == 3
        assert await client.detokenize(await client.tokenize("the fox")) == "the fox"

        assert await server.tracker.wait_idle(PATIENCE)
        async with asyncio.timeout(PATIENCE):
            assert await server.drain(0.0, PATIENCE) == 0
        assert in_use(server.engine.stats) == {}
        assert not any(server.engine.stats.assert_failures.values())
