"""Copies of prefixes: found by all tokens before them, given up oldest first, never while a row waits for them."""

from __future__ import annotations

import numpy as np
import pytest

from core.memory.host_prefixes import HeldPrefix, HostPrefixes
from core.memory.host_tier import HostTier
from core.types.arrays import Ints

CHUNK, BLOCK = 4, 24
EACH = 2
"""Blocks of a chunk of four tokens of 8 bytes."""


def ids(*chunks: int, rest: int = 0) -> Ints:
    """A chunk of tokens for each number, and some tokens more."""
    return np.array([number * 10 + place for number in chunks for place in range(CHUNK)] + [7] * rest, np.int64)


class World:
    """A tier with room for so many chunks."""

    def __init__(self, chunks: int) -> None:
        self.tier = HostTier(chunks * EACH * BLOCK, 8, BLOCK)
        self.prefixes = HostPrefixes(self.tier, CHUNK)

    def found(self, prompt: Ints, salt: str = "") -> HeldPrefix:
        self.check()
        return self.prefixes.find(prompt, len(prompt), salt)

    def check(self) -> None:
        self.tier.check_integrity()
        self.prefixes.check_integrity()
        assert self.tier.used_bytes == self.prefixes.tokens // CHUNK * EACH * BLOCK


def test_what_was_copied_is_found_in_whole_chunks() -> None:
    world = World(8)
    start, first = world.prefixes.extend(ids(1, 2, rest=3), "")
    assert start == 0 and len(first) == 2 and [copy.tokens for copy in first] == [CHUNK, CHUNK]
    start, more = world.prefixes.extend(ids(1, 2, 3), "")
    assert start == 2 * CHUNK and len(more) == 1
    assert world.prefixes.extend(ids(1, 2, 3, rest=1), "") == (3 * CHUNK, ())
    held = world.found(ids(1, 2, 3, 4))
    assert held.tokens == 3 * CHUNK and held.copies == (*first, *more)
    assert world.found(ids(1, 3)).copies == first[:1]
    assert world.prefixes.find(ids(1, 2, 3), 11, "").copies == first
    assert world.prefixes.peek(ids(1, 2, 3), 11, "") == 2 * CHUNK
    assert world.found(ids(2, 3)).tokens == 0 and world.found(ids(1), "x").tokens == 0


def test_the_oldest_gives_way_and_the_device_is_told() -> None:
    world = World(4)
    _, first = world.prefixes.extend(ids(1, 2), "")
    _, other = world.prefixes.extend(ids(3, 4), "")
    world.found(ids(1, 2))
    assert world.tier.take_given_up() == () and world.prefixes.evicted == 0
    _, more = world.prefixes.extend(ids(5), "")
    assert len(more) == 1 and world.prefixes.evicted == CHUNK
    assert world.tier.take_given_up() == (other[1].number,) and world.tier.take_given_up() == ()
    assert world.found(ids(3, 4)).copies == other[:1] and world.found(ids(1, 2)).copies == first


def test_the_beginning_of_a_prompt_does_not_give_way_to_its_end() -> None:
    world = World(3)
    world.prefixes.extend(ids(1, 2), "")
    start, more = world.prefixes.extend(ids(1, 2, 3, 4, 5), "")
    assert (start, len(more)) == (2 * CHUNK, 1)
    assert world.found(ids(1, 2, 3, 4, 5)).tokens == 3 * CHUNK
    assert world.prefixes.extend(ids(1, 2, 3, 4, 5), "") == (3 * CHUNK, ())


def test_what_a_row_waits_for_stays() -> None:
    world = World(2)
    world.prefixes.extend(ids(1, 2), "")
    held = world.found(ids(1, 2))
    world.prefixes.lock(held)
    assert world.prefixes.extend(ids(3), "") == (0, ()) and world.prefixes.flush() == 0
    world.prefixes.unlock(held)
    assert len(world.prefixes.extend(ids(3), "")[1]) == 1


def test_a_retracted_request_takes_the_room_of_prefixes_and_not_the_other_way() -> None:
    world = World(2)
    world.prefixes.extend(ids(1, 2), "")
    copy = world.tier.take(6)
    assert copy is not None and len(copy.blocks) == EACH, "six tokens of eight bytes are two blocks"
    assert world.prefixes.tokens == CHUNK
    assert world.tier.take(3 * CHUNK) is None and world.prefixes.tokens == CHUNK, (
        "for what does not fit nothing is given up"
    )
    assert world.prefixes.extend(ids(5, 6, 7), "")[0] == 0 and world.prefixes.tokens == CHUNK
    assert world.tier.take(CHUNK) is not None and world.prefixes.tokens == 0


@pytest.mark.parametrize("tokens", [8, 9])
def test_as_many_give_way_as_are_lacking(tokens: int) -> None:
    """Of two chunks of two blocks, for three blocks: both where there is no other room, one where one chunk is free."""
    full, roomy = World(2), World(3)
    for world in (full, roomy):
        world.prefixes.extend(ids(1, 2), "")
        assert world.tier.take(tokens) is not None
    assert (full.prefixes.tokens, roomy.prefixes.tokens) == (0, CHUNK)


def test_a_flush_is_of_a_tenant_or_of_all() -> None:
    world = World(8)
    for salt in ("a\0x", "a\0y", "b\0x"):
        world.prefixes.extend(ids(1, 2), salt)
    assert world.prefixes.flush("a") == 4 * CHUNK and world.found(ids(1, 2), "b\0x").tokens == 2 * CHUNK
    assert world.prefixes.flush() == 2 * CHUNK and world.tier.used_bytes == 0
    assert len(world.tier.take_given_up()) == 6


def test_what_is_reserved_is_found_once_it_is_filled() -> None:
    world = World(5)
    world.prefixes.extend(ids(1), "")
    copies = world.prefixes.reserve(ids(1, 2, 3), "", 2)
    assert len(copies) == 2 and world.prefixes.peek(ids(1, 2, 3), 12, "") == CHUNK
    assert world.prefixes.publish(ids(1, 2, 3), "", CHUNK, copies[:1]) == 1
    world.prefixes.release(copies[1:])
    assert world.found(ids(1, 2, 3)).tokens == 2 * CHUNK and world.found(ids(1, 2, 3)).copies[1] is copies[0]
    assert len(world.prefixes.reserve(ids(1, 2, 3), "", 9)) == 3, "as many as there is room for beside its beginning"


def test_what_came_by_another_way_meanwhile_is_given_up() -> None:
    world = World(8)
    copies = world.prefixes.reserve(ids(1, 2, 3), "", 3)
    _, others = world.prefixes.extend(ids(1, 2), "")
    assert world.prefixes.publish(ids(1, 2, 3), "", 0, copies) == 1
    assert world.found(ids(1, 2, 3)).copies == (*others, copies[2])


def test_an_ending_that_was_reserved_is_found_once_it_is_filled() -> None:
    tier = HostTier(8 * EACH * BLOCK, 8, BLOCK, {"states": 16})
    prefixes, prompt = HostPrefixes(tier, CHUNK), ids(1, rest=2)
    copy = prefixes.reserve_beside(2, (1,))
    assert copy is not None and (copy.tokens, copy.beside) == (2, (1,))
    assert prefixes.publish_ending(prompt, "", copy) == 0, "its chunk is not here"
    assert tier.used_bytes == 0
    prefixes.extend(prompt, "")
    first, second = prefixes.reserve_beside(2, (1,)), prefixes.reserve_beside(2, (1,))
    assert first is not None and second is not None
    assert prefixes.find_ending(np.append(prompt, 1), int, "") is None
    assert prefixes.publish_ending(prompt, "", first) == 2 and prefixes.publish_ending(prompt, "", second) == 0
    found = prefixes.find_ending(np.append(prompt, 1), int, "")
    assert found is not None and found.ending is not None and found.ending.copy is first and found.tokens == len(prompt)
    held = prefixes.hold_ending(prompt, "")
    assert held is not None and held.ending is found.ending and prefixes.hold_ending(ids(2, rest=1), "") is None
    prefixes.check_integrity()
    tier.check_integrity()


def test_what_has_no_beginning_any_more_is_given_up() -> None:
    world = World(8)
    world.prefixes.extend(ids(1), "")
    copies = world.prefixes.reserve(ids(1, 2), "", 1)
    world.prefixes.flush()
    assert world.prefixes.publish(ids(1, 2), "", CHUNK, copies) == 0 and world.found(ids(1, 2)).tokens == 0


@pytest.mark.parametrize("chunks", [3, 7])
def test_any_order_of_calls_keeps_every_block_once(chunks: int, seed: int) -> None:
    print(f"seed {seed}")
    rng, world = np.random.default_rng(seed), World(chunks)
    locked: list[HeldPrefix] = []
    for _ in range(300):
        prompt, salt = ids(*rng.integers(1, 4, rng.integers(1, 5)).tolist()), "ab"[int(rng.integers(2))]
        match int(rng.integers(6)):
            case 5:
                start = world.prefixes.peek(prompt, len(prompt), salt)
                most = (len(prompt) - start) // CHUNK
                copies = world.prefixes.reserve(prompt, salt, int(rng.integers(most + 1)))
                if rng.integers(2):
                    world.prefixes.extend(prompt, salt)
                world.prefixes.publish(prompt, salt, start, copies)
            case 0 | 1:
                start, copies = world.prefixes.extend(prompt, salt)
                assert world.prefixes.peek(prompt, len(prompt), salt) == start + len(copies) * CHUNK
            case 2:
                found = world.prefixes.find(prompt, len(prompt), salt)
                if found.tokens and len(locked) < 2:
                    world.prefixes.lock(found)
                    locked.append(found)
            case 3 if locked:
                world.prefixes.unlock(locked.pop(int(rng.integers(len(locked)))))
            case 4 if not locked:
                world.prefixes.flush(None if rng.integers(2) else "")
        world.check()
        for each in locked:
            held = {copy.number: int(copy.blocks[0]) for copy in each.copies}
            assert all(world.prefixes._copies[block].number == number for number, block in held.items())
