"""A prompt whose beginning comes back from host memory says what it says where the device has computed all of it."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.config import EngineConfig, LoraConfig, SpeculationConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import build_engine
from core.types.io import GenerateRequest
from core.types.sampling_params import SamplingParams
from core.types.stats import EngineStats
from tests.proofs.equivalence.test_embeddings import embed_one
from tests.proofs.equivalence.test_rejoining import PAGE, ROOM, ROOMY, Answer, answer, config
from tests.support.engines import started
from tests.support.fakes.fixed_depth import FixedDepth
from tests.support.sampling_matrix import SAMPLING_MATRIX
from tests.support.until import until
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, make_adapter

CHUNK, PREFIX = 8, 30
TIGHT = 26
"""Pages: two prompts and their outputs, so that each prompt drives out the one before the last."""
FEW = 6
WINDOWS = ("gpt_oss", "gemma2", "cohere2")
STATES = ("falcon_h1", "mamba2", "lfm2", "granitemoehybrid")
OPTIONS = [options for options in SAMPLING_MATRIX.values() if "n" not in options][:6]


def small(made: EngineConfig, room: int = ROOM) -> EngineConfig:
    return dataclasses.replace(
        made, memory=dataclasses.replace(made.memory, host_cache_chunk=CHUNK, host_cache_bytes=room)
    )


def rounds(seed: int = 3, few: int = FEW) -> list[GenerateRequest]:
    """Prompts behind six prefixes, one after another and once more; each pair ends otherwise."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(3, 90) for _ in range(PREFIX)] for _ in OPTIONS]
    found = []
    for turn in range(3):
        for place, (prefix, options) in enumerate(zip(prefixes, OPTIONS, strict=True)):
            sampling = SamplingParams(**{"ignore_eos": True, "seed": place, **options, "max_tokens": few})
            rest = tuple(rng.randrange(3, 90) for _ in range(1 + turn))
            found.append(GenerateRequest(token_ids=(*prefix, *rest), sampling=sampling, want_text=False))
    return found


async def in_turn(
    made: EngineConfig, asked: list[GenerateRequest], together: int = 1
) -> tuple[list[Answer], EngineStats]:
    async with started(build_engine(made)) as engine:
        found: list[Answer] = []
        for first in range(0, len(asked), together):
            found += await asyncio.gather(*(answer(engine, each) for each in asked[first : first + together]))
        # The last copy may still be under way.
        await until(lambda: all(pool.used == 0 for pool in engine.stats.pools))
        return found, engine.stats


def same(found: list[Answer], expected: list[Answer]) -> None:
    for want, got in zip(expected, found, strict=True):
        assert [token for token, _ in got] == [token for token, _ in want]
        assert [lp for _, lp in got] == pytest.approx([lp for _, lp in want], abs=1e-4, nan_ok=True)


@pytest.mark.parametrize("together", [1, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["overlap", "inline"])
async def test_tokens_are_those_of_an_engine_with_room(
    checkpoint_of: Callable[[str], Path], overlap: bool, together: int
) -> None:
    directory, asked = checkpoint_of("llama"), rounds()
    kept: dict[str, Any] = {"overlap": overlap, "cache": "radix"}
    expected, _ = await in_turn(config(directory, ROOMY, room=0, **kept), asked, together)
    found, stats = await in_turn(small(config(directory, TIGHT, room=ROOM, **kept)), asked, together)
    same(found, expected)
    assert stats.host_fetched_tokens >= 6 * CHUNK and stats.host_kept_tokens >= 6 * 3 * CHUNK, stats
    assert stats.host_fetched_tokens % PAGE == 0 and stats.host_evicted_tokens == 0
    assert stats.cached_tokens >= stats.host_fetched_tokens, "a client is told that they were cached"
    assert stats.leased_pages == 0


@pytest.mark.parametrize("together", [1, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["overlap", "inline"])
@pytest.mark.parametrize(
    "kind", ["gemma3_text", "qwen3_next", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in STATES)]
)
async def test_windows_and_states_come_back_where_there_are_any(
    checkpoint_of: Callable[[str], Path], kind: str, overlap: bool, together: int
) -> None:
    directory, asked = checkpoint_of(kind), rounds()
    kept: dict[str, Any] = {"overlap": overlap, "cache": "radix"}
    expected, _ = await in_turn(config(directory, ROOMY, room=0, **kept), asked, together)
    found, stats = await in_turn(small(config(directory, TIGHT, room=ROOM, **kept)), asked, together)
    same(found, expected)
    assert stats.host_fetched_tokens >= 6 * CHUNK and stats.host_evicted_tokens == 0, stats
    assert stats.leased_pages == 0 and (together > 1 or stats.cached_tokens >= stats.host_fetched_tokens)


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next"])
async def test_a_row_of_windows_or_states_goes_on_where_its_answer_ended(
    checkpoint_of: Callable[[str], Path], kind: str
) -> None:
    """The next turn of a conversation has all that was said before it."""
    directory, (first, *others) = checkpoint_of(kind), rounds(few=21)
    made = small(config(directory, TIGHT, room=ROOM, overlap=True, cache="radix"))
    made = dataclasses.replace(made, memory=dataclasses.replace(made.memory, state_track_interval=PAGE))
    async with started(build_engine(made)) as engine:
        said = [token for token, _ in await answer(engine, first)]
        for each in others[:5]:
            await answer(engine, each)
        before = engine.stats
        again = dataclasses.replace(first, token_ids=(*(first.token_ids or ()), *said, 7, 8))
        await answer(engine, again)
        after = engine.stats
        for each in others[:5]:
            await answer(engine, each)
        driven_out = engine.stats
        await answer(engine, dataclasses.replace(first, token_ids=(*(first.token_ids or ())[:PREFIX], 1, 2, 3)))
        assert engine.stats.host_fetched_tokens > driven_out.host_fetched_tokens, "and the end of its prompt"
    assert after.host_fetched_tokens - before.host_fetched_tokens > len(first.token_ids or ()), "an answer too"


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next"])
async def test_what_the_device_has_is_not_fetched(checkpoint_of: Callable[[str], Path], kind: str) -> None:
    (first, *_) = rounds()
    _, stats = await in_turn(
        small(config(checkpoint_of(kind), ROOMY, room=ROOM, overlap=True, cache="radix")), [first] * 3
    )
    assert stats.host_fetched_tokens == 0 and stats.cached_tokens > 0
    # Chunks, and what is behind them: up to page 7 of the prompt, and for windows up to page 9 of the answer.
    assert stats.host_kept_tokens == (4 * CHUNK + 2 * PAGE if kind == "gemma3_text" else 3 * CHUNK + PAGE)


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next"])
async def test_more_in_host_memory_is_taken_before_less_on_the_device(
    checkpoint_of: Callable[[str], Path], kind: str
) -> None:
    """A row goes on from one place: what the device has of a shorter prompt would keep all the rest from coming."""
    directory, (first, *others) = checkpoint_of(kind), rounds()
    shorter = dataclasses.replace(first, token_ids=(first.token_ids or ())[:13])
    async with started(build_engine(small(config(directory, TIGHT, room=ROOM, overlap=True, cache="radix")))) as engine:
        said = await answer(engine, first)
        for each in (*others[:5], shorter):
            await answer(engine, each)
        before = engine.stats
        assert await answer(engine, first) == said
        after = engine.stats
    assert after.host_fetched_tokens - before.host_fetched_tokens == 28


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next"])
async def test_a_small_host_memory_gives_what_it_has_of_windows_and_states(
    checkpoint_of: Callable[[str], Path], kind: str
) -> None:
    directory, asked = checkpoint_of(kind), rounds()
    made = config(directory, TIGHT, room=ROOM, overlap=True, cache="radix")
    expected, _ = await in_turn(config(directory, ROOMY, room=0, overlap=True, cache="radix"), asked)
    async with started(build_engine(small(made))) as engine:
        await answer(engine, asked[0])
        each = engine.stats.host_cache_bytes
    found, stats = await in_turn(small(made, 3 * each), asked)
    same(found, expected)
    assert stats.host_evicted_tokens > 0 and stats.host_cache_bytes <= 3 * each


@pytest.mark.parametrize("codes", ["int8", pytest.param("fp8_e4m3", marks=pytest.mark.nightly)])
async def test_codes_come_back_with_their_scales(checkpoint_of: Callable[[str], Path], codes: str) -> None:
    directory, asked = checkpoint_of("llama"), rounds()
    roomy, tight = (
        dataclasses.replace(made, model=dataclasses.replace(made.model, kv_cache_dtype=codes))
        for made in (
            config(directory, ROOMY, room=0, overlap=True, cache="radix"),
            small(config(directory, TIGHT, room=ROOM, overlap=True, cache="radix")),
        )
    )
    expected, _ = await in_turn(roomy, asked)
    found, stats = await in_turn(tight, asked)
    same(found, expected)
    assert stats.host_fetched_tokens >= 6 * CHUNK


@pytest.mark.parametrize("method", ["ngram", "draft"])
async def test_drafts_are_as_good_behind_what_comes_back(
    checkpoint_of: Callable[[str], Path], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that drafts for itself is always right, as long as it has its keys of the prefix."""
    monkeypatch.setattr("core.engine.build.AdaptiveDepth", lambda most, times: FixedDepth(most))
    directory, asked = checkpoint_of("llama"), rounds(few=16)
    speculation = SpeculationConfig(f"draft:{directory}" if method == "draft" else method, 3)
    roomy, tight = (
        dataclasses.replace(made, speculation=speculation)
        for made in (
            config(directory, ROOMY, room=0, overlap=True, cache="radix"),
            small(config(directory, TIGHT + 8, room=ROOM, overlap=True, cache="radix")),
        )
    )
    expected, _ = await in_turn(roomy, asked)
    found, stats = await in_turn(tight, asked)
    same(found, expected)
    assert stats.host_fetched_tokens >= 6 * CHUNK and stats.rejoined_requests == 0 and stats.drafts is not None
    if method == "draft":
        assert stats.drafts.tokens == stats.drafts.accepted > 0


def test_copies_are_sized_with_what_drafts(checkpoint_of: Callable[[str], Path]) -> None:
    directory = checkpoint_of("llama")
    made = small(config(directory, TIGHT, room=ROOM, overlap=True, cache="radix"))
    alone, both = (
        build_engine(dataclasses.replace(made, speculation=SpeculationConfig(method))).renewal._pools.host
        for method in ("off", f"draft:{directory}")
    )
    assert alone is not None and both is not None
    # Tiny copies fit their one block either way.
    assert both.tier._bytes_per_token == 2 * alone.tier._bytes_per_token


async def test_with_drafts_only_prefixes_are_kept(checkpoint_of: Callable[[str], Path]) -> None:
    made = small(config(checkpoint_of("llama"), TIGHT, room=ROOM, overlap=True, cache="radix"))
    async with started(build_engine(dataclasses.replace(made, speculation=SpeculationConfig("ngram", 3)))) as engine:
        host = engine._scheduler.host_cache
        assert host is not None and host.rejoining is None and host.prefixes is not None


@pytest.mark.parametrize("chunks", [0, pytest.param(1, marks=pytest.mark.nightly), 5])
async def test_a_small_host_memory_gives_what_it_has(checkpoint_of: Callable[[str], Path], chunks: int) -> None:
    """Not even a chunk, one, and fewer than all prefixes have."""
    directory, asked = checkpoint_of("llama"), rounds()
    made = config(directory, TIGHT, room=ROOM, overlap=True, cache="radix")
    async with started(build_engine(small(made))) as engine:
        await answer(engine, asked[0])
        each = engine.stats.host_cache_bytes // (engine.stats.host_kept_tokens // CHUNK)
    expected, _ = await in_turn(config(directory, ROOMY, room=0, overlap=True, cache="radix"), asked)
    found, stats = await in_turn(small(made, max(1, chunks * each)), asked)
    same(found, expected)
    assert stats.host_cache_bytes <= chunks * each
    assert (stats.host_kept_tokens > 0) is (chunks > 0)
    assert (stats.host_evicted_tokens > 0) is (chunks > 0)


async def test_an_adapter_and_a_salt_have_prefixes_of_their_own(
    checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = checkpoint_of("llama")
    lora = LoraConfig(adapters=(("one", str(make_adapter(directory, tmp_path, 3, **ADAPTERS["all"]))),))
    (first, *_) = rounds()
    kinds = [first, dataclasses.replace(first, adapter="one"), dataclasses.replace(first, cache_salt="x")]
    made = dataclasses.replace(small(config(directory, TIGHT, room=ROOM, overlap=True, cache="radix")), lora=lora)
    found, stats = await in_turn(made, kinds)
    assert stats.host_fetched_tokens == 0 and stats.host_kept_tokens == 3 * 4 * CHUNK
    assert found[0] == found[2] != found[1]
    again, stats = await in_turn(made, [*kinds, *rounds()[1:6], *kinds])
    assert again[-3:] == found and stats.host_fetched_tokens > 0


async def flushed(engine: AsyncEngine, asked: list[GenerateRequest]) -> int:
    for each in asked:
        await answer(engine, each)
    engine.prefixes.flush()
    assert engine.stats.host_cache_bytes == 0
    before = engine.stats.host_fetched_tokens
    await answer(engine, asked[0])
    return engine.stats.host_fetched_tokens - before


async def test_a_flush_takes_the_copies_too(checkpoint_of: Callable[[str], Path]) -> None:
    made = small(config(checkpoint_of("llama"), TIGHT, room=ROOM, overlap=True, cache="radix"))
    async with started(build_engine(made)) as engine:
        assert await flushed(engine, rounds()[:4]) == 0


@pytest.mark.parametrize("chunk", [CHUNK, pytest.param(PAGE, marks=pytest.mark.nightly), 6 * PAGE])
@pytest.mark.parametrize("kind", ["gemma3_text", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in WINDOWS)])
async def test_another_question_goes_on_within_a_prompt_of_windows(
    checkpoint_of: Callable[[str], Path], kind: str, chunk: int
) -> None:
    """Chunks that are shorter than the window, and longer; the last of them before the place where questions differ."""
    directory, asked = checkpoint_of(kind), questions(3)
    expected, _ = await in_turn(config(directory, ROOMY, room=0, overlap=True, cache="radix"), asked)
    made = small(config(directory, TIGHT, room=ROOM, overlap=True, cache="radix"))
    made = dataclasses.replace(made, memory=dataclasses.replace(made.memory, host_cache_chunk=chunk))
    found, stats = await in_turn(made, asked)
    same(found, expected)
    again = len(asked) - len(asked) // 3
    assert stats.host_fetched_tokens == again * (DOCUMENT // chunk * chunk) > 0


async def test_a_longer_beginning_is_taken_than_that_of_a_shorter_prompt(checkpoint_of: Callable[[str], Path]) -> None:
    """Which ended where a row could go on, too."""
    (first, *others), (again, *_) = questions(1), questions(2)[3:]
    shorter = dataclasses.replace(first, token_ids=(first.token_ids or ())[:13])
    made = small(config(checkpoint_of("gemma3_text"), TIGHT, room=ROOM, overlap=True, cache="radix"))
    async with started(build_engine(made)) as engine:
        for each in (first, shorter, *others):
            await answer(engine, each)
        before = engine.stats
        await answer(engine, again)
        assert engine.stats.host_fetched_tokens - before.host_fetched_tokens == DOCUMENT // CHUNK * CHUNK


async def test_a_prompt_that_leads_to_no_token_leaves_no_windows(checkpoint_of: Callable[[str], Path]) -> None:
    made = small(config(checkpoint_of("gemma3_text"), TIGHT, room=ROOM, overlap=True, cache="radix"))
    async with started(build_engine(made)) as engine:
        found = await embed_one(engine, tuple(questions(1)[0].token_ids or ()))
        assert len(found.values) and engine.stats.host_cache_bytes == 0


@pytest.mark.parametrize("kind", ["qwen3_next", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in STATES)])
async def test_the_third_question_goes_on_within_a_prompt_of_states(
    checkpoint_of: Callable[[str], Path], kind: str
) -> None:
    """The second one leaves the state where it differs from the first, which nothing had asked for before."""
    directory, asked = checkpoint_of(kind), questions(3)
    expected, _ = await in_turn(config(directory, ROOMY, room=0, overlap=True, cache="radix"), asked)
    made = small(config(directory, TIGHT, room=ROOM, overlap=True, cache="radix"))
    found, stats = await in_turn(made, asked)
    same(found, expected)
    assert stats.host_fetched_tokens == len(asked) // 3 * (DOCUMENT // CHUNK * CHUNK)


DOCUMENT = 50


def questions(turns: int) -> list[GenerateRequest]:
    """Documents that are asked about in turn, each time something else, and all longer than a window."""
    rng = random.Random(5)
    documents = [[rng.randrange(3, 90) for _ in range(DOCUMENT)] for _ in range(3)]
    sampling = SamplingParams(temperature=0.0, max_tokens=FEW, ignore_eos=True, logprobs=1)
    return [
        GenerateRequest(token_ids=(*each, *(10 + turn * 7 + n for n in range(5))), sampling=sampling, want_text=False)
        for turn in range(turns)
        for each in documents
    ]
