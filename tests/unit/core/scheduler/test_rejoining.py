"""Retracted requests wait with a copy in host memory; whatever ends them, in whatever order, all comes back once."""

from __future__ import annotations

import pytest

from core.memory.host_moves import CopyOut
from core.memory.host_tier import HostTier
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.request_memory import RequestMemory
from core.memory.rows import RowAllocator
from core.memory.seat import Seat
from core.prefix.registry import build_prefix_cache
from core.scheduler.outgoing import Outgoing
from core.scheduler.rejoining import Rejoining
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from tests.unit.core.memory.test_leases import PAGE, ids

BLOCK = 32
PROMPT, OUT = 9, 2
TOKENS = PROMPT + OUT - 1


class Copies:
    """Copies land when a test says so."""

    def __init__(self) -> None:
        self.begun: list[CopyOut] = []
        self.told: list[int] = []

    def copy_out(self, out: CopyOut) -> None:
        self.begun.append(out)

    def landed(self) -> list[int]:
        told, self.told = self.told, []
        return told


class World:
    """One request at a time that runs behind `TOKENS` tokens."""

    def __init__(self, cache: str = "none", nbytes: int = 640) -> None:
        allocator = PagedKVAllocator(12, PAGE)
        self.memory = RequestMemory(RowAllocator(3), allocator, build_prefix_cache(cache, PAGE), 64)
        self.tier, self.copies = HostTier(nbytes, 8, BLOCK), Copies()
        self.outgoing = Outgoing(self.tier, self.memory, self.copies)
        self.rejoining = Rejoining(self.tier, self.outgoing)
        self.req = Req("r", 0, ids(PROMPT), SamplingParams(), 0, 8)
        self.req.outputs = ids(OUT, 50).astype("int32")

    def seat(self) -> Seat:
        seat = self.memory.admit(self.req.known_ids(), "", 0)
        assert seat is not None
        self.req.row, self.req.generation = seat.row, seat.generation
        return seat

    def unseat(self) -> None:
        self.memory.release(self.req.row, self.req.generation, ids(0))
        self.req.row = 0

    def retract(self) -> bool:
        left = self.rejoining.leave(self.req, TOKENS)
        self.unseat()
        return left

    def land(self) -> None:
        self.copies.told += [out.number for out in self.copies.begun]
        self.copies.begun.clear()
        assert self.outgoing.land()

    def nothing_is_left(self) -> None:
        self.memory.check_integrity()
        self.tier.check_integrity()
        assert self.tier.used_bytes == 0 and len(self.memory.leases) == 0
        assert self.memory.rows.used == 0 and self.memory.allocator.available == 12


@pytest.mark.parametrize("landed_first", [True, False])
def test_it_goes_on_from_its_copy(landed_first: bool) -> None:
    world = World()
    world.seat()
    assert world.retract() and world.req in world.rejoining
    (out,) = world.copies.begun
    assert len(out.slots) == TOKENS and world.tier.used_bytes == 96
    assert world.memory.allocator.available == 9, "its pages are leased"
    if landed_first:
        world.land()
        assert world.memory.allocator.available == 12
    seat = world.seat()
    assert world.rejoining.rejoin(world.req, seat) and world.req not in world.rejoining
    assert world.tier.used_bytes == 96, "no batch carries it yet: its blocks must not be taken"
    (back,) = world.rejoining.take_backs()
    assert (back.row, back.newest, back.skip, back.copies[0].tokens) == (seat.row, 51, 0, TOKENS)
    assert not set(back.slots.tolist()) & set(out.slots.tolist()) or landed_first
    assert world.rejoining.take_backs() == () and world.rejoining.rejoined == 1
    world.unseat()
    if not landed_first:
        world.land()
    world.nothing_is_left()


@pytest.mark.parametrize("landed_first", [True, False])
def test_an_end_while_it_waits_gives_all_back(landed_first: bool) -> None:
    world = World()
    world.seat()
    world.retract()
    number = world.copies.begun[0].number
    if landed_first:
        world.land()
    world.rejoining.gone(world.req, 0)
    world.rejoining.gone(world.req, 0)
    assert world.tier.used_bytes == 0
    if not landed_first:
        assert world.memory.allocator.available == 9, "the copy still reads them"
        world.land()
    world.nothing_is_left()
    world.seat()
    world.retract()
    assert world.copies.begun[0].dropped == (number,), "the device forgets it with the next copy"


@pytest.mark.parametrize("landed_first", [True, False])
def test_an_end_before_a_batch_carries_it_back_gives_all_back(landed_first: bool) -> None:
    world = World()
    world.seat()
    world.retract()
    if landed_first:
        world.land()
    world.rejoining.rejoin(world.req, world.seat())
    world.rejoining.gone(world.req, world.req.row)
    world.unseat()
    assert world.rejoining.take_backs() == ()
    if not landed_first:
        world.land()
    world.nothing_is_left()


def test_a_second_retraction_before_a_batch_keeps_the_copy() -> None:
    world = World()
    world.seat()
    world.retract()
    world.land()
    world.rejoining.rejoin(world.req, world.seat())
    assert world.retract() and world.copies.begun == [], "its row was never filled: there is nothing to copy"
    assert world.req in world.rejoining and world.rejoining.take_backs() == ()
    world.rejoining.rejoin(world.req, world.seat())
    assert len(world.rejoining.take_backs()) == 1
    world.unseat()
    world.nothing_is_left()


def test_without_room_it_is_computed_again() -> None:
    world = World(nbytes=64)
    world.seat()
    assert not world.retract() and world.req not in world.rejoining
    assert world.rejoining.dropped == 1 and world.copies.begun == []
    world.nothing_is_left()


def test_what_the_cache_still_has_is_not_copied_back() -> None:
    world = World("radix")
    seat = world.seat()
    world.memory.offer(seat.row, ids(PROMPT))
    world.retract()
    seat = world.seat()
    assert seat.cached_tokens == 8
    world.rejoining.rejoin(world.req, seat)
    (back,) = world.rejoining.take_backs()
    assert back.skip == 8 and len(back.slots) == TOKENS - 8
