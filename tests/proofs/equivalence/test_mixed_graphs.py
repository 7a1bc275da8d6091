"""Replayed steps with prompts give the tokens of `transformers`: chunks that go on, cached prefixes, many at once.

The graphs are those of `tests/support/fakes/traced_graphs.py`, which spoil all that a graph does not own.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from core.engine import build
from core.executor import mixed_graphs
from core.executor.mixed_graphs import MixedGraphs
from core.executor.step import StepRunner
from tests.proofs.equivalence.oracle import Example, decided, make_prompts
from tests.proofs.equivalence.test_decode_graphs import (
    OPTIONS,
    answer,
    answer_all,
    graph_engine,
    reference,
    static_addresses,
)
from tests.proofs.equivalence.test_speculation import VOCAB, Setting, assert_same, requests
from tests.proofs.equivalence.test_speculation_grids import Both
from tests.support.checkpoints import make_checkpoint
from tests.support.fakes.adversaries import like_a_coin
from tests.support.fakes.grid_attention import MixedAttention
from tests.support.fakes.traced_graphs import GraphStreams
from tests.support.interpreted import quick_calls
from tests.unit.core.attention.test_conformance import INTERPRETED

__all__ = ["reference"]


def graphs_of(runner: StepRunner) -> MixedGraphs:
    assert runner.mixed is not None
    return runner.mixed


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three numbers of chunk tokens up to what a step of these engines has."""
    monkeypatch.setattr(mixed_graphs, "TOKENS", (6, 14, 1024))


@pytest.mark.parametrize("overlap", [True, False])
async def test_replayed_prompts_equal_transformers(
    reference: tuple[Path, list[Example]], overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, examples = reference
    options: dict[str, Any] = {"overlap": overlap, "backend": MixedAttention}
    async with graph_engine(directory, monkeypatch, **options) as (engine, streams, runner):
        await answer_all(engine, examples)
        assert engine.stats.preemptions > 0, "no row changed hands"
        assert engine.stats.cached_tokens > 0, "no prefix came from the cache"
        # How chunks of many at once are cut depends on when they come.
        for length in (5, 12, 20):
            await answer(engine, tuple(3 + (length * 31 + place * 7) % 90 for place in range(length)))
        mixed, made = graphs_of(runner), streams.graphs.made if streams.graphs else []
        assert [size.tokens for size in mixed._sizes] == [6, 14, 24] and len(made) == 4 + 3
        assert mixed.replays == sum(graph.replays for graph in made[4:])
        assert all(graph.replays for graph in made[4:]), "chunks of every size were replayed"
        allowed = static_addresses(runner) | {
            tensor.untyped_storage().data_ptr() for tensor in (mixed.block.memory, mixed.seq_lens, mixed.sample_lens)
        }
        for graph in made:
            strangers = [t for address, t in graph.borrowed.items() if address not in allowed and t.numel()]
            assert not strangers, [(tuple(t.shape), t.dtype) for t in strangers]
        assert not runner._state.pool.table[0].any()


async def test_every_sampling_option_is_the_same_beside_replayed_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_checkpoint("llama", tmp_path, seed=0)
    outcomes = []
    for patched in (True, False):
        async with graph_engine(directory, monkeypatch, overlap=True, tokens=1024, backend=MixedAttention) as (
            engine,
            _,
            runner,
        ):
            mixed = graphs_of(runner)
            if not patched:
                runner.mixed = None
            asked = [answer(engine, tuple(range(5 + i, 25 + 4 * i)), **options) for i, options in enumerate(OPTIONS)]
            outcomes.append(await asyncio.gather(*asked))
            assert mixed.replays > 3 if patched else not mixed.replays
    for (tokens, logprobs), (plain, expected) in zip(*outcomes, strict=True):
        assert tokens == plain
        assert logprobs == pytest.approx(expected, abs=1e-4)


def test_prompts_are_replayed_beside_drafts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with prompts and grids, each by graphs of its own, over what the other ones left."""
    monkeypatch.setattr(build, "build_attention", lambda *_: MixedAttention())
    both = Both(Setting(), lambda: requests(VOCAB, seed), like_a_coin(seed), GraphStreams())
    assert_same(both.plain, both.seen, requests(VOCAB, seed))
    assert both.drafter.accepted > 0 and both.replays()[1] > 0
    assert graphs_of(both.runner).replays > 3


@pytest.mark.skipif(not INTERPRETED, reason="runs interpreted, in a process of `attention/test_triton.py`")
async def test_interpreted_kernels_inside_graphs_of_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is served on CUDA, as far as a CPU can say: Triton attention, captured, against transformers."""
    from core.attention.triton.backend import TritonAttention

    quick_calls(monkeypatch)
    monkeypatch.setattr(mixed_graphs, "TOKENS", (14,))
    directory = make_checkpoint("llama", tmp_path, seed=0)
    examples = decided(directory, make_prompts(6, 12, seed=3))[:3]
    options: dict[str, Any] = {"overlap": True, "rows": 2, "backend": TritonAttention}
    async with graph_engine(directory, monkeypatch, **options) as (engine, _, runner):
        got = await asyncio.gather(*(answer(engine, example.prompt, max_tokens=6) for example in examples))
        assert [tokens for tokens, _ in got] == [example.output[:6] for example in examples]
        assert graphs_of(runner).replays >= 2
