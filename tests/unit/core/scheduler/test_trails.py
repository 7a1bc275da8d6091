"""What is copied of windows while a prompt is computed: of which chunks, when, for how long, and where it goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from core.memory.host_moves import CopyOut
from core.memory.host_prefixes import HostMemory, HostPrefixes
from core.memory.host_tier import HostTier
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.request_memory import RequestMemory
from core.memory.rows import RowAllocator
from core.memory.seat import Seat
from core.memory.window.window_bounds import WindowBounds
from core.memory.window.window_pages import NAME, WindowPages
from core.prefix.base import PrefixCache
from core.prefix.registry import build_prefix_cache
from core.scheduler import trails as trails_module
from core.scheduler.host_cache import HostCache
from core.scheduler.outgoing import Outgoing
from core.scheduler.trails import Trails
from core.types.arrays import Ints
from tests.unit.core.memory.test_leases import PAGE, ids
from tests.unit.core.scheduler.test_rejoining import Copies

CHUNK, PAGES, STEP = 2 * PAGE, 40, 3 * PAGE
"""A step of a prompt ends within a chunk every other time."""


class World:
    """Rows whose prompts are computed step by step, over a pool with so many window pages."""

    def __init__(self, window: int = CHUNK + 1, blocks: int = 1000, windows: int = PAGES) -> None:
        self.pool = WindowPages(windows, PAGES, 4, WindowBounds(window, PAGE, STEP))
        cache = build_prefix_cache("radix", PAGE)
        self.memory = RequestMemory(RowAllocator(3), PagedKVAllocator(PAGES, PAGE), cache, 64, [self.pool])
        # A block holds a token, or a slot of a window.
        self.tier, self.moves = HostTier(blocks, 1, 1, {NAME: 1}), Copies()
        self.prefixes = HostPrefixes(self.tier, CHUNK)
        self.outgoing = Outgoing(self.tier, self.memory, self.moves)
        self.trails = Trails(self.pool, self.tier, self.prefixes, self.memory, self.outgoing)
        self.told: list[int] = []

    def seat(self, prompt: Ints) -> Seat:
        seat = self.memory.admit(prompt, "", 0)
        assert seat is not None
        self.trails.seated(seat.row, prompt, "", seat.cached_tokens)
        return seat

    def step(self, seat: Seat, start: int, end: int, *, decodes: int = 0) -> None:
        """A step of tokens [start, end) of the row, with so many rows beside it that decode."""
        rows, starts, counts = (np.array([n], np.int64) for n in (seat.row, start, end - start))
        self.memory.plan_companions(rows, starts, counts)
        rows, ends = np.append(rows, np.full(decodes, seat.row)), np.append(starts + counts, np.full(decodes, 99))
        batch: Any = SimpleNamespace(rows=rows, seq_lens=ends, num_extend=1)
        self.trails.submitted(batch)

    def compute(self, prompt: Ints) -> Seat:
        seat = self.seat(prompt)
        for start in range(seat.cached_tokens, len(prompt), STEP):
            self.step(seat, start, min(start + STEP, len(prompt)))
        return seat

    def publish(self, seat: Seat, prompt: Ints, tokens: int | None = None) -> None:
        """The chunks of the prompt are held, and its first `tokens` tokens count; without that all of its trails do."""
        self.prefixes.extend(prompt, "")
        reached = self.trails.reached(seat.row) if tokens is None else tokens
        self.trails.publish(seat.row, reached, lambda held, copy: self.told.append(len(held)))

    def leave(self, seat: Seat) -> None:
        self.trails.gone(seat.row)
        self.memory.release(seat.row, seat.generation, ids(0))

    def serve(self, prompt: Ints) -> None:
        seat = self.compute(prompt)
        self.publish(seat, prompt)
        self.leave(seat)
        self.check()

    def found(self, prompt: Ints) -> int:
        held = self.trails.find(prompt, int, "")
        return 0 if held is None else held.tokens

    def lacking(self, prompt: Ints) -> list[int]:
        return self.prefixes.without_trail(prompt, "")[1]

    def check(self) -> None:
        self.memory.check_integrity()
        self.tier.check_integrity()
        self.prefixes.check_integrity()


def slots_of(world: World, seat: Seat, first: int, last: int) -> list[int]:
    """Where the window pool has tokens [first, last) of the row, whole pages, now."""
    pages = world.memory.pages_of(seat.row, last)[first // PAGE :]
    return [world.pool.window_of(int(page)) * PAGE + place for page in pages for place in range(PAGE)]


def test_each_chunk_is_copied_behind_the_step_that_ends_it() -> None:
    world, prompt = World(), ids(4 * CHUNK)
    seat = world.seat(prompt)
    for start, ended in ((0, [0]), (STEP, [1, 2]), (2 * STEP, [3])):
        before = len(world.moves.begun)
        world.step(seat, start, min(start + STEP, len(prompt)), decodes=1)
        begun: list[CopyOut] = world.moves.begun[before:]
        assert [len(out.slots) for out in begun] == [0] * len(ended)
        for out, chunk in zip(begun, ended, strict=True):
            assert out.copies[0].tokens == 0 and out.copies[0].beside == (CHUNK,)
            assert out.beside[0].tolist() == slots_of(world, seat, chunk * CHUNK, (chunk + 1) * CHUNK)
    assert world.trails.reached(seat.row) == 4 * CHUNK
    assert world.found(ids(4 * CHUNK + 1)) == 0, "nothing vouches for it yet"
    world.publish(seat, prompt)
    assert world.told == [CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK]
    assert world.found(ids(4 * CHUNK + 1)) == 4 * CHUNK and world.found(prompt) == 3 * CHUNK, "a token is computed"
    assert world.trails.reached(seat.row) == 0
    world.leave(seat)
    world.check()


@pytest.mark.parametrize(
    ("window", "pages", "reach"), [(2, 1, 1), (PAGE + 1, 1, 1), (CHUNK + 1, 2, 1), (CHUNK + 2, 2, 2)]
)
def test_of_a_chunk_is_copied_what_a_window_can_reach(window: int, pages: int, reach: int) -> None:
    """And a prompt is gone on from behind as many chunks as the window reaches over."""
    world, prompt = World(window), ids(3 * CHUNK + 1)
    assert world.trails.beside == (pages * PAGE,) and world.trails.reach == reach
    seat = world.compute(prompt)
    (*_, last) = world.moves.begun
    assert last.beside[0].tolist() == slots_of(world, seat, 3 * CHUNK - pages * PAGE, 3 * CHUNK)
    world.publish(seat, prompt)
    held = world.trails.find(prompt, int, "")
    assert held is not None and held.tokens == 3 * CHUNK and len(held.trails) == reach and len(held.copies) == 3
    slots = np.arange(len(world.pool._needed(np.arange(3 * CHUNK // PAGE))) * PAGE)
    backs = world.trails.backs(held, slots)
    assert [back.copies[0] for back in backs] == list(reversed(held.trails))
    assert np.concatenate([back.beside[0] for back in reversed(backs)]).tolist() == slots.tolist()
    assert all(len(back.slots) == 0 and len(back.beside[0]) for back in backs)


def test_a_window_of_its_own_token_alone_needs_nothing_beside_keys() -> None:
    """So there is nothing to copy of it."""
    for window, any_trails in ((1, False), (2, True)):
        pool = WindowPages(PAGES, PAGES, 4, WindowBounds(window, PAGE, STEP))
        world = World()
        host = HostMemory(world.tier, world.prefixes, rejoins=False)
        made = HostCache(host, RequestMemory(RowAllocator(3), *_pages(), 64, [pool]), cast(Any, world.moves))
        assert made.prefixes is not None and (made.prefixes.trails is not None) is any_trails


def _pages() -> tuple[PagedKVAllocator, PrefixCache]:
    return PagedKVAllocator(PAGES, PAGE), build_prefix_cache("radix", PAGE)


def test_a_chunk_without_a_copy_ends_what_can_be_gone_on_from() -> None:
    world, prompt = World(CHUNK + 2), ids(4 * CHUNK + 1)
    seat = world.compute(prompt)
    held = world.trails._prompts[seat.row].copies
    world.trails._release([held.pop(1)])
    world.publish(seat, prompt)
    assert world.lacking(prompt) == [1] and world.found(prompt) == 4 * CHUNK
    assert world.found(prompt[: 3 * CHUNK + 1]) == CHUNK, "the third needs the second, and the first none before it"
    assert world.trails.find(prompt, lambda tokens: min(tokens, 4 * CHUNK - 1), "").tokens == CHUNK  # type: ignore[union-attr]


def test_due_are_the_last_chunks_and_those_before_the_place_where_prompts_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trails_module, "LAST", CHUNK)
    world = World(CHUNK + 1)
    first = ids(6 * CHUNK + 1)
    world.serve(first)
    assert world.lacking(first) == [0, 1, 2, 3], "the last chunk, and the one that its window reaches"
    other = np.concatenate([first[: 2 * CHUNK], ids(4 * CHUNK + 1, 500)])
    assert world.found(other) == 0
    world.memory.flush()
    world.serve(other)
    assert world.lacking(other) == [0, 2, 3] and world.found(np.append(first[: 2 * CHUNK], [7])) == 2 * CHUNK


def test_where_prompts_differ_as_many_chunks_are_due_as_a_window_reaches_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trails_module, "LAST", 0)
    world, first = World(CHUNK + 2), ids(7 * CHUNK)
    world.serve(first)
    world.memory.flush()
    world.serve(np.concatenate([first[: 4 * CHUNK], ids(3 * CHUNK, 500)]))
    assert world.found(np.append(first[: 4 * CHUNK], [7])) == 4 * CHUNK


def test_a_namespace_has_its_own() -> None:
    world, prompt = World(), ids(2 * CHUNK)
    world.prefixes.extend(prompt, "a")
    copy = world.prefixes.reserve_beside(0, world.trails.beside)
    assert copy is not None and world.prefixes.publish_trail(prompt[:CHUNK], "a", copy)
    assert [world.prefixes.without_trail(prompt, salt) for salt in "ab"] == [(2, [1]), (0, [0, 1])]
    assert world.found(prompt) == 0


def test_what_was_given_up_is_told_with_the_next_copy() -> None:
    world, prompt = World(), ids(4 * CHUNK + 1)
    world.leave(world.compute(prompt))
    seat = world.seat(prompt)
    world.moves.begun.clear()
    world.step(seat, 0, STEP)
    assert len(world.moves.begun[0].dropped) == 4


def test_what_a_row_has_already_is_not_copied() -> None:
    world, prompt = World(), ids(3 * CHUNK + 1)
    seat = world.memory.admit(prompt, "", 0)
    assert seat is not None
    world.trails.seated(seat.row, prompt, "", CHUNK + PAGE)
    assert list(world.trails._prompts[seat.row].due) == [1, 2]
    world.leave(seat)
    world.serve(prompt)
    world.memory.flush()
    world.moves.begun.clear()
    world.leave(world.compute(prompt))
    assert world.moves.begun == [], "all of it is there"


def test_a_row_that_goes_before_its_first_token_leaves_nothing() -> None:
    world, prompt = World(), ids(3 * CHUNK + 1)
    world.leave(world.compute(prompt))
    assert world.tier.used_bytes == 0 and len(world.tier.take_given_up()) == 3 and world.trails._held == 0
    seat = world.compute(prompt)
    world.publish(seat, prompt, tokens=2 * CHUNK)
    assert world.told == [CHUNK, 2 * CHUNK] and world.lacking(prompt) == [2], "finite logits vouch for no more"
    assert len(world.tier.take_given_up()) == 1 and world.trails._held == 0
    world.publish(seat, prompt)
    assert world.told == [CHUNK, 2 * CHUNK], "once"


def test_of_a_small_host_memory_prompts_hold_a_part_and_of_that_the_last_chunks() -> None:
    world, prompt = World(blocks=trails_module.SHARE * 2 * CHUNK), ids(4 * CHUNK + 1)
    first = world.seat(ids(CHUNK + 1, 300))
    world.step(first, 0, CHUNK)
    seat = world.compute(prompt)
    assert world.tier.used_bytes == 2 * CHUNK and list(world.trails._prompts[seat.row].copies) == [3]
    roomier = World(blocks=trails_module.SHARE * 2 * CHUNK)
    seat_there = roomier.compute(prompt)
    assert list(roomier.trails._prompts[seat_there.row].copies) == [2, 3], "the oldest gives way"
    world.leave(first)
    other = world.compute(ids(CHUNK + 1, 600))
    assert world.trails.reached(other.row) == CHUNK and world.trails.reached(seat.row) == 4 * CHUNK
    third = world.compute(ids(CHUNK + 1, 900))
    assert world.trails.reached(third.row) == 0, "it has none that could give way"
    world.check()


def test_a_host_memory_with_no_room_keeps_no_windows() -> None:
    world, prompt = World(blocks=CHUNK), ids(2 * CHUNK + 1)
    world.leave(world.compute(prompt))
    assert world.moves.begun == [] and world.tier.used_bytes == 0
    world = World(blocks=8 * CHUNK)
    seat = world.seat(prompt)
    while world.tier.take(1) is not None:
        pass
    world.step(seat, 0, CHUNK)
    assert world.moves.begun == [] and world.trails.reached(seat.row) == 0


def test_pages_that_have_gone_to_another_row_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    world, prompt = World(), ids(2 * CHUNK + 1)
    seat = world.seat(prompt)
    world.step(seat, 0, STEP)
    monkeypatch.setattr(world.pool, "slots_of", lambda pages: None)
    world.step(seat, STEP, len(prompt))
    assert world.trails.reached(seat.row) == CHUNK and list(world.trails._prompts[seat.row].due) == []


def test_a_copy_is_written_to_files_when_it_is_there() -> None:
    world, prompt, order = World(), ids(2 * CHUNK + 1), list[str]()
    world.compute(prompt)
    first, second = (out.copies[0] for out in world.moves.begun)
    world.outgoing.after(first, lambda: order.append("first"))
    world.moves.told.append(first.number)
    assert order == [] and world.outgoing.land() and order == ["first"]
    world.moves.told.append(second.number)
    world.outgoing.land()
    world.outgoing.after(second, lambda: order.append("second"))
    assert order == ["first", "second"]


def test_a_copy_goes_with_its_chunk() -> None:
    world, prompt = World(), ids(2 * CHUNK + 1)
    world.serve(prompt)
    room = world.tier.take(world.tier.num_blocks - world.tier.used_bytes)
    assert room is not None and world.tier.take(2 * CHUNK) is not None
    assert world.prefixes.tokens == CHUNK, "a chunk with what belongs to it is enough"
    while world.tier.take(1) is not None:
        world.check()
    assert world.prefixes.tokens == 0 and world.found(prompt) == 0
    assert len(world.tier.take_given_up()) == 4
    world = World()
    world.serve(prompt)
    assert world.prefixes.flush() == 2 * CHUNK and world.tier.used_bytes == 0


def test_a_copy_of_a_chunk_that_is_not_held_is_given_up() -> None:
    world, prompt = World(), ids(3 * CHUNK)
    world.prefixes.extend(prompt[: 2 * CHUNK], "")

    def published(end: int) -> bool:
        copy = world.prefixes.reserve_beside(0, world.trails.beside)
        assert copy is not None
        kept = world.prefixes.publish_trail(prompt[:end], "", copy)
        assert world.tier.take_given_up() == (() if kept else (copy.number,))
        return kept

    ends = 3 * CHUNK, 2 * CHUNK, 3 * CHUNK, 2 * CHUNK, CHUNK
    assert [published(end) for end in ends] == [False, True, False, False, True]
    assert world.lacking(prompt) == [2] and not world.prefixes.publish_trail(
        ids(CHUNK, 500), "", world.tier.take(0, world.trails.beside) or pytest.fail("there is room")
    )
    world.check()
