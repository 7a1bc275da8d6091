"""Rows that come back from host memory bring their keys by copies of their own; where it goes comes with the step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from core.memory.host_arena import HostArena
from core.memory.host_moves import CopyOut, Rejoined
from core.memory.host_tier import HostTier
from tests.unit.core.attention.dense import LAYER
from tests.unit.core.executor.test_captured_companions import ints
from tests.unit.core.executor.test_decode_graphs import World
from tests.unit.core.executor.test_one_upload import ROWS, compare, needs_triton, sampling

TOKENS = 4


def back_of(world: World, tier: HostTier, arena: HostArena, row: int, newest: int) -> Rejoined:
    """Copies what `row` holds to host memory, and forgets it on the device."""
    slots = world.pool.table[row, :TOKENS].long()
    copy = tier.take(TOKENS)
    assert copy is not None
    arena.copy_out(CopyOut((copy,), slots.numpy()))
    for held in (world.kv.k(LAYER), world.kv.v(LAYER)):
        held[slots] = 0
    return Rejoined((copy,), 0, slots.numpy().copy(), row, newest)


def rejoining(world: World) -> Any:
    """A step in which two of `ROWS` come back."""
    world.start(ROWS, [4, 5, 6], TOKENS)
    tier = HostTier(1 << 12, sum(tensor[0].nbytes for tensor in world.kv.tensors), block=64)
    arena = HostArena(("kv", world.kv.tensors), tier.num_blocks, tier.block, world.streams)
    world.runner._state = dataclasses.replace(world.runner.state, host=arena)
    backs = tuple(back_of(world, tier, arena, row, newest) for row, newest in ((ROWS[0], 4), (ROWS[2], 6)))
    options = sampling(ROWS, "sampled")
    return world.batch(ROWS, host_backs=backs, fresh_rows=ints([ROWS[0], ROWS[2]]), sampling=options)


@needs_triton
@pytest.mark.parametrize("replays", [False, True], ids=["launched", "replayed"])
def test_a_step_with_rows_from_host_memory_makes_one_upload(replays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    several, world = compare(monkeypatch, World, replays, rejoining)
    assert several == 6, "slots of two rows, and where both stand"
    found = [world.kv.k(LAYER)[world.pool.table[row, :TOKENS].long()].unique().tolist() for row in ROWS]
    assert found == [[float(row)] for row in ROWS]
    assert world.map.buffer("new_seq_lens_buf")[ROWS].tolist() == [TOKENS + 1] * 3
