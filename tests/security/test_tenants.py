"""What one client could learn of another: cached prefixes, stale pages, and requests by their id."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.engine import build
from core.prefix import radix
from core.prefix.base import PrefixCache
from core.prefix.radix import RadixCache
from service.client import CallFailed, Chunk, SlipstreamClient
from tests.support.fakes.fake_engine import FakeEngine, held
from tests.support.scorecard import Scorecard
from tests.support.servers import Serve, serve_checkpoint

PROMPT = "pack my box with five dozen liquor jugs and the jugs with the liquor. " * 3
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}


async def hits(client: SlipstreamClient, salt: str) -> int:
    """Prompt tokens of one request that came from the cache."""
    (output,) = await client.complete(PROMPT, cache_salt=salt, **GREEDY)
    return output.end.cached_tokens


async def test_salts_share_nothing(tiny: Path, scorecard: Scorecard) -> None:
    async with serve_checkpoint(tiny) as (_, client):
        assert await hits(client, "tenant a") == 0
        assert await hits(client, "tenant a") > 0
        crossed = [
            await hits(client, salt) for salt in ("tenant b", "", "tenant A", "tenant a ", "tenant", "\0tenant a")
        ]
        (bare,) = [await hits(client, "")]
    assert bare > 0
    scorecard(27, "tokens hit across salts", sum(crossed), equals=0)


async def test_callers_share_nothing_whatever_salt_they_choose(tiny: Path, tmp_path: Path) -> None:
    """The salt is the client's word, the caller's name is ours."""
    tokens = tmp_path / "tokens"
    tokens.write_text("a:aaaaaaaaaaaaaaaaaaaa\nab:bbbbbbbbbbbbbbbbbbbb\na:cccccccccccccccccccc\n")
    async with serve_checkpoint(tiny, auth_token_file=str(tokens)) as (server, _):
        target = f"127.0.0.1:{server.port}"
        async with (
            SlipstreamClient(target, token="a" * 20) as first,
            SlipstreamClient(target, token="b" * 20) as other,
            SlipstreamClient(target, token="c" * 20) as rotated,
        ):
            assert await hits(first, "bc") == 0
            assert [await hits(other, salt) for salt in ("bc", "c", "", "a\0bc")] == [0, 0, 0, 0]
            # A new token of the same name is the same caller.
            assert await hits(rotated, "bc") > 0


async def test_only_its_caller_can_abort_a_request(serve: Serve, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice:aaaaaaaaaaaaaaaaaaaa\nbob:bbbbbbbbbbbbbbbbbbbb\n")
    gate = asyncio.Event()
    async with serve(FakeEngine(held(gate)), auth_token_file=str(tokens)) as serving:
        async with (
            SlipstreamClient(serving.target, token="a" * 20) as alice,
            SlipstreamClient(serving.target, token="b" * 20) as bob,
        ):
            stream = alice.generate("hi", request_id="mine")
            await anext(stream)
            assert not await bob.abort("mine")
            assert not await bob.abort("nobody's")
            gate.set()
            assert len([event async for event in stream if isinstance(event, Chunk)]) == 7
            gate.clear()
            again = alice.generate("hi", request_id="mine")
            await anext(again)
            assert await alice.abort("mine")
            assert [event.reason async for event in again if not isinstance(event, Chunk)] == ["cancelled"]


async def test_vectors_share_no_cached_prefix_and_are_aborted_by_their_caller_only(
    tiny: Path, serve: Serve, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice:aaaaaaaaaaaaaaaaaaaa\nbob:bbbbbbbbbbbbbbbbbbbb\n")
    async with serve_checkpoint(tiny, auth_token_file=str(tokens)) as (server, _):
        target = f"127.0.0.1:{server.port}"
        async with SlipstreamClient(target, token="a" * 20) as alice, SlipstreamClient(target, token="b" * 20) as bob:
            found = [(await each.embed(PROMPT))[0].cached_tokens for each in (alice, alice, bob, bob)]
            assert [cached > 0 for cached in found] == [False, True, False, True]
            assert await hits(bob, "other") == 0
    gate = asyncio.Event()
    async with serve(FakeEngine(held(gate, after=0)), auth_token_file=str(tokens)) as serving:
        target = serving.target
        async with SlipstreamClient(target, token="a" * 20) as alice, SlipstreamClient(target, token="b" * 20) as bob:
            call = asyncio.create_task(alice.embed("hi", request_id="mine"))
            await serving.engine.stream_number(1)
            assert not await bob.abort("mine")
            assert await alice.abort("mine")
            with pytest.raises(CallFailed) as failed:
                await call
            assert failed.value.reason == "REQUEST_ABORTED"
            again = asyncio.create_task(alice.embed("hi", request_id="mine"))
            await serving.engine.stream_number(2)
            assert not await bob.abort("mine")
            gate.set()
            assert len(await again) == 1


class PoisonedBuilder:
    """Builds the production engine and keeps hold of its pools; `poison` fills every page that nobody owns with NaN."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools: build.Pools | None = None
        make = build.build_pools

        def spy(*args: Any) -> build.Pools:
            self.pools = make(*args)
            return self.pools

        monkeypatch.setattr(build, "build_pools", spy)

    def poison(self) -> int:
        """How many pages were filled. Only while nothing runs; page 0 is padding, which must stay finite."""
        assert self.pools is not None
        allocator, kv = self.pools.memory.allocator, self.pools.kv
        free = torch.from_numpy(np.flatnonzero(~allocator._held[1:]) + 1)
        for spec in kv.layers:
            for buffer in (kv.k(spec.layer_id), kv.v(spec.layer_id)):
                paged = buffer.view(kv.num_pages + 1, kv.page_size, *buffer.shape[1:])
                paged[free] = math.nan
        return len(free)


@pytest.mark.parametrize("settings", [{}, {"prefix_cache": "none"}, {"chunked_prefill_size": 32}, {"overlap": False}])
async def test_freed_pages_are_never_read_before_they_are_written(
    tiny: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, scorecard: Scorecard
) -> None:
    async with serve_checkpoint(tiny, max_total_tokens=2048, **settings) as (_, client):
        clean = [await answers(client, length) for length in LENGTHS]
    builder = PoisonedBuilder(monkeypatch)
    poisoned = 0
    async with serve_checkpoint(tiny, max_total_tokens=2048, **settings) as (server, client):
        found = []
        for length in LENGTHS:
            assert server.engine.live_requests == 0
            poisoned += builder.poison()
            found.append(await answers(client, length))
    changed = sum(a != b for mine, theirs in zip(found, clean, strict=True) for a, b in zip(mine, theirs, strict=True))
    scorecard(27, "pages filled with NaN", poisoned, at_least=1000)
    scorecard(27, f"of {len(clean) * 3} outputs, changed by them", changed, equals=0)


LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 100, 16, 1)
"""Around pages of 16, and back to prompts that were cached by then."""


async def answers(client: SlipstreamClient, length: int) -> list[tuple[int, ...]]:
    """Greedy outputs of three prompts that run in one batch."""
    prompts = [[5 + (i * step) % 300 for i in range(length)] for step in (1, 7, 11)]
    done = await asyncio.gather(*(client.complete(prompt, **GREEDY) for prompt in prompts))
    return [output.token_ids for (output,) in done]


class Colliding(bytes):
    """Bytes that all have one hash; what is equal is still told by their contents."""

    def __hash__(self) -> int:
        return 7


def test_equal_hashes_do_not_make_equal_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix, "page_key", lambda data, at, size: Colliding(data[at : at + size]))
    cache: PrefixCache = RadixCache(4)
    prompts = [np.arange(12, dtype=np.int64) + 100 * i for i in range(20)]
    for number, prompt in enumerate(prompts):
        assert cache.match(prompt, 12, "").pages.size == 0
        cache.insert(prompt, np.arange(3, dtype=np.int64) + 1 + 3 * number, "", 0)
    for number, prompt in enumerate(prompts):
        assert cache.match(prompt, 12, "").pages.tolist() == [1 + 3 * number + i for i in range(3)]
        changed = prompt.copy()
        changed[5] += 1
        assert cache.match(changed, 12, "").pages.size == 1
    cache.check_integrity()


async def test_outputs_are_right_when_every_hash_collides(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, scorecard: Scorecard
) -> None:
    prompts = [[5 + (i * step) % 300 for i in range(70)] for step in (1, 3, 7, 11, 13)]

    async def run() -> list[tuple[int, ...]]:
        async with serve_checkpoint(tiny) as (_, client):
            return [(await client.complete(prompt, **GREEDY))[0].token_ids for prompt in prompts * 2]

    expected = await run()
    monkeypatch.setattr(radix, "page_key", lambda data, at, size: Colliding(data[at : at + size]))
    changed = sum(a != b for a, b in zip(await run(), expected, strict=True))
    scorecard(27, f"of {len(expected)} outputs, changed by colliding hashes", changed, equals=0)
