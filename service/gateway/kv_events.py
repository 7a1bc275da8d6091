"""The contents of the prefix cache, as the events that cache-aware gateways index: a snapshot, then every change.

Blocks are pages, named by a hash of their content and of all that comes before it, so that equal prefixes have equal
names on all workers (the idea is that of vLLM's block hashes). Hashing happens here, in the subscriber's own time, and
not where the cache changes.

A stream numbers its batches without gaps, from the number that the subscriber asks for. Nothing is kept for subscribers
that left: every subscription begins with the whole state, whose first batch clears what the subscriber knew before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

from smg_grpc_proto.generated import common_pb2 as pb

from core.types.prefixes import PrefixChange, PrefixRemoved, PrefixStored
from service.gateway.dialect import Load

MAX_BLOCKS = 256
"""Blocks per batch: about two milliseconds of the event loop, and 64 KiB with pages of 64 tokens."""


def block_hash(parent: int, ids: bytes) -> int:
    """int64 name of the block with `ids` (int64 bytes) after the block named `parent`; 0 is no parent."""
    digest = blake2b(parent.to_bytes(8, "little", signed=True) + ids, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class KvEvents:
    """Turns the changes of one `PrefixWatch` into batches, in order."""

    def __init__(self, page_size: int, start: int) -> None:
        self._page_size = page_size
        self._next = max(1, start)
        self._event_id = 0
        self._samples = 0
        self._hashes: dict[int, int] = {}
        """By page number, the hash of every page that the subscriber knows."""

    def snapshot(self, contents: Sequence[PrefixStored], load: Load) -> Iterator[pb.KvEventBatch]:
        """The whole state, in batches that fit a message; for an empty cache one batch that only clears."""
        groups = list(_grouped(contents)) or [[]]
        blocks = sum(len(each.pages) for each in contents)
        for index, group in enumerate(groups):
            events = [self._stored(change, 0) for change in group if isinstance(change, PrefixStored)]
            if index == 0:
                events.insert(0, pb.KvCacheEvent(cleared=pb.KvCacheCleared()))
            batch = self._batch(events, load)
            batch.snapshot.index, batch.snapshot.count, batch.snapshot.blocks = index, len(groups), blocks
            yield batch

    def changes(self, changes: Sequence[PrefixChange], load: Load) -> Iterator[pb.KvEventBatch]:
        """The changes, in as many batches as they need; none if they only remove pages of other namespaces."""
        for group in _grouped(changes):
            events = [event for change in group if (event := self._event(change)) is not None]
            if events:
                yield self._batch(events, load)

    def heartbeat(self, load: Load) -> pb.KvEventBatch:
        """A batch with the load alone. It repeats the sequence number of the last batch."""
        batch = pb.KvEventBatch(sequence_number=self._next - 1, timestamp=datetime.now(UTC).timestamp(), dp_rank=0)
        self._put_load(batch.load, load)
        batch.load.load_only = True
        batch.load.cache_hit_rate = load.cache_hit_rate
        batch.load.num_used_tokens = load.used_tokens
        batch.load.max_total_num_tokens = load.max_total_tokens
        if load.drafts is not None:
            told = batch.load.speculative
            told.accept_length, told.accept_rate = load.drafts.acceptance_length, load.drafts.acceptance_rate
        return batch

    def _batch(self, events: Iterable[pb.KvCacheEvent], load: Load) -> pb.KvEventBatch:
        batch = pb.KvEventBatch(
            sequence_number=self._next, timestamp=datetime.now(UTC).timestamp(), events=events, dp_rank=0
        )
        self._next += 1
        self._put_load(batch.load, load)
        return batch

    def _put_load(self, message: Any, load: Load) -> None:
        self._samples += 1
        message.sample = self._samples
        message.running_requests = load.running
        message.waiting_requests = load.waiting
        # Cached prefixes that no request holds are not counted as used, so both figures are the same.
        message.token_usage = message.active_token_usage = load.token_usage
        message.gen_throughput = load.gen_throughput
        message.max_running_requests = load.max_running

    def _event(self, change: PrefixChange) -> pb.KvCacheEvent | None:
        self._event_id += 1
        if isinstance(change, PrefixStored):
            return self._stored(change, self._event_id)
        hashes = [self._hashes.pop(page) for page in change.pages.tolist() if page in self._hashes]
        if not hashes:
            return None
        removed = pb.KvBlocksRemoved(block_hashes=hashes, tier=pb.KV_CACHE_TIER_DEVICE)
        return pb.KvCacheEvent(event_id=self._event_id, removed=removed)

    def _stored(self, change: PrefixStored, event_id: int) -> pb.KvCacheEvent:
        # Parents outlive their children and come before them, so a parent is known.
        parent = self._hashes[change.parent] if change.parent else 0
        stored = pb.KvBlocksStored(tier=pb.KV_CACHE_TIER_DEVICE)
        if parent:
            stored.parent_block_hash = parent
        for ids, page in zip(change.ids.reshape(-1, self._page_size), change.pages.tolist()):
            parent = self._hashes[page] = block_hash(parent, ids.tobytes())
            stored.blocks.add(block_hash=parent, token_ids=ids.tolist(), block_size=self._page_size)
        return pb.KvCacheEvent(event_id=event_id, stored=stored)


def _grouped(changes: Iterable[PrefixChange]) -> Iterator[list[PrefixChange]]:
    """The same changes in groups of at most MAX_BLOCKS blocks; a change with more blocks is cut."""
    group: list[PrefixChange] = []
    room = MAX_BLOCKS
    for change in changes:
        for piece in _cut(change):
            if len(piece.pages) > room:
                yield group
                group, room = [], MAX_BLOCKS
            group.append(piece)
            room -= len(piece.pages)
    if group:
        yield group


def _cut(change: PrefixChange) -> Iterator[PrefixChange]:
    """Pieces of at most MAX_BLOCKS pages; the parent of each is the last page of the piece before."""
    for at in range(0, len(change.pages), MAX_BLOCKS):
        pages = change.pages[at : at + MAX_BLOCKS]
        if isinstance(change, PrefixRemoved):
            yield PrefixRemoved(pages)
            continue
        size = len(change.ids) // len(change.pages)
        parent = int(change.pages[at - 1]) if at else change.parent
        yield PrefixStored(parent, change.ids[at * size : (at + len(pages)) * size], pages)
