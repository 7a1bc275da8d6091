"""What was copied to host memory comes back as it was, to other slots, whatever the sizes; no more and no less."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from core.device.streams import DeviceStreams
from core.memory.host_arena import HostArena
from core.memory.host_moves import CopyBack, CopyOut
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
            assert arena.copy_out(CopyOut(copy, slots)).query(), "the CPU copies at once"
            backs.append((copy, slots))
            if row == 1:
                # The blocks of the next are not neighbours.
                tier.free(copy)
                backs.clear()
                tier.take(1)
        for tensor in pool:
            tensor.zero_()
        for row, (copy, slots) in enumerate(backs, 1):
            skip = int(rng.integers(0, len(slots)))
            places = rng.permutation(SLOTS)[: len(slots) - skip]
            arena.copy_back(CopyBack(copy, row, 0, skip, places))
            for tensor, before in zip(pool, kept, strict=True):
                assert torch.equal(tensor[places], before[slots[skip:]])
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
    arena.copy_out(CopyOut(copy, slots))
    out = [("records", streams.forward), ("waits", streams.transfer), "reads", ("records", streams.transfer)]
    assert log == out
    arena.copy_back(CopyBack(copy, 1, 0, 0, slots + 9))
    assert log[len(out) :] == [("waits", streams.forward), "reads"]


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
