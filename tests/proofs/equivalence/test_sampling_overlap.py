"""Every sampling parameter gives the same tokens with overlap, without it, and to a request that runs alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.client import Completion, SlipstreamClient
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.sampling_matrix import SAMPLING_MATRIX
from tests.support.servers import serve_checkpoint

OPTIONS: dict[str, dict[str, Any]] = {
    **SAMPLING_MATRIX,
    "stop": {"temperature": 1.5, "stop": ["e", "th"]},
    "include_stop": {"temperature": 1.5, "stop": ["o"], "include_stop_in_output": True},
    "n": {"temperature": 1.0, "n": 3},
    "special_tokens": {"temperature": 2.0, "skip_special_tokens": False},
    "one_token": {"temperature": 1.0, "max_tokens": 1},
}

Outcome = list[tuple[tuple[int, ...], str, str, str | int | None]]


@pytest.fixture(scope="module")
def checkpoint(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("qwen3")


@pytest.fixture(scope="module")
def requests() -> list[dict[str, Any]]:
    """Three requests per kind of option, all with a seed of their own."""
    rng = random.Random(7)
    asked: list[dict[str, Any]] = []
    for options in OPTIONS.values():
        for _ in range(3):
            prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
            asked.append(
                {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "seed": rng.getrandbits(40), **options}
            )
    rng.shuffle(asked)
    return asked


def _outcome(completions: list[Completion]) -> Outcome:
    return [(c.token_ids, c.text, c.end.reason, c.end.matched_stop) for c in completions]


async def _serve_all(
    checkpoint: Path, requests: list[dict[str, Any]], together: bool, **settings: Any
) -> list[Outcome]:
    async with serve_checkpoint(checkpoint, chunked_prefill_size=48, max_total_tokens=1024, **settings) as (
        server,
        client,
    ):
        if together:
            outcomes = list(await asyncio.gather(*(_one(client, request) for request in requests)))
        else:
            outcomes = [await _one(client, request) for request in requests]
        assert sum(server.engine.stats.assert_failures.values()) == 0
        return outcomes


async def _one(client: SlipstreamClient, request: dict[str, Any]) -> Outcome:
    return _outcome(await client.complete(**request))


async def test_overlap_inline_and_alone_agree(checkpoint: Path, requests: list[dict[str, Any]]) -> None:
    overlapped = await _serve_all(checkpoint, requests, together=True, overlap=True)
    inline = await _serve_all(checkpoint, requests, together=True, overlap=False)
    alone = await _serve_all(checkpoint, requests, together=False, overlap=True, prefix_cache="none")
    for request, a, b, c in zip(requests, overlapped, inline, alone, strict=True):
        assert a == b, f"overlap and inline differ for {request}"
        assert a == c, f"batched and alone differ for {request}"
    reasons = {outcome[2] for outcomes in overlapped for outcome in outcomes}
    assert reasons == {"stop", "length"}, "the options were meant to reach both ends"


async def test_a_seed_decides_the_output_and_samples_differ(checkpoint: Path) -> None:
    prompt, options = [5, 6, 7], {"temperature": 1.5, "max_tokens": 20, "ignore_eos": True}
    async with serve_checkpoint(checkpoint) as (_, client):
        first, again = [await client.complete(prompt, seed=3, **options) for _ in range(2)]
        other = await client.complete(prompt, seed=4, **options)
        many = await client.complete(prompt, seed=3, n=4, **options)
        unseeded = [await client.complete(prompt, **options) for _ in range(2)]
    assert _outcome(first) == _outcome(again) != _outcome(other)
    assert many[0].token_ids == first[0].token_ids, "sample 0 is what n=1 gives"
    assert len({c.token_ids for c in many}) == 4
    assert _outcome(unseeded[0]) != _outcome(unseeded[1])
    assert [c.end.cached_tokens for c in many] == [0, 0, 0, 0], "a prompt shorter than a page has nothing to share"
