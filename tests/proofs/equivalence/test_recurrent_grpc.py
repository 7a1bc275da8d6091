"""Recurrent and hybrid models through gRPC say what `transformers.generate` says, greedy, token for token.

32 requests at once in chunks of 32, a page pool so small that requests are retracted, and fewer state slots than rows.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from core.config import EngineConfig
from service.engine.builder import BuiltEngine, Progress, build_core_engine
from tests.proofs.equivalence.oracle import Example, decided_examples
from tests.proofs.equivalence.test_greedy_grpc import _ask
from tests.support.checkpoints import RECURRENT_CONFIGS
from tests.support.servers import serve_checkpoint

LONGEST = 100
CONCURRENT = 32
PROMPT_SEEDS = {"qwen3_next": 2, "lfm2": 2, "falcon_mamba": 7}
"""Where with seed 1 the shortest or longest prompt, or too many, meet a tie that the oracle itself cannot decide."""

STATE_SLOTS = 9
"""Of 12 request rows."""


@pytest.fixture(scope="module", params=RECURRENT_CONFIGS)
def reference(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path]) -> tuple[Path, list[Example]]:
    """A checkpoint with seeded random weights, and the oracle's examples for it."""
    directory = checkpoint_of(request.param)
    examples = decided_examples(directory, CONCURRENT, LONGEST, PROMPT_SEEDS.get(request.param, 1))
    # The longest first: the pages do not suffice for two of them, however far apart on a slow machine the others come.
    return directory, sorted(examples, key=lambda example: -len(example.output))


def _few_slots(config: EngineConfig, progress: Progress | None) -> BuiltEngine:
    memory = dataclasses.replace(config.memory, max_state_slots=STATE_SLOTS)
    return build_core_engine(dataclasses.replace(config, memory=memory), progress)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "inline"])
async def test_greedy_equals_transformers(reference: tuple[Path, list[Example]], overlap: bool) -> None:
    directory, examples = reference
    async with serve_checkpoint(
        directory,
        _few_slots,
        overlap=overlap,
        chunked_prefill_size=32,
        page_size=8,
        max_running_requests=12,
        max_total_tokens=LONGEST + 40,
    ) as (server, client):
        answers = await asyncio.gather(*(_ask(client, example) for example in examples))
        stats = server.engine.stats
    wrong = [i for i, (answer, example) in enumerate(zip(answers, examples, strict=True)) if answer != example.output]
    assert not wrong, f"{len(wrong)} of {len(examples)} differ, first: {answers[wrong[0]]} for {examples[wrong[0]]}"
    assert stats.preemptions > 0, "the pool was meant to be too small"
    assert sum(stats.assert_failures.values()) == 0
    pools = {pool.name: pool for pool in stats.pools}
    assert (pools["mamba"].capacity, pools["req"].capacity) == (STATE_SLOTS, 12)
    assert all(pool.used == 0 for pool in stats.pools)
