"""Prompts with images give what `transformers` gives: in any chunks, beside texts, from the cache, and retracted."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import AutoModelForImageTextToText

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
from core.errors import InvalidRequest, StartupError
from core.types.io import Delta, Finished, GenerateRequest
from core.types.sampling_params import SamplingParams
from tests.proofs.equivalence.image_oracle import ImageOracle, Seen, prompts
from tests.support.engines import started
from tests.support.vision_checkpoints import FURTHER, KINDS, make_vision_checkpoint, picture

OUTPUT = 12
PAGE = 4


def config(directory: Path, pages: int, chunk: int, native: str = "wait", **more: Any) -> EngineConfig:
    memory = MemoryConfig(page_size=PAGE, max_running_requests=6, max_total_tokens=pages * PAGE, **more)
    return EngineConfig(
        model=ModelConfig(str(directory), dtype="float32", native=native),
        memory=memory,
        scheduler=SchedulerConfig(chunked_prefill_size=chunk),
        executor=ExecutorConfig(device="cpu", assert_mode="trap", cpu_threads=1),
    )


async def answer(engine: AsyncEngine, seen: Seen, tokens: int = OUTPUT) -> tuple[tuple[int, ...], int]:
    """The output, and how many tokens of the prompt were cached."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    request = GenerateRequest(token_ids=seen.ids, images=seen.images, sampling=sampling, want_text=False)
    found, cached = list[int](), 0
    async for event in await engine.generate(request):
        if isinstance(event, Delta):
            found += event.token_ids
        elif isinstance(event, Finished):
            cached = event.usage.cached_tokens
    return tuple(found), cached


@pytest.fixture(scope="module", params=KINDS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ImageOracle:
    directory = make_vision_checkpoint(request.param, tmp_path_factory.mktemp("images") / request.param)
    found = ImageOracle(directory)
    found.directory = directory  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("native", ["wait", "off"], ids=["compiled", "torch"])
@pytest.mark.parametrize(("pages", "chunk"), [(400, 512), (400, 16), (34, 16)], ids=["whole", "chunks", "retracted"])
async def test_tokens_equal_generate(oracle: ImageOracle, pages: int, chunk: int, native: str, seed: int) -> None:
    few, tokens = pages == 34, OUTPUT
    if few and oracle.kind == "gemma4":
        pages, tokens = 76, 40  # Its processor makes every image as large as it may be.
    asked = prompts(oracle, seed)
    wanted = [oracle.greedy(each, tokens) for each in asked]
    assert sum(map(len, wanted)) >= len(asked) * OUTPUT / 2, "the oracle is undecided"
    async with started(build_engine(config(oracle.directory, pages, chunk, native))) as engine:
        for _ in range(2):
            found = await asyncio.gather(*(answer(engine, each, tokens) for each in asked))
            for place, (got, want) in enumerate(zip(found, wanted, strict=True)):
                assert got[0][: len(want)] == want, place
        preempted = engine.stats.preemptions
    assert (preempted > 0) is few, preempted


@pytest.mark.parametrize("native", ["wait", "off"], ids=["compiled", "torch"])
@pytest.mark.parametrize("kind", FURTHER)
async def test_further_types_see_too(kind: str, native: str, tmp_path: Path, seed: int) -> None:
    oracle = ImageOracle(make_vision_checkpoint(kind, tmp_path / kind))
    asked = prompts(oracle, seed)
    wanted = [oracle.greedy(each, OUTPUT) for each in asked]
    assert sum(map(len, wanted)) >= len(asked) * OUTPUT / 2, "the oracle is undecided"
    async with started(build_engine(config(tmp_path / kind, 400, 16, native))) as engine:
        found = await asyncio.gather(*(answer(engine, each) for each in asked))
        again = [await answer(engine, each) for each in asked[1:3]]
    for place, (got, want) in enumerate(zip([*found, *again], [*wanted, *wanted[1:3]], strict=True)):
        assert got[0][: len(want)] == want, place


async def test_cached_tokens_are_those_of_the_same_image(oracle: ImageOracle, seed: int) -> None:
    """The same ids behind another image are other tokens; what stands before it is the same."""
    rng = random.Random(seed)
    one, other = picture(11), picture(12)
    asked = oracle.prompt(rng, 9, one, 21)
    again = Seen(asked.ids, (other,))
    longer = Seen((*asked.ids, *oracle.prompt(rng, 8).ids), asked.images)
    start = asked.ids.index(oracle.token)
    async with started(build_engine(config(oracle.directory, 400, 64))) as engine:
        found = [await answer(engine, each) for each in (asked, again, longer, asked, again)]
    assert found[0][0] == found[3][0] and found[1][0] == found[4][0]
    for (got, _), each in zip(found, (asked, again, longer), strict=False):
        want = oracle.greedy(each, OUTPUT)
        assert got[: len(want)] == want
    cached = [each[1] for each in found]
    # A state is left where a prompt parts from others, so the third that begins so finds it.
    least = 0 if oracle.kind == "qwen3_5" else 1
    assert cached[0] == 0 and least <= cached[1] <= start and cached[2] > start + 4, cached
    assert min(cached[3:]) > start + 4, cached


async def test_neighbours_of_other_kinds_do_not_notice(oracle: ImageOracle, seed: int) -> None:
    """A text that decodes while images come and go says what it says alone; so does a sampled one with an image."""
    rng = random.Random(seed)
    text, shown = oracle.prompt(rng, 12), oracle.prompt(rng, 5, picture(21), 4)
    async with started(build_engine(config(oracle.directory, 400, 8))) as engine:
        alone = await answer(engine, text, 60), await answer(engine, shown, 40)
        crowd = [oracle.prompt(rng, n, picture(30 + n), n) for n in range(3, 8)]
        together = await asyncio.gather(
            answer(engine, text, 60), answer(engine, shown, 40), *(answer(engine, each) for each in crowd)
        )
    assert together[0][0] == alone[0][0] and together[1][0] == alone[1][0]


async def test_a_token_without_an_image_is_a_token(oracle: ImageOracle, seed: int) -> None:
    """Written into the prompt, beside an image of another request; no index goes out of a table."""
    rng = random.Random(seed)
    words = oracle.prompt(rng, 6)
    stray, shown = Seen((*words.ids, oracle.token, 7, oracle.token), ()), oracle.prompt(rng, 2, picture(41), 5)
    async with started(build_engine(config(oracle.directory, 400, 64))) as engine:
        alone = await answer(engine, Seen((*stray.ids, 9), ()))
        found, beside, _ = await asyncio.gather(
            answer(engine, stray), answer(engine, Seen((*stray.ids, 9), ())), answer(engine, shown)
        )
    want = oracle.plain(stray, OUTPUT)
    assert beside[0] == alone[0] and found[0][: len(want)] == want


@pytest.mark.parametrize("native", ["wait", "off"], ids=["compiled", "torch"])
@pytest.mark.parametrize(
    ("kind", "changed"),
    [("internvl", {"size": {"height": 84, "width": 84}}), ("gemma3", {"size": {"height": 28, "width": 28}})],
)
async def test_a_processor_for_another_model_ends_no_step(
    kind: str, changed: dict[str, Any], native: str, tmp_path: Path, seed: int
) -> None:
    """It is found before the first request: images are refused, texts are served."""
    directory = make_vision_checkpoint(kind, tmp_path / kind)
    oracle = ImageOracle(directory)
    shown, text = oracle.prompt(random.Random(seed), 3, picture(1), 2), oracle.prompt(random.Random(seed), 9)
    file = directory / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    async with started(build_engine(config(directory, 400, 64, native))) as engine:
        with pytest.raises(InvalidRequest, match="is for another model"):
            await answer(engine, shown)
        want = oracle.greedy(text, OUTPUT)
        assert (await answer(engine, text))[0][: len(want)] == want


def test_what_drafts_cannot_do_is_refused(oracle: ImageOracle) -> None:
    asked = config(oracle.directory, 400, 64)
    asked = dataclasses.replace(asked, speculation=SpeculationConfig(method="ngram"))
    if not oracle.kind.startswith("qwen"):
        assert build_engine(asked)
        return
    with pytest.raises(StartupError, match="images move the positions"):
        build_engine(asked)


@pytest.mark.parametrize("native", ["wait", "off"], ids=["compiled", "torch"])
@pytest.mark.parametrize("cache", ["radix", "none"])
async def test_an_image_longer_than_the_window_and_the_chunk(
    tmp_path: Path, cache: str, native: str, seed: int
) -> None:
    """Its end does not see its beginning, and the pool of the windows has room for a chunk as long as it."""
    rng = random.Random(seed)
    directory = make_vision_checkpoint("gemma3", tmp_path / "long", mm_tokens_per_image=16)
    oracle = ImageOracle(directory)
    made = config(directory, 400, 4, native, prefix_cache=cache)
    made = dataclasses.replace(made, memory=dataclasses.replace(made.memory, page_size=1, max_running_requests=1))
    asked = [oracle.prompt(rng, 9, picture(5), 6, picture(6), 2), oracle.prompt(rng, 3, picture(7), 20)]
    async with started(build_engine(made)) as engine:
        for each in asked:
            want = oracle.greedy(each, OUTPUT)
            got, _ = await answer(engine, each)
            assert got[: len(want)] == want


@pytest.mark.parametrize("native", ["wait", "off"], ids=["compiled", "torch"])
async def test_an_image_of_several_blocks_of_queries(tmp_path: Path, native: str, seed: int) -> None:
    """Compiled attention takes 64 of them at a time, and each sees the image to its end."""
    rng = random.Random(seed)
    directory = make_vision_checkpoint("gemma3", tmp_path / "wide", across=12, mm_tokens_per_image=144)
    oracle = ImageOracle(directory)
    asked = [oracle.prompt(rng, 9, picture(5), 6, picture(6), 2), oracle.prompt(rng, 70, picture(7), 20)]
    wanted = [oracle.greedy(each, OUTPUT) for each in asked]
    async with started(build_engine(config(directory, 400, 512, native))) as engine:
        found = await asyncio.gather(*(answer(engine, each) for each in asked))
    assert sum(map(len, wanted)) >= OUTPUT, "the oracle is undecided"
    for (got, _), want in zip(found, wanted, strict=True):
        assert got[: len(want)] == want


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_of_the_vision_tower_is_refused(oracle: ImageOracle, tmp_path: Path) -> None:
    """Its layers see no tokens of the step, so deltas of token places would go anywhere."""
    targets = ["q_proj", "v_proj"] if oracle.kind == "gemma3" else "all-linear"
    model = AutoModelForImageTextToText.from_pretrained(oracle.directory)
    get_peft_model(model, PeftConfig(r=2, target_modules=targets)).save_pretrained(tmp_path / "adapter")
    lora = LoraConfig(adapters=(("a", str(tmp_path / "adapter")),))
    with pytest.raises(StartupError, match="sees images and no tokens"):
        build_engine(dataclasses.replace(config(oracle.directory, 400, 64), lora=lora))


async def test_images_come_back_from_host_memory(oracle: ImageOracle, seed: int) -> None:
    """Pieces of prefixes end in the midst of images; what is left to compute begins at one."""
    rng = random.Random(seed)
    asked = [oracle.prompt(rng, 5 + n, picture(40 + n), 9, picture(60 + n), 3 + n) for n in range(6)]
    longer = [Seen((*each.ids, *oracle.prompt(rng, 6).ids), each.images) for each in asked]
    pages = -(-(max(len(each.ids) for each in longer) + OUTPUT) // PAGE) + 4
    async with started(
        build_engine(config(oracle.directory, pages, 64, host_cache_bytes=1 << 26, host_cache_chunk=8))
    ) as engine:
        found = [await answer(engine, each) for each in (*asked, *longer)]
        assert engine.stats.host_fetched_tokens > 0
    for (got, _), each in zip(found, (*asked, *longer), strict=True):
        want = oracle.greedy(each, OUTPUT)
        assert got[: len(want)] == want
