"""With keys and values in eight bits every kind of model says in a crowd what it says to one request at a time.

In the crowd prompts come in chunks and from the prefix cache, rows give way to each other, and steps are replayed where
they can be captured. The graphs are those of `tests/support/fakes/traced_graphs.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from core.attention.torch_native import TorchNativeAttention
from core.config import EngineConfig, LoraConfig, MemoryConfig, ModelConfig
from core.device.streams import DeviceStreams
from core.engine.async_engine import AsyncEngine
from core.engine.build_pools import build_pools
from core.executor import mixed_graphs
from core.executor.step import StepRunner
from core.memory import kv_e4m3
from core.memory.kv_pool import KVPool
from core.memory.recurrent.state_slots import NAME as STATES
from core.memory.window.window_pages import NAME as WINDOW
from core.models.loader import load_model
from core.types.io import Delta, GenerateRequest
from core.types.sampling_params import SamplingParams
from tests.proofs.equivalence.oracle import OUTPUT_TOKENS, make_prompts
from tests.proofs.equivalence.test_decode_graphs import LONGEST, graph_engine, static_addresses
from tests.support.checkpoints import make_checkpoint
from tests.support.fakes.grid_attention import MixedAttention
from tests.support.fakes.masked_attention import MaskedAttention
from tests.support.fakes.traced_graphs import GraphStreams
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, make_adapter

COUNT, FEWEST = 10, 6
MARGIN = 0.03
"""Sums in another order may send a number to its neighbouring code, which moves logits by less than that."""
STORED = "fp8_e4m3"
CPU = torch.device("cpu")
NAMES = ("all", "regex")
Asked = tuple[tuple[int, ...], str]
"""A prompt and the name of an adapter."""
Answers = dict[Asked, list[int]]


async def answer(engine: AsyncEngine, asked: Asked, count: int = OUTPUT_TOKENS) -> tuple[list[int], list[float]]:
    """`count` tokens of one request, and by how much each was chosen, as a log probability."""
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=True, top_logprobs=2)
    request = GenerateRequest(token_ids=asked[0], sampling=sampling, want_text=False, adapter=asked[1])
    tokens, margins = list[int](), list[float]()
    async for event in await engine.generate(request):
        if isinstance(event, Delta):
            tokens += event.token_ids
            margins += [each.top[0][1] - each.top[1][1] for each in event.logprobs or ()]
    return tokens, margins


async def one_at_a_time(directory: Path, patch: pytest.MonkeyPatch, asked: list[Asked], **options: Any) -> Answers:
    """What each of `asked` is told alone, up to where rounding may decide."""
    calm: dict[str, Any] = {"overlap": False, "tokens": 1024, "prefix_cache": "none", "backend": TorchNativeAttention}
    found: Answers = {}
    async with graph_engine(directory, patch, stored=STORED, **calm, **options) as (engine, _, runner):
        for each in asked:
            tokens, margins = await answer(engine, each)
            sure = sum(1 for _ in takewhile(lambda margin: margin > MARGIN, margins))
            if sure >= FEWEST:
                found[each] = tokens[:sure]
        assert engine.stats.preemptions == engine.stats.cached_tokens == 0
        assert_in_codes(runner)
    assert len(found) >= COUNT and sum(map(len, found.values())) > 10 * COUNT, {len(each) for each in found.values()}
    return found


async def in_a_crowd(
    directory: Path, patch: pytest.MonkeyPatch, expected: Answers, backend: Any, **options: Any
) -> tuple[StepRunner, GraphStreams]:
    """All of `expected` at once, in little room, and the longest prompt again."""
    async with graph_engine(directory, patch, overlap=True, stored=STORED, backend=backend, **options) as (
        engine,
        streams,
        runner,
    ):
        found = await asyncio.gather(*(answer(engine, each, len(tokens)) for each, tokens in expected.items()))
        assert [tokens for tokens, _ in found] == list(expected.values())
        again = max(expected, key=lambda each: len(each[0]))
        for _ in range(2):
            tokens, _ = await answer(engine, again, len(expected[again]))
            assert tokens == expected[again]
        assert engine.stats.preemptions > 0, "no row changed hands"
        assert engine.stats.cached_tokens > 0, "no prefix came from the cache"
        assert sum(engine.stats.assert_failures.values()) == 0
        assert_in_codes(runner)
        return runner, streams


def assert_in_codes(runner: StepRunner) -> None:
    """Every pool of keys holds a byte for a number and one for a scale."""
    windows: Any = runner.state.companions.get(WINDOW)
    for pool in [runner.state.kv_pool] if windows is None else [runner.state.kv_pool, windows.kv]:
        for layer in pool.layers:
            held = [pool.k(layer.layer_id)] if layer.v_in_k else [pool.k(layer.layer_id), pool.v(layer.layer_id)]
            scales = pool.k_scales(layer.layer_id), pool.v_scales(layer.layer_id)
            held += [each for each in scales[: len(held)] if each is not None]
            assert {each.dtype for each in held} == {torch.uint8} and all(bool(each.any()) for each in held)
            assert sum(each.nbytes for each in held) == pool.num_slots * (layer.elements + layer.scales)


def prompts(count: int = 16) -> list[Asked]:
    return [(prompt, "") for prompt in dict.fromkeys(make_prompts(count, LONGEST, seed=2))]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
async def test_replayed_steps_say_what_launched_ones_say(
    kind: str, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full attention, windows with a pool of their own, windows with sinks, and latents."""
    monkeypatch.setattr(mixed_graphs, "TOKENS", (6, 14, 1024))
    directory = checkpoint_of(kind)
    expected = await one_at_a_time(directory, monkeypatch, prompts())
    runner, streams = await in_a_crowd(directory, monkeypatch, expected, MixedAttention)
    assert runner.mixed is not None and runner.mixed.replays and streams.graphs is not None
    made = streams.graphs.made
    assert len(made) == 7 and sum(graph.replays > 0 for graph in made) > 4, "four sizes of decode steps, three of mixed"
    blocks = (runner.mixed.block.memory, runner.mixed.seq_lens, runner.mixed.sample_lens, kv_e4m3._numbers(CPU))
    allowed = static_addresses(runner) | {each.untyped_storage().data_ptr() for each in blocks}
    for graph in made:
        strangers = [t for address, t in graph.borrowed.items() if address not in allowed and t.numel()]
        assert not strangers, [(tuple(t.shape), t.dtype) for t in strangers]


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma4_text", "llama4_text", "deepseek_v3"])
async def test_kinds_of_attention_say_the_same_in_a_crowd(
    kind: str, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the attention that serves on a CPU: windows, layers that share their keys, spans in chunks, latents."""
    directory = checkpoint_of(kind)
    expected = await one_at_a_time(directory, monkeypatch, prompts())
    await in_a_crowd(directory, monkeypatch, expected, TorchNativeAttention)


@pytest.mark.parametrize("kind", ["qwen3_next", "bamba"])
async def test_recurrent_layers_beside_coded_ones_keep_their_states(
    kind: str, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint_of(kind)
    kept: dict[str, Any] = {"state_track_interval": 4, "max_state_slots": 24}
    expected = await one_at_a_time(directory, monkeypatch, prompts(), max_state_slots=24)
    runner, _ = await in_a_crowd(directory, monkeypatch, expected, MaskedAttention, **kept)
    assert runner.graphs is not None and runner.graphs.replays
    states: Any = runner.state.companions[STATES]
    assert not states.mapping[0], "states keep their own type, and their padding"


async def test_adapters_have_keys_of_their_own_in_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_checkpoint("qwen3", tmp_path / "base", seed=0)
    made = [(name, str(make_adapter(base, tmp_path / name, n, **ADAPTERS[name]))) for n, name in enumerate(NAMES)]
    lora = LoraConfig(adapters=tuple(made), max_rank=8)
    asked = [(prompt, name) for prompt, _ in prompts(8) for name in ("", *NAMES)]
    expected = await one_at_a_time(base, monkeypatch, asked, lora=lora)
    await in_a_crowd(base, monkeypatch, expected, TorchNativeAttention, lora=lora)
    said: dict[tuple[int, ...], dict[str, tuple[int, ...]]] = {}
    for (prompt, name), tokens in expected.items():
        said.setdefault(prompt, {})[name] = tuple(tokens[:FEWEST])
    both = [each for each in said.values() if len(each) > 1]
    assert both and all(len(set(each.values())) == len(each) for each in both), "adapters say something else"


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v3"])
def test_the_same_memory_holds_nearly_twice_as_many_tokens(
    kind: str, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one pool, of two, and of latents; heads of 16 elements pay a byte for 16."""
    budget, page = 1 << 20, 4
    for place in ("core.memory.sizing.free_bytes", "core.memory.window.window_sizing.free_bytes"):
        monkeypatch.setattr(place, lambda *_: budget)
    tokens = []
    for stored in ("auto", STORED):
        chosen = ModelConfig(str(checkpoint_of(kind)), dtype="bfloat16", native="off", kv_cache_dtype=stored)
        config = EngineConfig(model=chosen, memory=MemoryConfig(page_size=page, max_running_requests=64))
        pools = build_pools(config, load_model(chosen, CPU), DeviceStreams(CPU))
        windows: Any = pools.companions.get(WINDOW)
        held = [pools.kv] if windows is None else [pools.kv, windows.kv]
        # Beside the budget each pool has a page of padding.
        spare = sum(page * pool.bytes_per_token for pool in held)
        assert 0.98 * budget < sum(bytes_of(pool) for pool in held) - spare <= budget
        tokens.append(pools.kv.num_pages * page)
    assert 1.85 < tokens[1] / tokens[0] < 2


def bytes_of(pool: KVPool) -> int:
    """Bytes of all memory that a pool holds, each counted once."""
    numbers = [layer.layer_id for layer in pool.layers]
    held = [kind(number) for number in numbers for kind in (pool.k, pool.v, pool.k_scales, pool.v_scales)]
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in held if t is not None)}.values())
