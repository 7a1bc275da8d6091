"""Constrained outputs over real gRPC from a real, tiny model: they match, whatever else happens around them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.client import Completion, SlipstreamClient
from tests.proofs.constraints.asks import BACKENDS, CONSTRAINTS, meets, mixed
from tests.support.servers import serve_checkpoint

TIGHT = {"max_total_tokens": 256, "max_running_requests": 16, "chunked_prefill_size": 48}
"""Pages for a fraction of what 32 requests want, so some have to give way."""


@pytest.fixture(scope="module")
def checkpoint(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("qwen3")


async def together(client: SlipstreamClient, asked: list[dict[str, Any]]) -> list[list[Completion]]:
    return list(await asyncio.gather(*(client.complete(**ask) for ask in asked)))


def ids(outputs: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[each.token_ids for each in output] for output in outputs]


@pytest.mark.parametrize("backend", BACKENDS)
async def test_outputs_match_and_nothing_depends_on_overlap_batch_or_retraction(
    checkpoint: Path, backend: str, seed: int
) -> None:
    asked = mixed(32, seed)
    async with serve_checkpoint(checkpoint, grammar_backend=backend, grammar_callers="*", **TIGHT) as (server, client):
        outputs = await together(client, asked)
        stats = server.engine.stats
        assert stats.preemptions > 0, "the pool was meant to be too small"
        assert not any(stats.assert_failures.values())
        assert (stats.grammars_cached, stats.grammar_compile_failures) == (len(CONSTRAINTS), 0)
        free = [ask for ask in asked if "constraint" not in ask]
        without = await together(client, free)
        # One after another, from another prefix cache and in batches of one.
        alone = [await client.complete(**ask) for ask in asked[:8]]
    for ask, output in zip(asked, outputs, strict=True):
        if "constraint" in ask:
            assert all(meets(ask["constraint"], each) for each in output), (ask, output)
    assert {each.end.reason for output in outputs for each in output} >= {"stop"}
    assert ids([out for ask, out in zip(asked, outputs, strict=True) if ask in free]) == ids(without)
    assert ids(outputs[:8]) == ids(alone)
    if backend == "xgrammar":
        return  # its process takes seconds to start, and the steps are the same
    async with serve_checkpoint(
        checkpoint, grammar_backend=backend, grammar_callers="*", overlap=False, mixed_chunk=False
    ) as (_, client):
        assert ids(await together(client, asked)) == ids(outputs)
