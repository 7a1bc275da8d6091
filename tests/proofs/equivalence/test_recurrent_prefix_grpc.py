"""Recurrent models behind cached prefixes say what `transformers.generate` says, and compute only what is new."""

from __future__ import annotations

import asyncio
import dataclasses
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from core.config import EngineConfig
from service.client import SlipstreamClient
from service.engine.builder import BuiltEngine, EngineBuilder, Progress, build_core_engine
from tests.proofs.equivalence.oracle import OUTPUT_TOKENS, Example, decided, decided_examples, make_prompts
from tests.proofs.equivalence.test_recurrent_grpc import PROMPT_SEEDS
from tests.support.checkpoints import RECURRENT_CONFIGS
from tests.support.servers import serve_checkpoint

LONGEST = 70
PAGE = 8
MANY = 80
"""State slots that nobody has to give up."""
TURN = 10
"""Output tokens that a second turn sends back as its prompt's end."""


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path]) -> tuple[Path, list[Example]]:
    """A checkpoint with seeded random weights, and the oracle's examples for it."""
    directory = checkpoint_of(request.param)
    return directory, decided_examples(directory, 12, LONGEST, PROMPT_SEEDS.get(request.param, 1))


async def _ask(client: SlipstreamClient, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    (answer,) = await client.complete(prompt, temperature=0.0, max_tokens=count, ignore_eos=True, want_text=False)
    return answer.token_ids


def _kept_every(interval: int, slots: int) -> EngineBuilder:
    def build(config: EngineConfig, progress: Progress | None) -> BuiltEngine:
        memory = dataclasses.replace(config.memory, max_state_slots=slots, state_track_interval=interval)
        return build_core_engine(dataclasses.replace(config, memory=memory), progress)

    return build


def _scrape(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        return str(response.read().decode()).splitlines()


def _second_turn_starts_at(prompt: int, buffers: int) -> int:
    """The newest state that is kept before the end of what the second turn sends, of `buffers` kept in decode."""
    in_prompt = (prompt - 1) // PAGE * PAGE
    reached = range(in_prompt + PAGE, prompt + OUTPUT_TOKENS, PAGE)
    kept = reached[max(0, len(reached) - buffers) :]
    return max((end for end in kept if end < prompt + TURN), default=in_prompt)


PATHS = {
    "overlap": (True, PAGE, MANY),
    "inline": (False, PAGE, MANY),
    "prompts-only": (True, 4096, MANY),
    "few-slots": (True, PAGE, 5),
}
"""Overlap, every how many tokens a state is kept in decode, state slots."""
QUICK = ("qwen3_next", "mamba2")
"""Take every path in every run; the others two of them, and all four in the soak."""
CASES = [
    pytest.param(kind, path, marks=() if kind in QUICK or path in ("overlap", "few-slots") else pytest.mark.soak)
    for kind in RECURRENT_CONFIGS
    for path in PATHS
]


@pytest.mark.parametrize(("reference", "path"), CASES, indirect=["reference"])
async def test_prefix_hits_equal_transformers(reference: tuple[Path, list[Example]], path: str) -> None:
    directory, examples = reference
    overlap, interval, slots = PATHS[path]
    async with serve_checkpoint(
        directory,
        _kept_every(interval, slots),
        overlap=overlap,
        chunked_prefill_size=24,
        page_size=PAGE,
        max_running_requests=4,
        max_total_tokens=4096,
    ) as (server, client):

        async def turn(sent: int) -> tuple[list[int], int]:
            """Ask all prompts with `sent` tokens of their outputs behind them: who is wrong, and tokens found."""
            before = server.engine.stats.cached_tokens
            asked = (_ask(client, e.prompt + e.output[:sent], OUTPUT_TOKENS - sent) for e in examples)
            answers = await asyncio.gather(*asked)
            wrong = [i for i, e in enumerate(examples) if answers[i] != e.output[sent:]]
            return wrong, server.engine.stats.cached_tokens - before

        first, again, second = await turn(0), await turn(0), await turn(TURN)
        stats = server.engine.stats
    assert (first[0], again[0], second[0]) == ([], [], [])
    in_prompts = sum((len(e.prompt) - 1) // PAGE * PAGE for e in examples)
    if slots == MANY:
        assert again[1] == in_prompts, "every prompt resumes at its last boundary"
        buffers = 0 if interval > PAGE else 2 if overlap else 1
        assert second[1] == sum(_second_turn_starts_at(len(e.prompt), buffers) for e in examples)
    assert sum(stats.assert_failures.values()) == 0
    assert all(pool.used == 0 for pool in stats.pools)


@pytest.mark.parametrize("reference", RECURRENT_CONFIGS, indirect=True)
async def test_a_shared_system_prompt_is_found_by_the_third_who_sends_it(
    reference: tuple[Path, list[Example]],
) -> None:
    directory, _ = reference
    system, *questions = sorted(make_prompts(12, 40, 5), key=len, reverse=True)
    examples = decided(directory, [system + question for question in questions])[:4]
    found = []
    async with serve_checkpoint(
        directory, _kept_every(4096, MANY), chunked_prefill_size=24, page_size=PAGE, max_total_tokens=4096
    ) as (server, client):
        for example in examples:
            before = server.engine.stats.cached_tokens
            assert await _ask(client, example.prompt, OUTPUT_TOKENS) == example.output
            found.append(server.engine.stats.cached_tokens - before)
        metrics = await asyncio.to_thread(_scrape, server.metrics_port)
    assert found == [0, 0, 40, 40], "the second parts from the first, which leaves a state there"
    pool = {line.split("{")[0]: float(line.split()[1]) for line in metrics if 'pool="mamba"' in line}
    assert pool == {
        "slipstream_pool_capacity": MANY,
        "slipstream_pool_used": 0,
        # The end of each prompt, and where they part.
        "slipstream_pool_cached": len(examples) + 1,
    }
