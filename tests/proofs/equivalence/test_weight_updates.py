"""Behind an update every token is one of the new weights, whatever the engine has computed with the old ones.

A stream that is paused in its midst has tokens of the old weights. Greedy decoding has no memory but its tokens, so an
engine that has had the new weights from the start must go on in the same way behind them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from core.config import (
    EngineConfig,
    ExecutorConfig,
    LoraConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from core.engine.async_engine import AsyncEngine
from core.engine.build import build_engine
from core.models.bundled import bundled_model_dir
from core.models.bundled.eagle import bundled_head_dir
from core.types.control import Activity, WeightSource
from core.types.io import Delta, EmbedRequest, Finished, GenerateRequest, Started
from core.types.sampling_params import SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.encoder_decoders import make_encoder_decoder
from tests.support.engines import started
from tests.support.fakes.fixed_depth import FixedDepth
from tests.support.mtp_checkpoints import make_mtp_checkpoint
from tests.support.until import until
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, make_adapter

PAGE, ROWS, OUTPUT = 4, 6, 40
PROMPTS = [(5, 6, 7, 8, 9, 10, 11, 12, 13), (5, 6, 7, 8, 9, 10, 11, 20, 21, 22), (40, 41, 42)]
OLD, NEW = "old", "new"

Weights = Callable[..., Path]


def config(root: Path, name: str, **parts: Any) -> EngineConfig:
    memory = {"page_size": PAGE, "max_running_requests": ROWS, "max_total_tokens": 100 * PAGE}
    model = {"dtype": "float32", "native": "wait", "weights_dir": str(root), "weight_version": name}
    return EngineConfig(
        model=ModelConfig(str(root / name), **{**model, **parts.pop("model", {})}),
        memory=MemoryConfig(**{**memory, **parts.pop("memory", {})}),
        scheduler=SchedulerConfig(chunked_prefill_size=16),
        executor=ExecutorConfig(device="cpu", assert_mode="trap", cpu_threads=1, overlap=parts.pop("overlap", True)),
        **parts,
    )


def ask(prompt: Sequence[int], tokens: int = OUTPUT, **rest: Any) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return GenerateRequest(token_ids=tuple(prompt), sampling=sampling, want_text=False, **rest)


class Reader:
    """One stream as it is read: its tokens, and the versions at both of its ends."""

    def __init__(self, engine: AsyncEngine, request: GenerateRequest) -> None:
        self.request, self.tokens = request, list[int]()
        self.versions: list[str] = []
        self.done = asyncio.create_task(self._read(engine))

    async def _read(self, engine: AsyncEngine) -> None:
        async for event in await engine.generate(self.request):
            if isinstance(event, Delta):
                self.tokens += event.token_ids
            elif isinstance(event, Started | Finished):
                self.versions.append(event.weight_version)


async def answers(engine: AsyncEngine, requests: Sequence[GenerateRequest]) -> list[list[int]]:
    readers = [Reader(engine, request) for request in requests]
    await asyncio.gather(*(reader.done for reader in readers))
    return [reader.tokens for reader in readers]


async def update(engine: AsyncEngine, name: str = NEW) -> int:
    return (await engine.control.update_weights(WeightSource(name), name)).restarted


async def paused_in_their_midst(engine: AsyncEngine, requests: Sequence[GenerateRequest]) -> list[Reader]:
    readers = [Reader(engine, request) for request in requests]
    await until(lambda: all(reader.tokens for reader in readers))
    assert await engine.control.pause() == len(requests), "all of them still run"
    return readers


async def check_midst(old: EngineConfig, new: EngineConfig, requests: Sequence[GenerateRequest], **goes_on: Any) -> Any:
    """Update in the midst of `requests`, and compare with an engine of the new weights. Returns the statistics."""
    async with started(build_engine(old)) as engine:
        if old.memory.host_cache_bytes:
            # Whose prefixes are in host memory when the weights are exchanged.
            await answers(engine, requests)
            await until(lambda: engine.stats.host_kept_tokens and all(pool.used == 0 for pool in engine.stats.pools))
        readers = await paused_in_their_midst(engine, requests)
        assert await update(engine) >= 1, "some ran"
        assert all(not reader.done.done() for reader in readers)
        await engine.control.resume()
        await asyncio.gather(*(reader.done for reader in readers))
        again = await answers(engine, requests)
        await until(lambda: all(pool.used == 0 for pool in engine.stats.pools))
        stats = engine.stats
    async with started(build_engine(dataclasses.replace(old, model=dataclasses.replace(old.model)))) as engine:
        of_old = await answers(engine, requests)
    async with started(build_engine(new)) as engine:
        assert again == await answers(engine, requests), "what was cached before is not read"
        for reader, before in zip(readers, of_old, strict=True):
            assert reader.versions == [OLD, NEW]
            same = next(n for n, (a, b) in enumerate(zip(reader.tokens, before)) if a != b)
            head, tail = reader.tokens[:same], reader.tokens[same:]
            (rest,) = await answers(
                engine, [dataclasses.replace(ask((*reader.request.token_ids, *head), len(tail)), **goes_on)]
            )
            assert tail == rest, (same, len(head))
    assert stats.restart_preemptions >= 1 and stats.weight_updates == 1 and stats.weight_version == NEW
    return stats


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "gemma3_text",
        "gemma4_text",
        "bitnet",
        "bloom",
        "gpt2",
        "deepseek_v2",
        "qwen3_next",
        "mamba2",
        "lfm2",
        "mixtral",
    ],
)
async def test_each_kind_goes_on_with_the_new_weights(kind: str, tmp_path: Path) -> None:
    """Native and not, with windows, latents, experts and states."""
    for seed, name in enumerate((OLD, NEW)):
        make_checkpoint(kind, tmp_path / name, seed)
    await check_midst(config(tmp_path, OLD), config(tmp_path, NEW), [ask(prompt) for prompt in PROMPTS])


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("llamas")
    for seed, name in enumerate((OLD, NEW)):
        make_checkpoint("llama", root / name, seed)
    make_checkpoint("llama", root / "wide", 0, intermediate_size=160)
    make_checkpoint("llama", root / "deep", 0, num_hidden_layers=3)
    return root


@pytest.mark.parametrize(
    "parts",
    [
        {"overlap": False},
        {"memory": {"prefix_cache": "none"}},
        {"model": {"quantization": "int8"}},
        {"speculation": SpeculationConfig("ngram", 4)},
        {"memory": {"host_cache_bytes": 1 << 22, "host_cache_chunk": PAGE, "max_total_tokens": 24 * PAGE}},
        {"model": {"native": "off"}},
    ],
    ids=["inline", "no-cache", "int8", "ngram", "host-memory", "modules"],
)
async def test_each_way_to_serve(llamas: Path, parts: dict[str, Any]) -> None:
    old, new = (config(llamas, name, **parts) for name in (OLD, NEW))
    prompts = PROMPTS if "max_total_tokens" not in parts.get("memory", {}) else PROMPTS[:2]
    await check_midst(old, new, [ask(prompt) for prompt in prompts])


async def test_copies_in_host_memory_are_of_the_old_weights_too(llamas: Path) -> None:
    """Requests that were retracted wait with a copy of their keys: it is given up."""
    tight = {"memory": {"host_cache_bytes": 1 << 22, "max_total_tokens": 16 * PAGE, "prefix_cache": "none"}}
    requests = [ask(prompt, 50) for prompt in PROMPTS]
    async with started(build_engine(config(llamas, OLD, **tight))) as engine:
        readers = [Reader(engine, request) for request in requests]
        await until(lambda: engine.stats.host_cache_bytes)
        await engine.control.pause()
        assert engine.stats.host_cache_bytes, "one waits with its copy"
        await update(engine)
        assert engine.stats.host_cache_bytes == 0 and engine.stats.leased_pages == 0
        heads = [list(reader.tokens) for reader in readers]
        await engine.control.resume()
        await asyncio.gather(*(reader.done for reader in readers))
    async with started(build_engine(config(llamas, NEW, **tight))) as engine:
        for reader, head in zip(readers, heads, strict=True):
            tail = reader.tokens[len(head) :]
            assert [tail] == await answers(engine, [ask((*reader.request.token_ids, *head), len(tail))])


async def test_adapters_stay_over_the_new_weights(llamas: Path, tmp_path: Path) -> None:
    given = (("one", str(make_adapter(llamas / OLD, tmp_path / "one", 3, **ADAPTERS["all"]))),)
    make_adapter(llamas / OLD, tmp_path / "two", 4, **ADAPTERS["all"])
    parts = {"lora": LoraConfig(adapters=given, directory=str(tmp_path))}
    requests = [ask(prompt, adapter="one") for prompt in PROMPTS[:2]]
    await check_midst(config(llamas, OLD, **parts), config(llamas, NEW, **parts), requests, adapter="one")
    later, found = [ask(PROMPTS[0], adapter="two")], []
    for name in (OLD, NEW):
        async with started(build_engine(config(llamas, name, **parts))) as engine:
            if name == OLD:
                await update(engine)
            await engine.load_adapter("two", "two")
            found.append(await answers(engine, [*later, ask(PROMPTS[0])]))
    assert found[0] == found[1] and found[0][0] != found[0][1]


async def test_heads_of_the_checkpoint_are_exchanged_with_it(tmp_path: Path) -> None:
    """What drafts with the model's own parts reads the new ones: outputs are the same either way, so it is counted."""
    for seed, name in enumerate((OLD, NEW)):
        make_mtp_checkpoint("glm4_moe", tmp_path / name, seed=seed)
    parts = {"speculation": SpeculationConfig("mtp", 3)}
    requests = [ask(prompt) for prompt in PROMPTS]
    stats = await check_midst(config(tmp_path, OLD, **parts), config(tmp_path, NEW, **parts), requests)
    assert stats.drafts.tokens


@pytest.mark.parametrize("method", ["eagle", f"eagle:{bundled_head_dir()}"], ids=["own", "by-directory"])
async def test_a_head_for_the_bundled_model_goes_on_wherever_its_weights_lie(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.engine.build.AdaptiveDepth", lambda most, times: FixedDepth(most))
    root = bundled_model_dir().parent
    shutil.copytree(bundled_model_dir(), tmp_path / NEW)
    made = config(root, bundled_model_dir().name, speculation=SpeculationConfig(method, 3))
    made = dataclasses.replace(made, model=dataclasses.replace(made.model, weights_dir=str(tmp_path)))
    async with started(build_engine(made)) as engine:
        before = await answers(engine, [ask(prompt) for prompt in PROMPTS])
        drafted, drafts = engine.stats.drafts, engine.control._renewal.serving.speculation
        await update(engine)
        assert engine.control._renewal.serving.speculation is not drafts, "it reads the new weights"
        assert before == await answers(engine, [ask(prompt) for prompt in PROMPTS])
        assert drafted is not None and engine.stats.drafts is not None
        assert engine.stats.drafts.accepted == 2 * drafted.accepted > 0


async def test_an_encoder_decoder_reads_its_input_again(tmp_path: Path) -> None:
    for seed, name in enumerate((OLD, NEW)):
        make_encoder_decoder("t5", tmp_path / name, seed=seed)
    async with started(build_engine(config(tmp_path, OLD))) as engine:
        readers = await paused_in_their_midst(engine, [ask(prompt) for prompt in PROMPTS])
        assert await update(engine) >= 1
        await engine.control.resume()
        await asyncio.gather(*(reader.done for reader in readers))
        found = await answers(engine, [ask(prompt) for prompt in PROMPTS])
    async with started(build_engine(config(tmp_path, NEW))) as engine:
        assert found == await answers(engine, [ask(prompt) for prompt in PROMPTS])
    assert all(len(reader.tokens) == OUTPUT for reader in readers)


async def test_vectors_are_of_the_new_weights(llamas: Path) -> None:
    asked = EmbedRequest(inputs=PROMPTS)
    found = []
    for name in (OLD, NEW):
        async with started(build_engine(config(llamas, name))) as engine:
            await (await engine.embed(asked)).result()
            if name == OLD:
                await update(engine)
            found.append(await (await engine.embed(asked)).result())
    old, new = ([list(each.values) for each in result.embeddings] for result in found)
    assert old == new


async def test_what_slept_goes_on(llamas: Path) -> None:
    """Through sleep the same tokens come, also if the weights were changed meanwhile."""
    requests = [ask(prompt) for prompt in PROMPTS]
    async with started(build_engine(config(llamas, OLD))) as engine:
        expected = await answers(engine, requests)
        readers = await paused_in_their_midst(engine, requests)
        nap = await engine.control.sleep()
        assert nap.live_requests == len(requests) and engine.stats.activity is Activity.ASLEEP
        await engine.control.wake()
        assert engine.stats.activity is Activity.PAUSED, "the pause is older than the sleep"
        await engine.control.resume()
        await asyncio.gather(*(reader.done for reader in readers))
        assert [reader.tokens for reader in readers] == expected
        await engine.control.sleep()
        await update(engine)
        waits = Reader(engine, requests[0])
        await until(lambda: engine.stats.waiting)
        await engine.control.wake()
        await waits.done
    async with started(build_engine(config(llamas, NEW))) as engine:
        assert await answers(engine, requests[:1]) == [waits.tokens] and waits.versions == [NEW, NEW]
