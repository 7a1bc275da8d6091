"""Replayed decode steps give the tokens of `transformers`, with overlap and without, while batches grow, shrink and are
retracted. The graphs are those of `tests/support/fakes/traced_graphs.py`, which spoil all that a graph does not own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from core.attention.base import AttentionBackend
from core.config import EngineConfig, ExecutorConfig, LoraConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.device.streams import DeviceStreams
from core.engine import build
from core.engine.async_engine import AsyncEngine
from core.executor.decode_graphs import DecodeGraphs
from core.executor.step import StepRunner
from core.memory.cross.cross_pool import CrossPool
from core.memory.recurrent.row_to_slot import HybridReqToTokenPool
from core.models.loader import load_model
from core.text.tokenizer import Tokenizer
from core.types.io import Delta, Finished, GenerateRequest
from core.types.sampling_params import SamplingParams
from tests.proofs.equivalence.oracle import OUTPUT_TOKENS, Example, decided, decided_examples, make_prompts
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import started
from tests.support.fakes.masked_attention import MaskedAttention
from tests.support.fakes.traced_graphs import GraphStreams
from tests.unit.core.attention.test_conformance import INTERPRETED

KINDS = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3")
ROWS, COUNT, LONGEST, CONTEXT = 8, 12, 40, 96


@pytest.fixture(scope="module", params=KINDS)
def reference(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path]) -> tuple[Path, list[Example]]:
    directory = checkpoint_of(request.param)
    return directory, decided_examples(directory, COUNT, LONGEST, seed=2)


@asynccontextmanager
async def graph_engine(
    directory: Path,
    patch: pytest.MonkeyPatch,
    *,
    overlap: bool,
    tokens: int = 120,
    streams: DeviceStreams | None = None,
    rows: int = ROWS,
    backend: type[AttentionBackend] = MaskedAttention,
    lora: LoraConfig | None = None,
    stored: str = "auto",
    **memory: Any,
) -> AsyncIterator[tuple[AsyncEngine, GraphStreams, StepRunner]]:
    """A started engine whose decode steps are captured, its streams, and the runner of its steps.

    With `streams` of a device of its own it is that device's graphs and attention that are tried. `stored`: the format
    of keys and values. `memory`: more of its `MemoryConfig`.
    """
    runners: list[StepRunner] = []
    plain = build._build_runner

    def kept(*args: Any) -> StepRunner:
        runners.append(plain(*args))
        return runners[-1]

    patch.setattr(build, "_build_runner", kept)
    if streams is None:
        patch.setattr(build, "build_attention", lambda *_: backend())
    used: Any = streams or GraphStreams()
    config = EngineConfig(
        model=ModelConfig(str(directory), context_length=CONTEXT, native="off", kv_cache_dtype=stored),
        memory=MemoryConfig(page_size=4, max_running_requests=rows, max_total_tokens=tokens, **memory),
        lora=lora or LoraConfig(),
        scheduler=SchedulerConfig(chunked_prefill_size=24),
        executor=ExecutorConfig(device=used.device.type, overlap=overlap, assert_mode="trap"),
    )
    built = build.assemble(config, load_model(config.model, used.device), Tokenizer.load(str(directory)), used)
    async with started(built) as engine:
        yield engine, used, runners[0]


async def answer(
    engine: AsyncEngine, prompt: tuple[int, ...], adapter: str = "", **sampling: Any
) -> tuple[tuple[int, ...], list[float]]:
    """Tokens and log probabilities of one request."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, **sampling})
    tokens: list[int] = []
    logprobs: list[float] = []
    asked = GenerateRequest(token_ids=prompt, sampling=params, want_text=False, adapter=adapter)
    async for event in await engine.generate(asked):
        if isinstance(event, Delta):
            tokens += event.token_ids
            logprobs += [each.logprob for each in event.logprobs or ()]
        elif isinstance(event, Finished):
            break
    return tuple(tokens), logprobs


def static_addresses(runner: StepRunner) -> set[int]:
    """What a graph may refer to beyond its own memory: it lives as long as the engine does, where it is."""
    state, graphs = runner._state, runner.graphs
    assert isinstance(graphs, DecodeGraphs)
    model: Any = state.model
    packed = getattr(model, "_packed", None)
    module = model.module if packed is None else packed._model
    companions: list[Any] = list(state.companions.values())
    pools = [state.kv_pool, *(each.kv for each in companions if hasattr(each, "kv"))]
    pools += [each.pool for each in companions if isinstance(each, CrossPool)]
    tensors = [
        graphs.block.memory,
        graphs.seq_lens,
        graphs.logits,
        graphs._last,
        state.pool.table,
        state.checks.counters,
    ]
    tensors += [state.future_map.buffer(name) for name in ("output_tokens_buf", "new_seq_lens_buf")]
    tensors.append(state.future_map.violated(1))
    tensors += [each.table for each in companions if hasattr(each, "table")]
    for each in companions:
        if isinstance(each, CrossPool):
            tensors.append(each.lens)
        if isinstance(each, HybridReqToTokenPool):
            held = [(each.states.conv(s.layer_id), each.states.recurrent(s.layer_id)) for s in each.states.layers]
            tensors += [each.mapping, *(state for pair in held for state in pair if state is not None)]
    for pool, number in ((each, spec.layer_id) for each in pools for spec in each.layers):
        scales = (pool.k_scales(number), pool.v_scales(number))
        tensors += [pool.k(number), pool.v(number), *(each for each in scales if each is not None)]
    tensors += [*module.parameters(), *module.buffers()]
    if packed is not None:
        tensors += [packed._hidden, packed._cache.cross_key, *([packed._bias.table] if packed._bias else [])]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


async def crowd(engine: AsyncEngine, examples: list[Example], size: int) -> None:
    """`size` short requests at once, of different lengths, so that the batch shrinks at its end."""
    few = sorted(examples, key=lambda example: len(example.prompt))[:size]
    lengths = [OUTPUT_TOKENS - 2 * place for place in range(size)]
    asked = [answer(engine, example.prompt, max_tokens=length) for example, length in zip(few, lengths, strict=True)]
    got = await asyncio.gather(*asked)
    assert [tokens for tokens, _ in got] == [e.output[:length] for e, length in zip(few, lengths, strict=True)]


async def answer_all(engine: AsyncEngine, examples: list[Example]) -> None:
    """All at once, then a few: the answers are those of `transformers`, and no check has failed."""
    got = await asyncio.gather(*(answer(engine, example.prompt) for example in examples))
    assert [tokens for tokens, _ in got] == [example.output for example in examples]
    for size in (1, 6, 2, 3):
        await crowd(engine, examples, size)
    assert sum(engine.stats.assert_failures.values()) == 0


@pytest.mark.parametrize("overlap", [True, False])
async def test_replayed_steps_equal_transformers(
    reference: tuple[Path, list[Example]], overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, examples = reference
    async with graph_engine(directory, monkeypatch, overlap=overlap) as (engine, streams, runner):
        await answer_all(engine, examples)
        assert engine.stats.preemptions > 0, "no row changed hands"
        assert runner.graphs is not None and streams.graphs is not None
        made = streams.graphs.made
        assert len(made) == 4 and all(graph.replays for graph in made), "batches of every size were replayed"
        assert runner.graphs.replays == sum(graph.replays for graph in made)
        allowed = static_addresses(runner)
        for graph in made:
            strangers = [t for address, t in graph.borrowed.items() if address not in allowed and t.numel()]
            assert not strangers, [(tuple(t.shape), t.dtype) for t in strangers]
        assert not runner._state.pool.table[0].any()


OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.9, "seed": 5, "logprobs": True, "top_logprobs": 3},
    {"temperature": 1.1, "seed": 6, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.8, "seed": 7, "logit_bias": {7: 6.0}, "presence_penalty": 0.5},
    {"logprobs": True},
)


async def test_every_sampling_option_is_the_same_beside_a_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_checkpoint("llama", tmp_path, seed=0)
    outcomes = []
    for patched in (True, False):
        async with graph_engine(directory, monkeypatch, overlap=True, tokens=1024) as (engine, streams, runner):
            if not patched:
                runner.graphs = None
            asked = [answer(engine, (5 + i, 9, 4), **options) for i, options in enumerate(OPTIONS)]
            outcomes.append(await asyncio.gather(*asked))
            made = streams.graphs.made if streams.graphs else []
            assert sum(graph.replays for graph in made) > (8 if patched else -1)
            assert patched or not sum(graph.replays for graph in made)
    for (tokens, logprobs), (plain, expected) in zip(*outcomes, strict=True):
        assert tokens == plain
        assert logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.skipif(not INTERPRETED, reason="runs interpreted, in a process of `attention/test_triton.py`")
async def test_interpreted_kernels_inside_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is served on CUDA, as far as a CPU can say: Triton attention, captured, against transformers."""
    from core.attention.triton.backend import TritonAttention

    directory = make_checkpoint("llama", tmp_path, seed=0)
    examples = decided(directory, make_prompts(6, 12, seed=3))[:3]
    async with graph_engine(directory, monkeypatch, overlap=True, rows=2, backend=TritonAttention) as (
        engine,
        _,
        runner,
    ):
        got = await asyncio.gather(*(answer(engine, example.prompt, max_tokens=6) for example in examples))
        assert [tokens for tokens, _ in got] == [example.output[:6] for example in examples]
        assert runner.graphs is not None and runner.graphs.replays > 5
