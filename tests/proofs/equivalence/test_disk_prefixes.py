"""A prompt whose beginning comes back from files says what it says where the device has computed all of it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.config import EngineConfig, LoraConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import build_engine
from core.errors import ConfigError
from core.memory.host_tier import BLOCK
from core.types.io import GenerateRequest
from core.types.stats import EngineStats
from tests.proofs.equivalence.test_host_prefixes import (
    CHUNK,
    DOCUMENT,
    TIGHT,
    in_turn,
    questions,
    rounds,
    same,
    small,
)
from tests.proofs.equivalence.test_rejoining import ROOM, ROOMY, Answer, answer, config
from tests.support.engines import started
from tests.support.until import until
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, make_adapter

KEPT: dict[str, Any] = {"overlap": True, "cache": "radix"}


def filed(directory: Path, files: Path, pages: int = TIGHT, room: int = ROOM, **memory: Any) -> EngineConfig:
    made = small(config(directory, pages, room=room, **KEPT), room)
    return dataclasses.replace(made, memory=dataclasses.replace(made.memory, disk_cache=str(files), **memory))


async def said(engine: AsyncEngine, asked: list[GenerateRequest]) -> tuple[list[Answer], EngineStats]:
    found = [await answer(engine, each) for each in asked]
    await until(lambda: all(pool.used == 0 for pool in engine.stats.pools))
    return found, engine.stats


async def written(made: EngineConfig, asked: list[GenerateRequest]) -> list[Answer]:
    """What an engine says that leaves all of it in files, and ends."""
    async with started(build_engine(made)) as engine:
        found, _ = await said(engine, asked)
        await until(lambda: engine.stats.disk_kept_tokens == engine.stats.host_kept_tokens > 0)
    return found


NIGHTLY = ("deepseek_v3", "falcon_h1", "mamba2", "lfm2", "gemma2")


@pytest.mark.parametrize(
    "kind", ["llama", "gemma3_text", "qwen3_next", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in NIGHTLY)]
)
async def test_a_process_goes_on_from_what_another_has_computed(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    directory, asked = checkpoint_of(kind), rounds()
    async with started(build_engine(config(directory, ROOMY, room=0, **KEPT))) as engine:
        expected, _ = await said(engine, asked)
    made = filed(directory, tmp_path / "files")
    same(await written(made, asked), expected)
    async with started(build_engine(made)) as engine:
        found, stats = await said(engine, asked[::-1])
    same(found[::-1], expected)
    assert stats.disk_fetched_tokens >= 6 * 3 * CHUNK and stats.disk_failures == 0, stats
    assert stats.cached_tokens >= stats.disk_fetched_tokens, "a client is told that they were cached"


async def test_another_question_goes_on_within_a_prompt_of_windows(
    checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of another process too; and where a file is lacking, from before it."""
    directory, (*asked, third, _, _) = checkpoint_of("gemma3_text"), questions(3)
    expected, _ = await in_turn(config(directory, ROOMY, room=0, **KEPT), [*asked, third])
    made = filed(directory, tmp_path / "files")
    async with started(build_engine(made)) as engine:
        same((await said(engine, asked[:3]))[0], expected[:3])
        host = engine._scheduler.host_cache
        assert host is not None and host.disk is not None
        await until(lambda: host.disk is not None and host.disk.is_idle)
    async with started(build_engine(made)) as engine:
        found, stats = await said(engine, asked[3:])
    same(found, expected[3:6])
    assert stats.disk_fetched_tokens == stats.host_fetched_tokens == 3 * (DOCUMENT // CHUNK * CHUNK), stats
    async with started(build_engine(made)) as engine:
        host = engine._scheduler.host_cache
        assert host is not None and host.disk is not None
        names, ids = host.disk._names, np.array(third.token_ids)
        gone = names.trail(ids[: DOCUMENT // CHUNK * CHUNK], "")
        assert gone is not None and host.disk._store._drop(gone) is None
        found, stats = await said(engine, [third])
    same(found, expected[6:])
    assert stats.disk_fetched_tokens == (DOCUMENT // CHUNK - 1) * CHUNK, stats


async def test_the_third_question_goes_on_within_a_prompt_of_states(
    checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each in a process of its own: the second one finds keys in files and no state to go on with, and leaves it."""
    directory, asked = checkpoint_of("qwen3_next"), questions(3)
    expected, _ = await in_turn(config(directory, ROOMY, room=0, **KEPT), asked)
    made, fetched = filed(directory, tmp_path / "files"), list[int]()
    for first in range(0, len(asked), 3):
        async with started(build_engine(made)) as engine:
            found, stats = await said(engine, asked[first : first + 3])
            await until(lambda: engine.stats.disk_pending_chunks == 0)
        same(found, expected[first : first + 3])
        fetched.append(stats.disk_fetched_tokens)
    assert fetched == [0, 0, 3 * (DOCUMENT // CHUNK * CHUNK)]


async def test_what_host_memory_gives_up_comes_back(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    directory, asked = checkpoint_of("llama"), rounds()
    async with started(build_engine(config(directory, ROOMY, room=0, **KEPT))) as engine:
        expected, _ = await said(engine, asked)
    # Host memory for one prompt and its answer.
    made = filed(directory, tmp_path / "files", room=8 * BLOCK)
    async with started(build_engine(made)) as engine:
        found, stats = await said(engine, asked)
    same(found, expected)
    assert stats.disk_fetched_tokens >= 6 * CHUNK and stats.host_evicted_tokens > 0, stats


async def test_what_is_not_whole_is_computed(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    directory, files, asked = checkpoint_of("llama"), tmp_path / "files", rounds()
    made = filed(directory, files)
    expected = await written(made, asked)
    for place, file in enumerate(sorted(each for each in files.iterdir() if each.name != "lock")):
        data = bytearray(file.read_bytes())
        data[-1 - place % 100] ^= 1
        file.write_bytes(data[: -1 if place % 3 == 0 else None])
    async with started(build_engine(made)) as engine:
        found, stats = await said(engine, asked)
    same(found, expected)
    assert stats.disk_fetched_tokens == 0 and stats.disk_failures > 0


async def test_salts_adapters_and_other_weights_have_files_of_their_own(
    checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    directory, files, (asked, *_) = checkpoint_of("llama"), tmp_path / "files", rounds()
    for seed, name in enumerate(("one", "two")):
        make_adapter(directory, tmp_path / name, seed, **ADAPTERS["narrow"])
    adapters = (("one", str(tmp_path / "one")), ("two", str(tmp_path / "two")))
    made = dataclasses.replace(filed(directory, files), lora=LoraConfig(adapters))
    ours = dataclasses.replace(asked, cache_salt="tenant\0a", adapter="one")
    await written(made, [ours])
    # Slots are numbered as adapters are loaded: in this process the names have each other's.
    turned = dataclasses.replace(made, lora=LoraConfig(adapters[::-1]))
    async with started(build_engine(turned)) as engine:

        async def fetched(**changes: Any) -> int:
            before = engine.stats.disk_fetched_tokens
            await said(engine, [dataclasses.replace(ours, **changes)])
            return engine.stats.disk_fetched_tokens - before

        assert not await fetched(cache_salt="other\0a") and not await fetched(cache_salt="tenant\0b")
        assert not await fetched(adapter="two") and not await fetched(adapter="")
        assert await fetched()
    other = directory / "model.safetensors"
    touched = other.stat().st_mtime_ns
    try:
        other.touch()
        async with started(build_engine(made)) as engine:
            _, stats = await said(engine, [ours])
            assert stats.disk_fetched_tokens == 0, "other weights may have been put there"
    finally:
        os.utime(other, ns=(touched, touched))


async def test_a_flush_deletes_files(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    directory, files, (first, second, *_) = checkpoint_of("llama"), tmp_path / "files", rounds()
    asked = [dataclasses.replace(first, cache_salt="a\0"), dataclasses.replace(second, cache_salt="b\0")]
    made = filed(directory, files)
    async with started(build_engine(made)) as engine:
        await said(engine, asked)
        await until(lambda: engine.stats.disk_kept_tokens == engine.stats.host_kept_tokens > 0)
        engine.prefixes.flush("a")
        for request, found in zip(asked, (False, True), strict=True):
            await said(engine, rounds()[2:5])
            # From files or from memory: of a tenant that was flushed it is neither.
            before = engine.stats
            await said(engine, [request])
            assert (engine.stats.cached_tokens > before.cached_tokens) == found
        engine.prefixes.flush()
        assert [each.name for each in files.iterdir()] == ["lock"]


async def test_a_directory_that_another_server_uses_is_refused(
    checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    made = filed(checkpoint_of("llama"), tmp_path / "files")
    async with started(build_engine(made)):
        with pytest.raises(ConfigError, match="another server uses it"):
            build_engine(made)
    async with started(build_engine(made)):
        pass
