"""Requests that wait for files: together, ended meanwhile, beside a flush, and beside other weights."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.config import LoraConfig, MemoryConfig
from core.disk.chunk_store import ChunkStore
from core.engine import disk_cache
from core.engine.async_engine import AsyncEngine
from core.engine.build import build_engine
from core.engine.disk_cache import with_disk
from core.errors import AdapterNotFound, DeadlinePassed, RequestAborted
from core.memory.host_tier import BLOCK
from core.types.control import WeightSource
from core.types.io import GenerateRequest
from core.types.sampling_params import SamplingParams
from tests.proofs.equivalence.test_disk_prefixes import filed, said, written
from tests.proofs.equivalence.test_host_prefixes import CHUNK, rounds
from tests.proofs.equivalence.test_rejoining import answer
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import started
from tests.support.until import until
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, make_adapter


class Held:
    """Reads that wait until they are let go; `behind`: once they have read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, behind: bool = False) -> None:
        self.names = list[str]()
        self.go, self._read = threading.Event(), ChunkStore.read
        held = self

        def read(store: ChunkStore, name: str, parts: Any) -> bool:
            found = behind and held._read(store, name, parts)
            held.names.append(name)
            assert held.go.wait(20)
            return found if behind else held._read(store, name, parts)

        monkeypatch.setattr(ChunkStore, "read", read)


async def reading(engine: AsyncEngine, asked: GenerateRequest, held: Held) -> asyncio.Task[Any]:
    """A request, "mine", that waits for reads which are held."""
    task = asyncio.create_task(answer(engine, dataclasses.replace(asked, request_id="mine")))
    await until(lambda: held.names)
    return task


@pytest.fixture
async def filled(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> Any:
    """Settings of an engine for which three chunks of a prompt are in files, and that prompt."""
    made, asked = filed(checkpoint_of("llama"), tmp_path / "files"), rounds()[0]
    await written(made, [asked])
    return made, asked


async def test_requests_with_one_beginning_read_it_once(filled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = filled
    async with started(build_engine(made)) as engine:
        held = Held(monkeypatch)
        both = [asyncio.create_task(answer(engine, asked)) for _ in range(2)]
        await until(lambda: held.names)
        held.go.set()
        first, second = await asyncio.gather(*both)
        assert first == second and len(held.names) == len(set(held.names)) >= 3
        await until(lambda: engine.stats.disk_fetched_tokens == len(held.names) * CHUNK)
        assert engine.stats.cached_tokens >= 2 * len(held.names) * CHUNK, "of each of them"
        # The next copy tells the device what to forget: nothing that it never heard of.
        await said(engine, rounds()[1:3])


async def test_a_request_that_ends_meanwhile_leaves_nothing_behind(
    filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, asked = filled
    async with started(build_engine(made)) as engine:
        held = Held(monkeypatch)
        ended = await reading(engine, asked, held)
        assert engine.abort("mine")
        with pytest.raises(RequestAborted):
            await ended
        kept = engine._scheduler.host_cache
        assert kept is not None and kept.is_copying, "its blocks are still written to"
        held.go.set()
        await until(lambda: not kept.is_copying)
        # What was read is there for the next one.
        await said(engine, [asked])
        assert len(held.names) == len(set(held.names)) and engine.stats.host_fetched_tokens >= 3 * CHUNK
        kept.prefixes._prefixes.check_integrity()  # type: ignore[union-attr]


async def test_a_request_whose_deadline_passes_waits_no_longer(filled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = filled
    async with started(build_engine(made)) as engine:
        held = Held(monkeypatch)
        with pytest.raises(DeadlinePassed):
            await answer(engine, dataclasses.replace(asked, deadline=time.monotonic() + 0.3))
        held.go.set()
        assert await answer(engine, asked)


async def test_a_disk_that_hangs_is_not_waited_for(filled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = filled
    monkeypatch.setattr(disk_cache, "PATIENCE", 0.05)
    async with started(build_engine(made)) as engine:
        held = Held(monkeypatch)
        # The second one waits for what the first one reads.
        first, second = await asyncio.gather(answer(engine, asked), answer(engine, asked))
        assert first == second and not held.go.is_set()
        held.go.set()


async def test_an_engine_is_still_once_threads_are_done_with_its_memory(
    filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is told so, where nothing else happens any more."""
    made, asked = filled
    async with started(build_engine(made)) as engine:
        held = Held(monkeypatch)
        ended = await reading(engine, asked, held)
        pausing = asyncio.create_task(engine.control.pause())
        engine.abort("mine")
        with pytest.raises(RequestAborted):
            await ended
        assert not (await asyncio.wait([pausing], timeout=0.1))[0], "threads read"
        held.go.set()
        await asyncio.wait_for(pausing, 20)
        await engine.control.resume()


async def test_an_adapter_that_goes_meanwhile_is_no_adapter(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, adapters = checkpoint_of("llama"), tmp_path / "adapters"
    adapter = make_adapter(directory, adapters / "one", 1, **ADAPTERS["narrow"])
    made = dataclasses.replace(filed(directory, tmp_path / "files"), lora=LoraConfig(directory=str(adapters)))
    asked = dataclasses.replace(rounds()[0], adapter="one")
    async with started(build_engine(made)) as engine:
        await engine.load_adapter("one", adapter.name)
        await said(engine, [asked])
        await until(lambda: engine.stats.disk_kept_tokens == engine.stats.host_kept_tokens > 0)
    async with started(build_engine(made)) as engine:
        await engine.load_adapter("one", adapter.name)
        held = Held(monkeypatch)
        asking = await reading(engine, asked, held)
        engine.unload_adapter("one")
        held.go.set()
        with pytest.raises(AdapterNotFound):
            await asking
        assert await answer(engine, dataclasses.replace(asked, adapter="")), "the engine lives"


async def test_nothing_of_before_a_flush_comes_after_it(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what waits to be written too, in files and in host memory."""
    go, write = threading.Event(), ChunkStore.write
    monkeypatch.setattr(ChunkStore, "write", lambda *told: go.wait(20) and write(*told))
    files = tmp_path / "files"
    async with started(build_engine(filed(checkpoint_of("llama"), files))) as engine:
        await said(engine, rounds()[:2])
        kept = engine._scheduler.host_cache
        assert kept is not None and kept.is_copying
        engine.prefixes.flush()
        go.set()
        await until(lambda: not kept.is_copying)
        assert [each.name for each in files.iterdir()] == ["lock"] and engine.stats.disk_cache_bytes == 0
        before = engine.stats.cached_tokens
        await said(engine, rounds()[:1])
        assert engine.stats.cached_tokens == before


@pytest.mark.parametrize("behind", [False, True], ids=["before", "read"])
async def test_a_flush_counts_for_what_is_on_its_way(
    filled: Any, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    made, asked = filled
    async with started(build_engine(made)) as engine:
        held = Held(monkeypatch, behind=behind)
        asking = await reading(engine, asked, held)
        engine.prefixes.flush()
        held.go.set()
        await asking
        assert engine.stats.disk_fetched_tokens == engine.stats.host_fetched_tokens == 0


async def test_while_the_engine_is_still_nothing_is_read(filled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = filled
    async with started(build_engine(made)) as engine:
        held = Held(monkeypatch)
        held.go.set()
        await engine.control.pause()
        asking = asyncio.create_task(answer(engine, asked))
        await until(lambda: engine.stats.waiting)
        assert not held.names
        await engine.control.resume()
        await asking


async def test_a_disk_that_is_behind_is_not_waited_for(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, write = threading.Event(), ChunkStore.write
    monkeypatch.setattr(ChunkStore, "write", lambda *told: held.wait(20) and write(*told))
    # For 16 chunks, a quarter of which may wait to be written.
    made = filed(checkpoint_of("llama"), tmp_path / "files", room=16 * BLOCK)
    async with started(build_engine(made)) as engine:
        await said(engine, rounds()[:5])
        assert engine.stats.disk_skipped_tokens > 0 and engine.stats.disk_kept_tokens == 0
        assert engine.stats.disk_pending_chunks > 0
        held.set()
        await until(lambda: engine.stats.disk_pending_chunks == 0)
        assert engine.stats.disk_kept_tokens > 0


async def test_other_weights_find_nothing_and_leave_nothing(tmp_path: Path) -> None:
    """Not even under the name of the weights of before: the next process begins with those again."""
    for seed, name in enumerate(("old", "new")):
        make_checkpoint("llama", tmp_path / name, seed=seed)
    made = filed(tmp_path / "old", tmp_path / "files")
    made = dataclasses.replace(made, model=dataclasses.replace(made.model, weights_dir=str(tmp_path)))
    asked = rounds()[0]

    async def fetched(engine: AsyncEngine) -> int:
        before = engine.stats.disk_fetched_tokens
        await said(engine, [asked, *rounds()[1:4]])
        await said(engine, [asked])
        return engine.stats.disk_fetched_tokens - before

    await written(made, [asked])
    async with started(build_engine(made)) as engine:
        assert (await engine.control.update_weights(WeightSource("new"), "default")).restarted == 0
        assert await fetched(engine) == 0
        await until(lambda: engine.stats.disk_kept_tokens > 0)
    async with started(build_engine(made)) as engine:
        assert await fetched(engine) == 0
    # But what they have written by then is theirs.
    async with started(build_engine(made)) as engine:
        assert await fetched(engine) > 0


def test_host_memory_comes_with_files(tmp_path: Path) -> None:
    assert with_disk(MemoryConfig()).host_cache_bytes == 0
    assert with_disk(MemoryConfig(disk_cache=str(tmp_path))).host_cache_bytes == 1 << 30
    assert with_disk(MemoryConfig(disk_cache=str(tmp_path), host_cache_bytes=5)).host_cache_bytes == 5


async def test_an_engine_without_prefixes_says_that_files_are_unused(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(build_engine(filed(checkpoint_of("llama"), tmp_path / "files", prefix_cache="none"))) as engine:
        sampling = SamplingParams(max_tokens=2)
        await said(engine, [GenerateRequest(token_ids=tuple(range(5, 40)), sampling=sampling)])
        assert "disk_cache is unused" in caplog.text and engine.stats.disk_cache_bytes == 0
