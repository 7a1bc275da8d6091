"""Many long streams through real sockets: no token twice, none missing, none of another stream, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from core.engine.async_engine import AsyncEngine
from core.models.bundled import bundled_model_dir
from core.text.tokenizer import Tokenizer
from core.types.io import Delta, Finished, GenerateRequest, Started
from core.types.sampling_params import SamplingParams
from service.bench.emulated import expected_output
from service.client import Chunk, End, SlipstreamClient
from tests.support.engines import started
from tests.support.fakes.emulated_engine import emulated_engine
from tests.support.scorecard import Scorecard
from tests.support.servers import serve_checkpoint
from tests.support.until import until

STREAMS, TOKENS = 200, 2000


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_every_stream_gets_exactly_its_own_tokens(bundled_tokenizer: Tokenizer, scorecard: Scorecard) -> None:
    built = emulated_engine(
        bundled_tokenizer, step_seconds=0.002, rows=STREAMS, max_total_tokens=STREAMS * (TOKENS + 64)
    )
    async with serve_checkpoint(bundled_model_dir(), lambda *_: built) as (server, client):
        engine = server.engine
        await _read(client, bundled_tokenizer.vocab_size, seed=-1, tokens=4)
        tasks, files = len(asyncio.all_tasks()), open_files()
        faults = await asyncio.gather(*(_read(client, bundled_tokenizer.vocab_size, n, TOKENS) for n in range(STREAMS)))
        await until(lambda: len(asyncio.all_tasks()) <= tasks and open_files() <= files)
        pools = {pool.name: pool.used for pool in engine.stats.pools}
    found = [sum(each) for each in zip(*faults)]
    what = f"{STREAMS} streams × {TOKENS} tokens, one engine: duplicated, missing, wrong"
    scorecard(1, what, found[:3], equals=[0] * 3)
    assert all(terminals == 1 for *_, terminals in faults)
    assert pools == {"req": 0, "kv_page": 0}
    assert sum(engine.stats.assert_failures.values()) == 0


async def _read(client: SlipstreamClient, vocab: int, seed: int, tokens: int) -> tuple[int, int, int, int]:
    """Duplicated, missing and wrong tokens, and terminals, of one stream; every third reader dawdles."""
    rng = random.Random(seed)
    prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 12))]
    seen: dict[int, int] = {}
    duplicated = terminals = 0
    async for event in client.generate(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, want_text=False):
        if isinstance(event, End):
            terminals += 1
            continue
        assert isinstance(event, Chunk) and terminals == 0, "nothing after the terminal"
        for place, token in enumerate(event.token_ids, event.position):
            duplicated += place in seen
            seen[place] = token
        if seed % 3 == 0 and rng.random() < 0.01:
            await asyncio.sleep(0.02)
    expected = expected_output(prompt, tokens, vocab)
    wrong = sum(seen.get(place) != token for place, token in enumerate(expected) if place in seen)
    return duplicated, tokens - len(seen), wrong, terminals


@pytest.mark.parametrize("prefix_cache", ["radix", "none"])
async def test_ten_thousand_aborts_leak_nothing(
    bundled_tokenizer: Tokenizer, seed: int, prefix_cache: str, scorecard: Scorecard
) -> None:
    """Half of them for each prefix cache; each is aborted before, at, or after a random number of its events."""
    rng = random.Random(seed)
    built = emulated_engine(bundled_tokenizer, step_seconds=0.0002, rows=48, prefix_cache=prefix_cache)
    async with started(built) as engine:
        tasks, files = len(asyncio.all_tasks()), open_files()
        for _ in range(5000 // 250):
            await asyncio.gather(
                *(_abort_somewhere(engine, bundled_tokenizer.vocab_size, rng.getrandbits(32)) for _ in range(250))
            )
        await until(lambda: engine.live_requests == 0 and all(pool.used == 0 for pool in engine.stats.pools))
        await until(lambda: len(asyncio.all_tasks()) <= tasks and open_files() <= files)
        stats = engine.stats
        used = [pool.used for pool in stats.pools]
        scorecard(8, f"{prefix_cache}, engine alone, 5,000 requests: rows, pages in use", used, equals=[0, 0])
        assert stats.running == stats.waiting == 0
        assert stats.finished["cancelled"] > 1000
        assert sum(stats.assert_failures.values()) == 0
        engine._scheduler.memory.check_integrity()


async def _abort_somewhere(engine: AsyncEngine, vocab: int, seed: int) -> None:
    """Open a request, take a few events and leave: by closing the stream, by Abort, or by being cancelled."""
    rng = random.Random(seed)
    prompt = tuple(rng.randrange(min(vocab, 8)) for _ in range(rng.choice([1, 5, 40, 200])))
    sampling = SamplingParams(
        temperature=0.0, max_tokens=rng.randint(1, 60), ignore_eos=True, n=rng.choice([1, 1, 1, 3])
    )
    request = GenerateRequest(token_ids=prompt, sampling=sampling, want_text=rng.random() < 0.5)
    stream = await engine.generate(request)
    way, events = rng.choice(["close", "abort", "cancel"]), rng.choice([0, 1, 2, 5, 20])
    if way == "cancel":
        reader = asyncio.create_task(_drain(stream))
        for _ in range(events):
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await stream.aclose()
        return
    async for event in stream:
        assert isinstance(event, Started | Delta | Finished)
        events -= 1
        if events < 0:
            break
    if way == "abort":
        engine.abort(stream.request_id)
    await stream.aclose()
    await stream.aclose()


async def _drain(stream: object) -> None:
    async for _ in stream:  # type: ignore[attr-defined]
        pass
