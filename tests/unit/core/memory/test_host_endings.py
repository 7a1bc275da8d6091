"""Prefixes of rows that hold more than keys: gone on from where that was copied too, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from core.memory.host_moves import HostCopy
from core.memory.host_prefixes import HeldPrefix, HostPrefixes
from core.memory.host_tier import HostTier
from core.types.arrays import Ints
from tests.unit.core.memory.test_host_prefixes import BLOCK, CHUNK, EACH, ids

PAGE = 2
STATE = 3
"""Blocks of a slot of the other pool."""
ONE = (1,)


class World:
    """A tier with so many blocks."""

    def __init__(self, blocks: int = 100) -> None:
        self.tier = HostTier(blocks * BLOCK, 8, BLOCK, {"states": STATE * BLOCK})
        self.prefixes = HostPrefixes(self.tier, CHUNK)

    def keep(self, prompt: Ints, end: int, salt: str = "") -> HostCopy | None:
        """An ending behind the first `end` tokens, and the chunks before it."""
        self.prefixes.extend(prompt[:end], salt)
        made = self.prefixes.end(prompt[:end], salt, ONE)
        self.check()
        assert made is None or made[0] == (end - 1) // CHUNK * CHUNK
        return None if made is None else made[1]

    def found(self, prompt: Ints, salt: str = "", most: int = 99) -> HeldPrefix | None:
        held = self.prefixes.find_ending(prompt, lambda tokens: min(tokens, most), salt)
        if held is not None:
            assert held.ending is not None
            assert sum(copy.tokens for copy in held.copies) + held.ending.copy.tokens == held.tokens
        return held

    def end_of(self, prompt: Ints, salt: str = "", most: int = 99) -> int:
        held = self.found(prompt, salt, most)
        return 0 if held is None else held.tokens

    def check(self) -> None:
        self.tier.check_integrity()
        self.prefixes.check_integrity()


def test_the_last_ending_is_found() -> None:
    world, prompt = World(), ids(1, 2, 3)
    assert world.end_of(prompt) == 0
    for end in (6, 2, 8, 4):
        copy = world.keep(prompt, end)
        assert copy is not None and copy.beside == ONE and copy.tokens == (end - 1) % CHUNK + 1
    assert [world.end_of(prompt, most=most) for most in (1, 2, 3, 5, 6, 7, 8, 12)] == [0, 2, 2, 4, 6, 6, 8, 8]
    assert world.end_of(prompt[:8]) == 6 and world.end_of(prompt[:9]) == 8, "a token is left to compute"
    assert world.end_of(ids(1, 3, 2)) == 4 and world.end_of(ids(2, 2, 3)) == 0
    assert world.end_of(np.array([*ids(1), 20, 21, 99, 98, 97], np.int64)) == 6
    assert world.end_of(prompt, "x") == 0


def test_an_ending_is_kept_once_and_behind_its_chunks_only() -> None:
    world, prompt = World(), ids(1, 2, 3)
    assert world.prefixes.end(prompt[:6], "", ONE) is None, "its chunk is not there"
    assert world.keep(prompt, 6) is not None and world.keep(prompt, 6) is None
    used = world.tier.used_bytes
    assert used == (EACH + 1 + STATE) * BLOCK


def test_an_ending_that_is_left_again_counts_as_used() -> None:
    world = World(2 * (EACH + 1 + STATE))
    for place in (1, 2, 1):
        world.keep(ids(place, 5), 6)
    assert world.tier.take(CHUNK) is not None
    # Not asked by `find`, which would count as a use.
    assert world.end_of(ids(2, 5)) == 0 and world.end_of(ids(1, 5)) == 6


def test_chunks_without_an_ending_give_way_first_then_the_oldest_ending_with_its_chunks() -> None:
    world = World(3 * EACH + 2 * (1 + STATE))
    first = world.keep(ids(1, 5), 6)
    other = world.keep(ids(2, 5), 6)
    world.prefixes.extend(ids(3), "")
    assert world.tier.take(CHUNK) is not None
    assert world.prefixes.evicted == CHUNK and world.end_of(ids(2, 5)) == 6 and world.end_of(ids(1, 5)) == 6
    world.tier.take_given_up()
    # The second was found before the first, so it goes.
    assert world.tier.take(CHUNK) is not None
    assert other is not None and first is not None
    assert world.tier.take_given_up() == (other.number,), "its own blocks are enough"
    assert world.end_of(ids(2, 5)) == 0 and world.end_of(ids(1, 5)) == 6
    assert world.prefixes.evicted == CHUNK + 2
    world.check()


def test_what_an_ending_needs_does_not_give_way_to_it() -> None:
    world = World(EACH + STATE)
    world.prefixes.extend(ids(1), "")
    assert world.prefixes.end(ids(1, 5)[:6], "", ONE) is None, "one block is lacking, and the chunk has two"
    assert world.prefixes.tokens == CHUNK
    world.prefixes.extend(ids(2, 3), "")
    assert world.prefixes.find(ids(1), CHUNK, "").tokens == 0, "it was let go of then"
    assert world.prefixes.find(ids(2, 3), 2 * CHUNK, "").tokens == 2 * CHUNK


def test_what_a_row_waits_for_stays() -> None:
    world = World(EACH + 1 + STATE)
    world.keep(ids(1, 5), 6)
    held = world.found(ids(1, 5))
    assert held is not None
    world.prefixes.lock(held)
    assert world.tier.take(CHUNK) is None and world.prefixes.flush() == 0 and world.end_of(ids(1, 5)) == 6
    world.prefixes.unlock(held)
    assert world.tier.take(CHUNK) is not None and world.end_of(ids(1, 5)) == 0


def test_a_flush_is_of_a_tenant_or_of_all() -> None:
    world = World()
    for salt in ("a\0x", "b\0x"):
        world.keep(ids(1, 5), 6, salt)
        world.keep(ids(1, 5), 2, salt)
    assert world.prefixes.flush("a") == CHUNK + 4
    assert world.end_of(ids(1, 5), "a\0x") == 0 and world.end_of(ids(1, 5), "b\0x") == 6
    assert world.prefixes.flush() == CHUNK + 4 and world.tier.used_bytes == 0


@pytest.mark.parametrize("blocks", [14, 40])
def test_any_order_of_calls_keeps_every_block_once(blocks: int, seed: int) -> None:
    print(f"seed {seed}")
    rng, world = np.random.default_rng(seed), World(blocks)
    locked: list[HeldPrefix] = []
    for _ in range(300):
        prompt, salt = ids(*rng.integers(1, 4, rng.integers(1, 5)).tolist()), "ab"[int(rng.integers(2))]
        match int(rng.integers(6)):
            case 0 | 1 | 2:
                end = int(rng.integers(1, len(prompt) // PAGE + 1)) * PAGE
                if world.keep(prompt, end, salt) is not None:
                    assert world.end_of(np.append(prompt[:end], 99), salt) == end
            case 3:
                found = world.found(prompt, salt)
                if found is not None and len(locked) < 2:
                    world.prefixes.lock(found)
                    locked.append(found)
            case 4 if locked:
                world.prefixes.unlock(locked.pop(int(rng.integers(len(locked)))))
            case 5 if not locked:
                world.prefixes.flush(None if rng.integers(2) else "")
        world.check()
        held = [copy for each in locked for copy in (*each.copies, *([each.ending.copy] if each.ending else []))]
        freed = set(world.tier.take_given_up())
        assert not freed & {copy.number for copy in held}
