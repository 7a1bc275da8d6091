"""A recurrent request that gave way goes on from its newest snapshot, and says what `transformers.generate` says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig
from core.engine.build import build_engine
from tests.proofs.equivalence.oracle import Example, decided_examples
from tests.proofs.equivalence.test_embeddings import tokens_of
from tests.support.engines import started

PAGE = 8
PAGES = 5
"""Two prompts of one page grow to three pages each."""


@pytest.fixture(scope="module", params=["bamba", "jamba"])
def reference(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path]) -> tuple[Path, list[Example]]:
    """A Mamba-2 and a Mamba-1 checkpoint, and two examples of seven tokens or fewer that need three pages."""
    directory = checkpoint_of(request.param)
    examples = [e for e in decided_examples(directory, 12, PAGE - 1, 1) if len(e.prompt) > 1]
    first = examples[0]
    return directory, [first, next(e for e in examples if e.prompt[0] != first.prompt[0])]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "inline"])
@pytest.mark.parametrize("interval", [PAGE, 4096], ids=["resumed", "recomputed"])
async def test_resumed_streams_equal_transformers(
    reference: tuple[Path, list[Example]], overlap: bool, interval: int
) -> None:
    directory, examples = reference
    built = build_engine(
        EngineConfig(
            model=ModelConfig(str(directory), dtype="float32"),
            memory=MemoryConfig(
                page_size=PAGE, max_running_requests=2, max_total_tokens=PAGES * PAGE, state_track_interval=interval
            ),
            executor=ExecutorConfig(device="cpu", overlap=overlap, assert_mode="trap", cpu_threads=1),
        )
    )
    async with started(built) as engine:
        answers = await asyncio.gather(*(tokens_of(engine, example.prompt) for example in examples))
        stats = engine.stats
    assert answers == [example.output for example in examples]
    assert stats.preemptions == 1, "two of three pages each do not fit into five"
    written = 2 * PAGE
    assert (stats.recomputed_tokens <= PAGE) if interval == PAGE else (stats.recomputed_tokens > written)
    assert all(pool.used == 0 for pool in stats.pools)
