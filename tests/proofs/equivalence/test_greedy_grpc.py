"""Greedy output through gRPC is what `transformers.generate` says, token for token, on every path through the engine.

64 requests at once, prompts of 1 to 600 tokens in chunks of 64, a pool so small that requests are retracted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.client import SlipstreamClient
from tests.proofs.equivalence.oracle import OUTPUT_TOKENS, Example, decided_examples
from tests.support.servers import serve_checkpoint

KINDS = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma3_text",
    "gemma4_text",
    "qwen3_moe",
    "gpt_oss",
    "mixtral",
    "cohere2",
    "deepseek_v3",
    "bloom",
    "gpt_neo",
)
LONGEST = 600
CONCURRENT = 64
WINDOWED = ("mistral", "gemma3_text", "gemma4_text", "gpt_oss", "cohere2", "gpt_neo")
WINDOW_TOKENS = 128
"""Room for the windows of 16 of few requests at once: the longest prompt alone goes through it five times."""


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path]) -> tuple[Path, list[Example]]:
    """A checkpoint with seeded random weights, and the oracle's examples for it."""
    directory = checkpoint_of(request.param)
    return directory, decided_examples(directory, CONCURRENT, LONGEST, seed=1)


PATHS: dict[str, dict[str, Any]] = {
    "overlap-radix": {"overlap": True, "prefix_cache": "radix"},
    "overlap-none": {"overlap": True, "prefix_cache": "none"},
    "inline-radix": {"overlap": False, "prefix_cache": "radix"},
    "inline-none": {"overlap": False, "prefix_cache": "none"},
    "separate": {"overlap": True, "prefix_cache": "radix", "mixed_chunk": False},
}
"""Settings that must not change a token; `separate` never puts prompt chunks and decodes into one step."""

QUICK = ("llama", "deepseek_v3")
"""Take every path in every run; the others two of them, and all five in the soak."""
CASES = [
    pytest.param(kind, path, marks=() if kind in QUICK or path in ("overlap-radix", "separate") else pytest.mark.soak)
    for kind in KINDS
    for path in PATHS
]

PREEMPTIONS: dict[Path, int] = {}
"""Retractions of each checkpoint over all its paths."""


@pytest.mark.parametrize(("reference", "path"), CASES, indirect=["reference"])
async def test_greedy_equals_transformers(reference: tuple[Path, list[Example]], path: str) -> None:
    directory, examples = reference
    async with serve_checkpoint(
        directory,
        **PATHS[path],
        chunked_prefill_size=64,
        page_size=8,
        max_running_requests=24,
        max_total_tokens=LONGEST + 40,
        max_window_tokens=WINDOW_TOKENS,
    ) as (server, client):
        answers = await asyncio.gather(*(_ask(client, example) for example in examples))
        # While 64 compete for so few pages it is chance whether a prefix survives; alone it must.
        longest = max(examples, key=lambda example: len(example.prompt))
        again = [await _ask(client, longest) for _ in range(2)]
        stats = server.engine.stats
    assert again == [longest.output] * 2
    wrong = [i for i, (answer, example) in enumerate(zip(answers, examples, strict=True)) if answer != example.output]
    assert not wrong, f"{len(wrong)} of {len(examples)} differ, first: {answers[wrong[0]]} for {examples[wrong[0]]}"
    PREEMPTIONS[directory] = PREEMPTIONS.get(directory, 0) + stats.preemptions
    if path == list(PATHS)[-1]:
        # Which path retracts depends on the order of arrival; that none of them does would be the pool's fault.
        assert PREEMPTIONS[directory] > 0, "the pool was meant to be too small"
    assert (stats.cached_tokens > 0) == (PATHS[path]["prefix_cache"] == "radix")
    assert sum(stats.assert_failures.values()) == 0
    assert all(pool.used == 0 for pool in stats.pools)
    capacity = {pool.name: pool.capacity * 8 for pool in stats.pools}
    assert capacity.get("swa_page") == (WINDOW_TOKENS if directory.name.startswith(WINDOWED) else None)


async def _ask(client: SlipstreamClient, example: Example) -> tuple[int, ...]:
    (answer,) = await client.complete(
        example.prompt, temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, want_text=False
    )
    assert answer.end.reason == "length"
    return answer.token_ids
