"""Replayed decode steps of models that keep more than keys give the tokens of `transformers`, or of PEFT.

Recurrent states come and go with rows, with snapshots and with retractions; encoder inputs with their rows. As in
`test_decode_graphs`, whose engine and graphs these are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.config import LoraConfig
from core.engine.async_engine import AsyncEngine
from core.executor.step import StepRunner
from core.memory.recurrent.state_slots import NAME as STATES
from core.memory.window.window_pages import NAME as WINDOW
from tests.proofs.equivalence.encoder_oracle import Seq2SeqOracle
from tests.proofs.equivalence.oracle import OUTPUT_TOKENS, Example, decided, decided_examples, make_prompts
from tests.proofs.equivalence.test_decode_graphs import LONGEST, answer, answer_all, graph_engine, static_addresses
from tests.support.checkpoints import RECURRENT_CONFIGS, make_checkpoint
from tests.support.encoder_decoders import ENCODER_DECODER_CONFIGS, make_encoder_decoder
from tests.support.fakes.traced_graphs import GraphStreams
from tests.unit.core.attention.test_conformance import INTERPRETED
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, PeftOracle, make_adapter

COUNT = 10


def speaker(kind: str, directory: Path) -> Path:
    """A checkpoint of an encoder-decoder that says the same however long it may speak."""
    ends = {"forced_eos_token_id"} & ENCODER_DECODER_CONFIGS[kind].keys()
    return make_encoder_decoder(kind, directory, seed=0, **dict.fromkeys(ends))


async def replay_all(engine: AsyncEngine, runner: StepRunner, streams: GraphStreams, examples: list[Example]) -> None:
    """All `examples` at once, then some, in batches that shrink; what the graphs read must be where it was."""
    await answer_all(engine, examples)
    assert runner.graphs is not None and streams.graphs is not None
    assert all(graph.replays for graph in streams.graphs.made), "batches of every size were replayed"
    allowed = static_addresses(runner)
    for graph in streams.graphs.made:
        strangers = [t for address, t in graph.borrowed.items() if address not in allowed and t.numel()]
        assert not strangers, [(tuple(t.shape), t.dtype) for t in strangers]


@pytest.mark.parametrize("kind", sorted(RECURRENT_CONFIGS))
async def test_recurrent_rows_resume_from_what_replays_kept(
    kind: str, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that give way, and prompts that end in what another row has said, go on from snapshots of replays."""
    directory = checkpoint_of(kind)
    # More of them than elsewhere: `transformers` is less often decided of what Mamba 1 says.
    examples = decided(directory, make_prompts(2 * COUNT, LONGEST, seed=2))[:COUNT]
    assert len(examples) == COUNT
    kept: dict[str, Any] = {"state_track_interval": 4, "max_state_slots": 24}
    async with graph_engine(directory, monkeypatch, overlap=True, **kept) as (engine, streams, runner):
        await replay_all(engine, runner, streams, examples)
        assert engine.stats.preemptions > 0, "no row changed hands"
        assert not runner.state.companions[STATES].mapping[0]  # type: ignore[attr-defined]
    async with graph_engine(directory, monkeypatch, overlap=True, tokens=1024, **kept) as (engine, _, runner):
        longest = max(examples, key=lambda example: len(example.prompt))
        await answer(engine, longest.prompt)
        said = OUTPUT_TOKENS - 3
        tokens, _ = await answer(engine, longest.prompt + longest.output[:said], max_tokens=3)
        assert tokens == longest.output[said:]
        cached = engine.stats.cached_tokens
        assert cached > len(longest.prompt), "it went on from a state that was kept in decode"


@pytest.mark.parametrize("kind", sorted(ENCODER_DECODER_CONFIGS))
async def test_rows_hear_their_own_inputs(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T5's bias is computed inside the graph."""
    directory = speaker(kind, tmp_path)
    examples = Seq2SeqOracle(directory).decided(COUNT, LONGEST, seed=1)
    memory: dict[str, Any] = {"tokens": 100, "max_encoder_tokens": 800}
    async with graph_engine(directory, monkeypatch, overlap=True, **memory) as (engine, streams, runner):
        await replay_all(engine, runner, streams, examples)
        assert engine.stats.preemptions > 0, "no row changed hands"


async def test_windows_pass_pages_that_others_take(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer window pages than keys have: replays read where a page is now."""
    directory = checkpoint_of("gemma3_text")
    examples = decided_examples(directory, COUNT, LONGEST, seed=2)
    async with graph_engine(directory, monkeypatch, overlap=True, tokens=480) as (engine, streams, runner):
        windows: Any = runner.state.companions[WINDOW]
        assert windows.kv.num_pages < runner.state.kv_pool.num_pages
        await replay_all(engine, runner, streams, examples)


@pytest.mark.skipif(not INTERPRETED, reason="runs interpreted, in a process of `attention/test_triton.py`")
async def test_interpreted_adapters_inside_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row by its own adapter, or by none, as PEFT says it, with every step of decode rows replayed."""
    base = make_checkpoint("qwen3", tmp_path / "base", seed=0)
    made = {name: make_adapter(base, tmp_path / name, i, **ADAPTERS[name]) for i, name in enumerate(("all", "regex"))}
    oracle, prompt, count = PeftOracle(base, made), [5, 9, 4, 11], 5
    lora = LoraConfig(adapters=tuple((name, str(path)) for name, path in made.items()), max_rank=8)
    async with graph_engine(base, monkeypatch, overlap=True, rows=4, lora=lora) as (engine, _, runner):
        names = ("", *made)
        asked = [answer(engine, tuple(prompt), adapter=name, max_tokens=count) for name in names]
        got = await asyncio.gather(*asked)
        assert [list(tokens) for tokens, _ in got] == [oracle.greedy(prompt, name or None, count) for name in names]
        assert runner.graphs is not None and runner.graphs.replays >= count - 1


@pytest.mark.skipif(not INTERPRETED, reason="runs interpreted, in a process of `attention/test_triton.py`")
async def test_interpreted_t5_inside_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is served on CUDA: both attentions of a decoder by kernels, that of its own tokens with a bias."""
    from core.attention.triton.backend import TritonAttention

    directory = speaker("t5", tmp_path)
    examples, count = Seq2SeqOracle(directory).decided(4, 10, seed=1), 4
    async with graph_engine(directory, monkeypatch, overlap=True, rows=2, backend=TritonAttention) as (
        engine,
        _,
        runner,
    ):
        got = await asyncio.gather(*(answer(engine, example.prompt, max_tokens=count) for example in examples))
        assert [tokens for tokens, _ in got] == [example.output[:count] for example in examples]
        assert runner.graphs is not None and runner.graphs.replays >= count - 1
