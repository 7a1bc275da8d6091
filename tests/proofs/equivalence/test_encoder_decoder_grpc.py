"""Encoder-decoders through gRPC say what `transformers.generate` says, greedy, token for token.

32 requests at once with inputs of 1 to 200 tokens beside a chunk budget of 64; fewer cross pages than rows could fill,
and a decoder pool so small that requests are retracted and encoded again.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from core.config import EngineConfig
from core.types.stats import PoolStats
from service.client import SlipstreamClient
from service.engine.builder import BuiltEngine, Progress, build_core_engine
from service.server.server import Server
from tests.proofs.equivalence.encoder_oracle import Seq2SeqOracle
from tests.proofs.equivalence.oracle import Example
from tests.proofs.equivalence.test_greedy_grpc import _ask
from tests.support.encoder_decoders import make_encoder_decoder
from tests.support.servers import serve_checkpoint

KINDS = ("bart", "mbart", "t5")
LONGEST = 200
CONCURRENT = 32
PAGE = 8
ENCODER_TOKENS = 520
"""Cross pages for about five of the 12 rows."""


@pytest.fixture(scope="module", params=KINDS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Example]]:
    """A checkpoint with seeded random weights, and the oracle's examples for it."""
    directory = make_encoder_decoder(request.param, tmp_path_factory.mktemp(request.param))
    return directory, Seq2SeqOracle(directory).decided(CONCURRENT, LONGEST, seed=1)


@asynccontextmanager
async def serve(
    directory: Path, encoder_tokens: int = ENCODER_TOKENS, **settings: Any
) -> AsyncIterator[tuple[Server, SlipstreamClient]]:
    """A server with few pages of either kind."""

    def build(config: EngineConfig, progress: Progress | None) -> BuiltEngine:
        memory = dataclasses.replace(config.memory, max_encoder_tokens=encoder_tokens)
        return build_core_engine(dataclasses.replace(config, memory=memory), progress)

    limits = {"chunked_prefill_size": 64, "page_size": PAGE, "max_running_requests": 12, "max_total_tokens": 40}
    async with serve_checkpoint(directory, build, **(limits | settings)) as served:
        yield served


def pools(server: Server) -> dict[str, PoolStats]:
    return {pool.name: pool for pool in server.engine.stats.pools}


PATHS: dict[str, dict[str, Any]] = {
    "overlap": {"overlap": True},
    "inline": {"overlap": False},
    "separate": {"overlap": True, "mixed_chunk": False},
}


@pytest.mark.parametrize("path", PATHS)
async def test_greedy_equals_transformers(reference: tuple[Path, list[Example]], path: str) -> None:
    directory, examples = reference
    async with serve(directory, **PATHS[path]) as (server, client):
        answers = await asyncio.gather(*(_ask(client, example) for example in examples))
        stats = server.engine.stats
    wrong = [i for i, (answer, example) in enumerate(zip(answers, examples, strict=True)) if answer != example.output]
    assert not wrong, f"{len(wrong)} of {len(examples)} differ, first: {answers[wrong[0]]} for {examples[wrong[0]]}"
    assert len(set(answers)) > CONCURRENT // 2, "the inputs were meant to decide the outputs"
    assert stats.preemptions > 0, "the pool was meant to be too small"
    assert sum(stats.assert_failures.values()) == 0
    assert pools(server)["cross_page"].capacity == ENCODER_TOKENS // PAGE
    assert all(pool.used == pool.cached == 0 for pool in stats.pools)
