"""What was copied to host memory comes back as it was, to other slots, whatever the sizes; no more and no less."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from core.device.streams import DeviceStreams
from core.invariants import InvariantViolation
from core.memory.host_arena import HostArena
from core.memory.host_moves import CopyBack, CopyOut, HostCopy
from core.memory.host_tier import HostTier

CPU = torch.device("cpu")
SLOTS = 40


def test_copies_come_back_to_other_slots(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for _ in range(40):
        draws = [int(n) for n in rng.integers(1, 6, 4)]
        kinds = [torch.float32, torch.bfloat16, torch.float16]
        pool = [torch.randn(SLOTS, *draws[:2]).to(kinds[place % 3]) for place in range(draws[2])]
        each = sum(tensor[0].numel() * tensor.itemsize for tensor in pool)
        tier = HostTier(64 * each * 8, each, block=int(rng.integers(1, each * 8)))
        arena = HostArena(
            ("kv", pool), tier.num_blocks, tier.block, DeviceStreams(CPU), bounce=int(rng.integers(8, 200))
        )
        kept, backs = [tensor.clone() for tensor in pool], []
        for row in (1, 2, 3):
            slots = rng.permutation(SLOTS)[: int(rng.integers(1, 12))]
            copy = tier.take(len(slots))
            assert copy is not None
            assert arena.copy_out(CopyOut((copy,), slots)).query(), "the CPU copies at once"
            backs.append((copy, slots))
            if row == 1:
                # The blocks of the next are not neighbours.
                tier.free(copy)
                backs.clear()
                tier.take(1)
        for tensor in pool:
            tensor.zero_()
        for copy, slots in backs:
            skip = int(rng.integers(0, len(slots)))
            places = rng.permutation(SLOTS)[: len(slots) - skip]
            arena.copy_back(CopyBack((copy,), skip, places))
            for tensor, before in zip(pool, kept, strict=True):
                assert torch.equal(tensor[places], before[slots[skip:]])
                tensor[places] = 0
                assert not tensor.any(), "no other slot was written"


def test_several_copies_come_back_as_one(seed: int) -> None:
    """Whatever is left out at both ends, and however little passes at a time."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for _ in range(40):
        pool = [torch.randn(SLOTS, 1, int(rng.integers(1, 6))).to(kind) for kind in (torch.float32, torch.bfloat16)]
        each = sum(tensor[0].numel() * tensor.itemsize for tensor in pool)
        tier = HostTier(64 * each * 8, each, block=int(rng.integers(1, each * 8)))
        arena = HostArena(
            ("kv", pool), tier.num_blocks, tier.block, DeviceStreams(CPU), bounce=int(rng.integers(8, 99))
        )
        chunk, count = int(rng.integers(1, 7)), int(rng.integers(1, 4))
        copies = tuple(copy for _ in range(count) if (copy := tier.take(chunk)) is not None)
        slots = rng.permutation(SLOTS)[: chunk * count]
        arena.copy_out(CopyOut(copies, slots))
        kept = [tensor.clone() for tensor in pool]
        for tensor in pool:
            tensor.zero_()
        first = int(rng.integers(count))
        skip = int(rng.integers(chunk))
        left = int(rng.integers(1, chunk * (count - first) - skip + 1))
        places = rng.permutation(SLOTS)[:left]
        arena.copy_back(CopyBack(copies[first:], skip, places))
        begin = first * chunk + skip
        for tensor, before in zip(pool, kept, strict=True):
            assert torch.equal(tensor[places], before[slots[begin : begin + left]])
            tensor[places] = 0
            assert not tensor.any(), "no other slot was written"


class Told:
    """An event that tells which stream recorded it, or waited for it."""

    def __init__(self, log: list[Any]) -> None:
        self._log = log

    def record(self, stream: Any) -> None:
        self._log.append(("records", stream))

    def wait(self, stream: Any) -> None:
        self._log.append(("waits", stream))


def test_each_stream_waits_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies out for what the steps before have written, and for the copy back that emptied their blocks."""
    log: list[Any] = []
    streams, tier = DeviceStreams(CPU), HostTier(4096, 16, block=64)
    arena = HostArena(("kv", [torch.randn(SLOTS, 4)]), tier.num_blocks, tier.block, streams)
    upload = arena._staging.upload
    monkeypatch.setattr(streams, "new_event", lambda: Told(log))
    monkeypatch.setattr(arena._staging, "upload", lambda arrays: log.append("reads") or upload(arrays))
    copy, slots = tier.take(5), np.arange(5)
    assert copy is not None
    arena.copy_out(CopyOut((copy,), slots))
    out = [("records", streams.forward), ("waits", streams.transfer), "reads", ("records", streams.transfer)]
    assert log == out
    arena.copy_back(CopyBack((copy,), 0, slots + 9))
    assert log[len(out) :] == [("waits", streams.forward), "reads"]


def test_all_that_comes_back_has_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of two moves, which land by themselves."""
    log: list[Any] = []
    streams, tier = DeviceStreams(CPU), HostTier(4096, 16, block=64)
    arena = HostArena(("kv", [torch.randn(SLOTS, 4)]), tier.num_blocks, tier.block, streams)
    monkeypatch.setattr(streams, "new_event", lambda: Told(log))
    copies = [copy for copy in (tier.take(5), tier.take(5)) if copy is not None]
    for copy in copies:
        arena.copy_out(CopyOut((copy,), np.arange(5)))
    log.clear()
    arena.copy_back(CopyBack(tuple(copies), 0, np.arange(10)))
    assert log == [("waits", streams.forward)] * 2


def test_a_copy_without_room_for_its_bytes_is_no_copy() -> None:
    tier = HostTier(4096, 16, block=64)
    arena = HostArena(("kv", [torch.randn(SLOTS, 8)]), tier.num_blocks, tier.block, DeviceStreams(CPU))
    copy = tier.take(8)
    assert copy is not None, "sized for half of what a slot holds"
    with pytest.raises(InvariantViolation, match="host_copy_room"):
        arena.copy_out(CopyOut((copy,), np.arange(8)))


def test_the_tier_is_bounded() -> None:
    tier = HostTier(1000, 10, block=100)
    first = tier.take(55)
    assert first is not None and len(first.blocks) == 6 and tier.used_bytes == 600
    assert tier.take(41) is None and tier.used_bytes == 600
    second = tier.take(40)
    assert second is not None and second.number != first.number
    assert not set(first.blocks.tolist()) & set(second.blocks.tolist())
    tier.free(first)
    tier.check_integrity()
    assert tier.used_bytes == 400


def test_what_pools_have_beside_the_keys_comes_back_too(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for _ in range(20):
        keys, states = [torch.randn(SLOTS, 3)], [torch.randn(9, 2, 5), torch.randn(9, 7).to(torch.bfloat16)]
        windows = [torch.randint(0, 256, (SLOTS, 3), dtype=torch.uint8)]
        beside = {"states": 4 * 10 + 2 * 7, "windows": 3}
        tier = HostTier(1 << 14, 12, int(rng.integers(1, 90)), beside)
        pools = [("states", states), ("windows", windows)]
        arena = HostArena(("kv", keys), tier.num_blocks, tier.block, DeviceStreams(CPU), beside=pools)
        slots, state, window = rng.permutation(SLOTS)[:6], rng.permutation(9)[:2], rng.permutation(SLOTS)[:5]
        copy = tier.take(6, (2, 5))
        assert copy is not None and len(copy.blocks) == -(-(6 * 12 + 2 * beside["states"] + 5 * 3) // tier.block)
        arena.copy_out(CopyOut((copy,), slots, beside=(state, window)))
        every = [*keys, *states, *windows]
        kept = [tensor.clone() for tensor in every]
        for tensor in every:
            tensor.zero_()
        back = rng.permutation(SLOTS)[:6], rng.permutation(9)[:2], rng.permutation(SLOTS)[:5]
        arena.copy_back(CopyBack((copy,), 2, back[0][2:], beside=back[1:]))
        taken, places = (slots[2:], state, state, window), (back[0][2:], back[1], back[1], back[2])
        for tensor, before, source, place in zip(every, kept, taken, places, strict=True):
            assert torch.equal(tensor[place], before[source])
            tensor[place] = 0
            assert not tensor.any(), "no other slot was written"


@pytest.mark.parametrize("start", [0, 2, 5, 6])
def test_bytes_go_from_one_arena_to_another_through_their_views(start: int, seed: int) -> None:
    """Two engines have blocks of other sizes and in other places; the bytes are in the same order."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    arenas, pools, tiers = [], [], []
    for _ in range(2):
        pool = [torch.randn(SLOTS, 3), torch.randn(SLOTS, 2, 2)], [torch.randn(4, 5)]
        tier = HostTier(1 << 13, 28, int(rng.integers(1, 80)), {"states": 20})
        tier.take(int(rng.integers(1, 6)))
        streams = DeviceStreams(CPU)
        arenas.append(HostArena(("kv", pool[0]), tier.num_blocks, tier.block, streams, beside=[("states", pool[1])]))
        pools.append([*pool[0], *pool[1]])
        tiers.append(tier)
    slots = rng.permutation(SLOTS)[:6]
    out = tiers[0].take(6, (1,))
    assert out is not None
    arenas[0].copy_out(CopyOut((out,), slots, beside=(np.array([3]),)))
    sent = b"".join(arenas[0].views(out, start))
    assert len(sent) == (0 if start == 6 else (6 - start) * 28 + 20)
    if start == 6:
        return
    into = tiers[1].take(6 - start, (1,))
    assert into is not None
    arenas[1].copy_out(CopyOut((into,), slots[:0]))
    views = arenas[1].views(into)
    assert sum(map(len, views)) == len(sent)
    at = 0
    for view in views:
        view[:] = sent[at : at + len(view)]
        at += len(view)
    places = rng.permutation(SLOTS)[: 6 - start]
    arenas[1].copy_back(CopyBack((into,), 0, places, beside=(np.array([1]),)))
    for theirs, ours in zip(pools[0][:2], pools[1][:2], strict=True):
        assert torch.equal(ours[places], theirs[slots[start:]])
    assert torch.equal(pools[1][2][1], pools[0][2][3])


def test_a_copy_without_room_for_what_is_beside_is_no_copy() -> None:
    tier = HostTier(1 << 10, 8, 8, {"states": 8})
    pools = [("states", [torch.randn(3, 2)])]
    arena = HostArena(("kv", [torch.randn(SLOTS, 2)]), tier.num_blocks, tier.block, DeviceStreams(CPU), beside=pools)
    copy = tier.take(2)
    assert copy is not None
    short = HostCopy(copy.number, 2, copy.blocks, (1,))
    with pytest.raises(InvariantViolation, match="host_copy_room"):
        arena.copy_out(CopyOut((short,), np.arange(2), beside=(np.array([1]),)))


def test_the_last_slots_of_what_is_beside_go_where_fewer_are_asked_for(seed: int) -> None:
    """Of a copy without tokens; a window may begin within what it has."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    windows = [torch.randn(SLOTS, 3), torch.randn(SLOTS, 2, 2).to(torch.bfloat16)]
    tier = HostTier(1 << 12, 8, 50, {"windows": 20})
    arena = HostArena(
        ("kv", [torch.randn(SLOTS, 2)]), tier.num_blocks, tier.block, DeviceStreams(CPU), beside=[("windows", windows)]
    )
    copy, source = tier.take(0, (6,)), rng.permutation(SLOTS)[:6]
    assert copy is not None and len(copy.blocks) == -(-6 * 20 // 50)
    arena.copy_out(CopyOut((copy,), np.empty(0, np.int64), beside=(source,)))
    assert b"".join(arena.views(copy)) == b"".join(
        each[source].flatten().view(torch.uint8).numpy().tobytes() for each in windows
    )
    kept = [each.clone() for each in windows]
    for count in (6, 4, 1):
        for each in windows:
            each.zero_()
        place = rng.permutation(SLOTS)[:count]
        arena.copy_back(CopyBack((copy,), 0, np.empty(0, np.int64), beside=(place,)))
        for each, before in zip(windows, kept, strict=True):
            assert torch.equal(each[place], before[source[-count:]])
            assert np.count_nonzero(each.flatten(1).any(1)) == count, "no other slot was written"
