"""SubscribeKvEvents: the state, then every change, numbered without gaps; tenants apart, slow readers dropped."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from smg_grpc_proto.generated import common_pb2

from core.errors import SlowConsumer
from core.types.prefixes import PrefixRemoved, PrefixStored
from service.client import CallFailed
from service.gateway import kv_events, subscriptions
from service.gateway.dialect import Load
from service.gateway.kv_events import MAX_BLOCKS, KvEvents, block_hash
from tests.contract.gateway.spoken import Spoken
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_prefixes import stored
from tests.support.servers import Serve, serve_checkpoint
from tests.support.until import until

LOAD = Load(1, 2, 32, 160, 0.2, 50.0, 0.5, 8)
PAGE = 4


class Index:
    """What a gateway makes of the batches: every live block with the ids of its whole prefix."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.sequence: int | None = None

    def take(self, batch: Any) -> None:
        """Apply one batch; numbers go up by one."""
        if batch.load.load_only:
            assert batch.sequence_number == self.sequence and not batch.events
            return
        assert self.sequence is None or batch.sequence_number == self.sequence + 1
        self.sequence = batch.sequence_number
        for event in batch.events:
            getattr(self, f"_{event.WhichOneof('data')}")(getattr(event, event.WhichOneof("data")))

    def _cleared(self, _event: Any) -> None:
        self.blocks.clear()

    def _stored(self, event: Any) -> None:
        before = self.blocks[event.parent_block_hash] if event.HasField("parent_block_hash") else ()
        for block in event.blocks:
            assert len(block.token_ids) == block.block_size
            assert block.block_hash not in self.blocks
            before = self.blocks[block.block_hash] = (*before, *block.token_ids)

    def _removed(self, event: Any) -> None:
        for name in event.block_hashes:
            del self.blocks[name]

    @property
    def prefixes(self) -> set[tuple[int, ...]]:
        return set(self.blocks.values())


def paths(*changes: PrefixStored) -> set[tuple[int, ...]]:
    """Prefixes that end a page, of changes that all begin at the root or behind one before."""
    known: dict[int, tuple[int, ...]] = {0: ()}
    for change in changes:
        before = known[change.parent]
        for ids, page in zip(change.ids.reshape(-1, PAGE).tolist(), change.pages.tolist()):
            before = known[page] = (*before, *ids)
    return set(known.values()) - {()}


def test_large_states_come_in_chunks_with_their_parents() -> None:
    long = stored(0, range(1, 3 * MAX_BLOCKS))
    child = stored(MAX_BLOCKS + 7, range(5000, 5005))
    batches = list(KvEvents(PAGE, 0).snapshot([long, child], LOAD))
    assert [(each.snapshot.index, each.snapshot.count) for each in batches] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert {each.snapshot.blocks for each in batches} == {3 * MAX_BLOCKS - 1 + 5}
    assert [each.sequence_number for each in batches] == [1, 2, 3, 4]
    assert batches[0].events[0].HasField("cleared")
    index = Index()
    for batch in batches:
        index.take(batch)
    assert index.prefixes == paths(long, child)


def test_an_empty_state_clears_and_a_subscriber_may_say_where_numbers_begin() -> None:
    events = KvEvents(PAGE, 41)
    (batch,) = events.snapshot([], LOAD)
    assert (batch.sequence_number, batch.snapshot.count, len(batch.events)) == (41, 1, 1)
    beat = events.heartbeat(LOAD)
    assert (beat.sequence_number, beat.load.load_only, len(beat.events)) == (41, True, 0)
    (change,) = events.changes([stored(0, [1])], LOAD)
    assert change.sequence_number == 42
    assert batch.load.sample < beat.load.sample < change.load.sample
    assert (beat.load.running_requests, beat.load.waiting_requests, beat.load.token_usage) == (1, 2, 0.2)
    assert not beat.load.HasField("speculative")


def test_changes_are_named_by_content_and_unknown_pages_are_not_mentioned() -> None:
    events, index = KvEvents(PAGE, 0), Index()
    for batch in events.snapshot([stored(0, [1, 2])], LOAD):
        index.take(batch)
    mixed = [stored(2, [3]), PrefixRemoved(np.array([3, 99])), PrefixRemoved(np.array([77])), stored(0, [9])]
    for batch in events.changes(mixed, LOAD):
        index.take(batch)
    assert index.prefixes == paths(stored(0, [1, 2]), stored(0, [9]))
    assert list(events.changes([PrefixRemoved(np.array([77]))], LOAD)) == []
    # The same content on another page, in another subscription: the same name.
    other = Index()
    (batch,) = KvEvents(PAGE, 0).snapshot([PrefixStored(0, stored(0, [1, 2]).ids, np.array([50, 51]))], LOAD)
    other.take(batch)
    assert set(other.blocks) < set(index.blocks)


def test_equal_pages_behind_different_prefixes_have_different_names() -> None:
    ids = np.arange(4).tobytes()
    assert len({block_hash(0, ids), block_hash(1, ids), block_hash(-1, ids), block_hash(0, ids[::-1])}) == 4


async def follow(call: Any, index: Index, wanted: set[tuple[int, ...]]) -> None:
    """Read until the index knows just these prefixes."""
    async with asyncio.timeout(10):
        while index.prefixes != wanted or index.sequence is None:
            index.take(await call.read())


def whole_pages(ids: list[int], page: int) -> set[tuple[int, ...]]:
    return {tuple(ids[:end]) for end in range(page, len(ids) + 1, page)}


async def test_a_real_cache_is_followed_through_requests_and_a_flush(tiny: Path, spoken: Spoken) -> None:
    first, second = list(range(3, 45)), [*range(3, 19), *range(100, 120)]
    async with serve_checkpoint(tiny, page_size=8, unnamed_callers="watch") as (server, client):
        stub = spoken.stub(client.channel)
        request = spoken.generate(first, params={"max_tokens": 1, "ignore_eos": True, "temperature": 0.0})
        async for _ in stub.Generate(request):
            pass
        call, index = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()), Index()
        await follow(call, index, whole_pages(first, 8))
        await client.complete(second, max_tokens=1, temperature=0.0, ignore_eos=True)
        await client.complete(second, max_tokens=1, temperature=0.0, cache_salt="another tenant")
        await follow(call, index, whole_pages(first, 8) | whole_pages(second, 8))
        late, again = Index(), stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=7))
        await follow(again, late, index.prefixes)
        assert late.blocks == index.blocks and late.sequence == 7
        again.cancel()
        flushed = await stub.FlushCache(common_pb2.FlushCacheRequest())
        await follow(call, index, set())
        assert flushed.message == "11 pages evicted"
        call.cancel()
        cache = server.engine._scheduler.memory.cache  # type: ignore[attr-defined]
        await until(lambda: cache._observer is None)


async def test_heartbeats_tell_the_load_of_an_idle_server(
    serve: Serve, spoken: Spoken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "HEARTBEAT_SECONDS", 0.01)
    async with serve(unnamed_callers="watch") as serving:
        call = spoken.stub(serving.client.channel).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        index, beats = Index(), []
        while len(beats) < 2:
            batch = await call.read()
            index.take(batch)
            if batch.load.load_only:
                beats.append(batch)
        call.cancel()
    assert {each.load.token_usage for each in beats} == {0.25}
    assert {each.load.max_total_num_tokens for each in beats} == {100}
    assert {each.load.speculative.accept_length for each in beats} == {1 + 8 / 4}
    assert {each.load.speculative.accept_rate for each in beats} == {8 / 19}


async def test_who_falls_behind_is_dropped_and_begins_again(serve: Serve, spoken: Spoken) -> None:
    engine = FakeEngine()
    async with serve(engine, unnamed_callers="watch") as serving:
        stub, index = spoken.stub(serving.client.channel), Index()
        call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        index.take(await call.read())
        (watch,) = engine.prefixes.watches
        watch.queue.put_nowait(SlowConsumer("the prefix cache changed more than was read; subscribe again"))
        with pytest.raises(grpc.aio.AioRpcError) as dropped:
            await call.read()
        failed = CallFailed(dropped.value)
        assert (failed.code, failed.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER")
        assert watch.closed and await serving.metric("slipstream_slow_consumer_evictions_total") == 1
        engine.prefixes.contents[""] = [stored(0, [1, 2])]
        start = common_pb2.SubscribeKvEventsRequest(start_sequence_number=index.sequence)
        afresh, again = Index(), stub.SubscribeKvEvents(start)
        afresh.take(await again.read())
        assert afresh.prefixes == paths(stored(0, [1, 2]))
        again.cancel()
        await until(lambda: engine.prefixes.watches[-1].closed)


async def test_a_client_that_goes_is_forgotten_and_a_closing_server_ends_the_others(
    serve: Serve, spoken: Spoken
) -> None:
    engine = FakeEngine()
    async with serve(engine, unnamed_callers="watch") as serving:
        stub = spoken.stub(serving.client.channel)
        calls = [stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()) for _ in range(2)]
        for call in calls:
            await call.read()
        calls[0].cancel()
        await until(lambda: sum(each.closed for each in engine.prefixes.watches) == 1)
        # A stream left open would hold it up for its grace.
        closing = asyncio.create_task(serving.server.close(grace=3600))
        async with asyncio.timeout(60):
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await calls[1].read()
            await closing
    assert (ended.value.code(), CallFailed(ended.value).reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert all(each.closed for each in engine.prefixes.watches)


async def test_there_are_only_so_many_subscribers(
    serve: Serve, spoken: Spoken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "MAX_SUBSCRIBERS", 2)
    async with serve(unnamed_callers="watch") as serving:
        stub = spoken.stub(serving.client.channel)
        calls = [stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()) for _ in range(2)]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read()
        for call in calls:
            call.cancel()
    assert CallFailed(refused.value).reason == "SUBSCRIBERS"


async def test_connections_of_one_address_without_a_name_are_one_caller(
    serve: Serve, spoken: Spoken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "MAX_OF_ONE", 1)
    async with serve(unnamed_callers="watch") as serving:
        own_connection = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(serving.target, own_connection) as other:
            held = spoken.stub(serving.client.channel).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
            await held.read()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await spoken.stub(other).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read()
            held.cancel()
    assert CallFailed(refused.value).reason == "SUBSCRIBERS"


async def test_a_caller_follows_the_blocks_of_its_own_tenant_only(serve: Serve, spoken: Spoken, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice:{'a' * 20}\nbob:{'b' * 20}\n")
    engine = FakeEngine()
    engine.prefixes.contents = {"alice\0": [stored(0, [1])], "bob\0": [stored(0, [2])], "": [stored(0, [3])]}
    async with serve(engine, auth_token_file=str(tokens)) as serving:
        stub = spoken.stub(serving.client.channel)
        for token, page in (("a", 1), ("b", 2)):
            call = stub.SubscribeKvEvents(
                common_pb2.SubscribeKvEventsRequest(), metadata=(("authorization", f"Bearer {token * 20}"),)
            )
            index = Index()
            index.take(await call.read())
            assert index.prefixes == paths(stored(0, [page]))
            call.cancel()


async def test_without_a_prefix_cache_nobody_asks_again(tiny: Path, spoken: Spoken) -> None:
    async with serve_checkpoint(tiny, prefix_cache="none", unnamed_callers="watch") as (_, client):
        call = spoken.stub(client.channel).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    assert (refused.value.code(), CallFailed(refused.value).reason) == (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED")


def test_a_batch_stays_far_below_the_limit_of_a_message() -> None:
    ids = np.full(MAX_BLOCKS * 256, 2**31 - 1)
    (batch,) = KvEvents(256, 0).changes([PrefixStored(0, ids, np.arange(1, MAX_BLOCKS + 1))], LOAD)
    assert batch.ByteSize() < 1 << 20
    assert sum(len(event.stored.blocks) for event in batch.events) == kv_events.MAX_BLOCKS
