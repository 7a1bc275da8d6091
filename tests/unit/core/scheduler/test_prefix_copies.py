"""Prefixes in host memory: what a row that goes leaves there, what the next one gets back, and what is trusted."""

from __future__ import annotations

from typing import Any

import numpy as np

from core.memory.host_prefixes import HostPrefixes
from core.memory.host_tier import HostTier
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.request_memory import RequestMemory
from core.memory.rows import RowAllocator
from core.memory.seat import Seat
from core.prefix.registry import build_prefix_cache
from core.scheduler.outgoing import Outgoing
from core.scheduler.prefix_copies import PrefixCopies
from core.types.arrays import Ints
from tests.unit.core.memory.test_leases import PAGE, ids
from tests.unit.core.scheduler.test_rejoining import Copies

CHUNK, PAGES = 2 * PAGE, 12


class World:
    """Rows that come and go; their tokens are computed as soon as they are seated."""

    def __init__(self, chunks: int = 8, reach: int | None = None) -> None:
        allocator = PagedKVAllocator(PAGES, PAGE)
        self.memory = RequestMemory(RowAllocator(3), allocator, build_prefix_cache("radix", PAGE), 64, (), reach)
        self.tier, self.moves = HostTier(chunks * CHUNK, 1, CHUNK), Copies()
        self.prefixes = HostPrefixes(self.tier, CHUNK)
        self.outgoing = Outgoing(self.tier, self.memory, self.moves)
        self.copies = PrefixCopies(self.prefixes, self.memory, self.outgoing)

    def seat(self, prompt: Ints, salt: str = "") -> Seat:
        seat = self.memory.admit(prompt, salt, 0)
        assert seat is not None
        return self.copies.fetch(seat, prompt, salt, int)

    def leave(self, seat: Seat, written: Ints, *, sound: bool = True, salt: str = "") -> None:
        assert not self.copies.gone(seat.row)
        if sound:
            self.memory.vouch(seat.row, len(written))
        self.copies.keep(seat.row, written, salt, len(written))
        self.memory.release(seat.row, seat.generation, written)

    def serve(self, prompt: Ints) -> None:
        seat = self.seat(prompt)
        self.copies.take_backs()
        self.leave(seat, prompt)
        self.land()

    def land(self) -> None:
        self.moves.told += [out.number for out in self.moves.begun]
        self.moves.begun.clear()
        self.outgoing.land()

    def check(self) -> None:
        self.memory.check_integrity()
        self.tier.check_integrity()
        self.prefixes.check_integrity()


def test_what_a_row_leaves_comes_back_when_the_device_has_given_it_up() -> None:
    world, prompt = World(), ids(3 * CHUNK - 1)
    seat = world.seat(prompt)
    assert seat.cached_tokens == 0 and world.copies.take_backs() == ()
    world.leave(seat, prompt)
    (out,) = world.moves.begun
    pages = out.slots[::PAGE] // PAGE
    assert len(out.copies) == 2 and len(out.slots) == 2 * CHUNK and world.copies.kept == 2 * CHUNK
    assert len(world.memory.leases) == 1
    assert world.memory.flush() == len(pages) + 1 and world.memory.allocator.available == PAGES - len(pages)
    world.land()
    assert len(world.memory.leases) == 0 and world.memory.allocator.available == PAGES
    seat = world.seat(prompt)
    assert seat.cached_tokens == 2 * CHUNK and world.copies.fetched == 2 * CHUNK
    (back,) = world.copies.take_backs()
    assert back.copies == out.copies and back.skip == 0
    own = world.memory.pages_of(seat.row, 2 * CHUNK)
    assert back.slots.tolist() == [page * PAGE + place for page in own.tolist() for place in range(PAGE)]
    assert world.copies.take_backs() == ()
    world.leave(seat, prompt)
    assert world.moves.begun == [], "all of it is there"
    world.check()


def test_only_what_the_device_lacks_comes_back() -> None:
    world, prompt = World(), ids(2 * CHUNK + 1)
    world.serve(prompt)
    world.memory.flush()
    world.serve(prompt[: PAGE + 1])
    seat = world.seat(prompt)
    assert seat.cached_tokens == 2 * CHUNK
    (back,) = world.copies.take_backs()
    assert back.skip == PAGE and len(back.slots) == 2 * CHUNK - PAGE and len(back.copies) == 2
    shared = world.memory.pages_found(np.array([seat.row])).tolist()
    assert shared == [1], "the row owns what was brought"
    world.memory.release(seat.row, seat.generation, prompt)
    assert world.seat(prompt).cached_tokens == 2 * CHUNK
    assert world.copies.take_backs() == () and world.copies.fetched == 2 * CHUNK - PAGE, "the device has all of it now"
    world.check()


def test_whole_copies_that_the_device_has_are_left_out() -> None:
    world, prompt = World(), ids(3 * CHUNK + 1)
    world.serve(prompt)
    world.memory.flush()
    world.serve(prompt[: CHUNK + PAGE + 1])
    world.copies.take_backs()
    world.memory.flush()
    first = world.seat(prompt[: CHUNK + 1])
    world.copies.take_backs()
    world.leave(first, prompt[:CHUNK])
    seat = world.seat(prompt)
    (back,) = world.copies.take_backs()
    assert seat.cached_tokens == 3 * CHUNK and back.skip == 0
    assert [copy.number for copy in back.copies] == [
        copy.number for copy in world.prefixes.find(prompt, len(prompt), "").copies[1:]
    ]


def test_one_token_is_left_to_compute_and_images_stay_whole() -> None:
    world, prompt = World(), ids(2 * CHUNK)
    world.serve(prompt)
    world.memory.flush()
    assert world.seat(prompt).cached_tokens == CHUNK, "its last token is to be computed: that chunk is not whole"
    (back,) = world.copies.take_backs()
    assert len(back.slots) == CHUNK
    longer = ids(2 * CHUNK + 1)
    seat = world.memory.admit(longer, "", 0)
    assert seat is not None
    cut = world.copies.fetch(seat, longer, "", lambda tokens: tokens if tokens < 3 else 3)
    assert cut.cached_tokens == 0, "fewer than a chunk, and more than nothing"


def test_a_row_that_holds_more_than_keys_takes_all_from_one_memory() -> None:
    """From that which has more; but for a limit by which room was made nothing is changed."""
    world, prompt = World(), ids(3 * CHUNK)
    others: Any = [None]
    copies = PrefixCopies(world.prefixes, world.memory, world.outgoing, others)
    assert copies.at_most(prompt, "", int, None) is None, "nothing is there"
    world.prefixes.extend(prompt[: 2 * CHUNK], "")
    assert world.prefixes.end(prompt[: 2 * CHUNK], "", ()) is not None
    assert copies.at_most(prompt, "", int, None) == 0 and copies.at_most(prompt, "", int, PAGE) == PAGE
    world.serve(prompt)
    assert copies.at_most(prompt, "", int, None) is None, "the device has as much"
