"""Watches of the prefix cache: what each is told, how far behind it may be, and what a flush leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import assemble
from core.engine.prefixes import CachedPrefixWatch
from core.errors import Draining, SlowConsumer, Unsupported
from core.text.tokenizer import Tokenizer
from core.types.io import GenerateRequest
from core.types.prefixes import PrefixRemoved, PrefixStored
from core.types.sampling_params import SamplingParams
from service.bench.emulated import EmulatedModel, EmulatedStreams, Timeline
from tests.support.engines import started
from tests.support.fakes.emulated_engine import emulated_engine
from tests.support.until import until

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


async def run(engine: AsyncEngine, ids: range, **fields: Any) -> None:
    async for _ in await engine.generate(GenerateRequest(token_ids=tuple(ids), sampling=GREEDY, **fields)):
        pass


def stored(parent: int, pages: list[int]) -> PrefixStored:
    return PrefixStored(parent, np.zeros(2 * len(pages), np.int64), np.array(pages))


async def test_a_watch_sees_its_own_namespace_first_whole_and_then_each_change(bundled_tokenizer: Tokenizer) -> None:
    async with started(emulated_engine(bundled_tokenizer, step_seconds=0.0)) as engine:
        await run(engine, range(40))
        await run(engine, range(100, 140), cache_salt="tenant")
        watch = engine.prefixes.watch("")
        assert [each.ids.tolist() for each in watch.contents] == [list(range(32))]
        await run(engine, range(300, 340), cache_salt="tenant")
        await run(engine, range(200, 240))
        changes = await watch.changes()
        assert [type(each) for each in changes] == [PrefixStored]
        assert changes[0].ids.tolist() == list(range(200, 232)) and changes[0].parent == 0
        assert engine.prefixes.flush() == 8
        (removed,) = [await watch.changes()]
        assert sum(len(each.pages) for each in removed) == 8
        assert all(isinstance(each, PrefixRemoved) for each in removed)
        watch.close()
        watch.close()


async def test_nobody_watching_means_nobody_is_told(
    bundled_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(emulated_engine(bundled_tokenizer, step_seconds=0.0)) as engine:
        observed: list[object] = []
        cache = engine._scheduler.memory.cache
        observe = cache.observe
        monkeypatch.setattr(cache, "observe", lambda observer: observed.append(observer) or observe(observer))
        first, second = engine.prefixes.watch(""), engine.prefixes.watch("")
        first.close()
        assert observed[-1] is engine.prefixes
        second.close()
        assert observed[-1] is None


async def test_a_watch_that_is_not_read_is_over_and_the_others_go_on() -> None:
    closed: list[CachedPrefixWatch] = []
    watch = CachedPrefixWatch(2, [], closed.append, max_unread=4)
    watch.add(stored(0, [1, 2, 3, 4]))
    assert [each.pages.tolist() for each in await watch.changes()] == [[1, 2, 3, 4]]
    watch.add(stored(4, [5, 6, 7]))
    watch.add(stored(7, [8, 9]))
    watch.add(stored(9, [10]))
    assert closed == [watch]
    for _ in range(2):
        with pytest.raises(SlowConsumer):
            await watch.changes()


async def test_a_watch_that_is_read_goes_on_without_end() -> None:
    closed: list[CachedPrefixWatch] = []
    watch = CachedPrefixWatch(2, [], closed.append, max_unread=10)
    for turn in range(5):
        watch.add(stored(0, [1, 2, 3, 4]))
        assert not closed, turn
        await watch.changes()


async def test_a_flush_leaves_what_a_request_holds(bundled_tokenizer: Tokenizer) -> None:
    async with started(emulated_engine(bundled_tokenizer, step_seconds=0.002)) as engine:
        await run(engine, range(200, 264))
        long = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
        stream = await engine.generate(GenerateRequest(token_ids=tuple(range(40)), sampling=long))
        await anext(stream), await anext(stream)
        assert engine.prefixes.flush() == 4
        engine._scheduler.memory.check_integrity()
        await stream.aclose()
        await until(lambda: not engine.live_requests)
        (used,) = [pool.used for pool in engine.stats.pools if pool.name == "kv_page"]
        assert used == 0
        assert engine.prefixes.flush() >= 2
        engine._scheduler.memory.check_integrity()
        await engine.drain(1)
        with pytest.raises(Draining):
            engine.prefixes.flush()


async def test_without_a_prefix_cache_there_is_nothing_to_watch(bundled_tokenizer: Tokenizer) -> None:
    timeline = Timeline(0.0)
    config = EngineConfig(
        model=ModelConfig("emulated"),
        memory=MemoryConfig(max_running_requests=4, max_total_tokens=1024, prefix_cache="none"),
        executor=ExecutorConfig(device="cpu"),
    )
    built = assemble(
        config, EmulatedModel(timeline, bundled_tokenizer.vocab_size), bundled_tokenizer, EmulatedStreams(timeline)
    )
    async with started(built) as engine:
        with pytest.raises(Unsupported):
            engine.prefixes.watch("")
        assert engine.prefixes.flush() == 0
