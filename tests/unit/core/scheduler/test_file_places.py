"""From which chunks of a prompt with windows files let a row go on, and what has to be read for that."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from core.scheduler.disk_prefixes import DiskPrefixes
from core.scheduler.file_names import FileNames, Lasting
from core.scheduler.file_places import Fetch, FilePlaces
from core.types.arrays import Ints
from tests.unit.core.memory.test_leases import PAGE, ids
from tests.unit.core.scheduler.test_trails import CHUNK, World

PROMPT = ids(4 * CHUNK + 1)
LASTING = Lasting("stamp", lambda salt: None if salt == "gone" else salt, lambda salt: salt)


class Files:
    """A world whose windows reach over two chunks, and names that are in files."""

    def __init__(self, blocks: int = 1000) -> None:
        self.world, self.names = World(CHUNK + 2, blocks), FileNames(LASTING, CHUNK)
        self.stored = set[str]()
        store: Any = self.stored
        self.places = FilePlaces(store, self.world.prefixes, self.names, PAGE, self.world.trails)

    def store(self, chunks: range, trails: range) -> None:
        """Files of so many chunks of the prompt, and of what windows have behind so many."""
        known = self.names.chunks(PROMPT, "")
        self.stored |= {known[number] for number in chunks}
        self.stored |= {self.trail(number) for number in trails}

    def trail(self, number: int) -> str:
        name = self.names.trail(PROMPT[: (number + 1) * CHUNK], "")
        assert name is not None
        return name

    def disk(self) -> DiskPrefixes:
        """Whose reads are over at once."""
        outgoing: Any = SimpleNamespace(vacate=lambda copies, ready: ready())
        store: Any = self.stored
        world = self.world
        pools = (world.pool,), PAGE, world.trails
        return DiskPrefixes(store, world.prefixes, outgoing, LASTING, lambda: None, pools)

    def found(
        self, prompt: Ints = PROMPT, salt: str = "", cached: int = 0, usable: Callable[[int], int] = int
    ) -> Fetch | None:
        return self.places.find(prompt, salt, usable, cached)


def test_chunks_are_read_with_the_windows_behind_the_last_of_them() -> None:
    files = Files()
    assert files.found() is None
    files.store(range(4), range(4))
    fetch = files.found()
    assert fetch is not None and fetch.chunks == 4 and fetch.start == 0 and len(fetch.ids) == 4 * CHUNK
    assert fetch.names[:4] == files.names.chunks(PROMPT, "")
    assert fetch.trails == (3 * CHUNK, 4 * CHUNK) and fetch.names[4:] == [files.trail(2), files.trail(3)]
    fetch = files.found(PROMPT[:-1])
    assert fetch is not None and fetch.trails == (2 * CHUNK, 3 * CHUNK), "a token is left to compute"
    fetch = files.found(usable=lambda tokens: min(tokens, 2 * CHUNK + 1))
    assert fetch is not None and fetch.trails == (CHUNK, 2 * CHUNK), "not within an image"
    assert files.found(cached=4 * CHUNK) is None and files.found(cached=4 * CHUNK - 1) is not None
    assert files.found(salt="other") is None and files.found(salt="gone") is None


def test_where_a_file_is_lacking_a_row_goes_on_from_before_it() -> None:
    files = Files()
    files.store(range(4), range(4))
    files.stored.remove(files.trail(2))
    fetch = files.found()
    assert fetch is not None and fetch.trails == (CHUNK, 2 * CHUNK) and fetch.chunks == 2
    files.stored.remove(files.trail(1))
    fetch = files.found()
    assert fetch is not None and fetch.trails == (CHUNK,) and fetch.chunks == 1, "the first needs none before it"
    files.stored.remove(files.names.chunks(PROMPT, "")[0])
    assert files.found() is None


def test_how_far_files_and_memory_reach_together() -> None:
    files = Files()
    files.world.prefixes.extend(PROMPT[:CHUNK], "")
    files.store(range(1, 3), range(0))
    assert files.places.reach(PROMPT[:-1], "") == 3 * CHUNK == files.places.reach(PROMPT[: 3 * CHUNK], "")
    assert files.places.reach(PROMPT[: 3 * CHUNK - 1], "") == 2 * CHUNK and files.places.reach(PROMPT, "gone") == 0
    assert files.places.reach(ids(2 * CHUNK, 500), "") == 0


def test_what_memory_has_is_not_read() -> None:
    files = Files()
    files.store(range(4), range(4))
    files.world.serve(PROMPT[: 3 * CHUNK])
    fetch = files.found()
    assert fetch is not None and fetch.start == 3 * CHUNK and fetch.chunks == 1 and fetch.trails == (4 * CHUNK,)
    files.world.memory.flush()
    files.world.serve(PROMPT)
    assert files.found() is None


def test_chunks_that_the_device_has_are_not_read() -> None:
    """Of rows that hold keys only; memory has the first chunk, and files two behind it."""
    files = Files()
    files.world.prefixes.extend(PROMPT[:CHUNK], "")
    files.store(range(1, 3), range(0))
    disk = files.disk()
    assert disk.begin(PROMPT, "", len(PROMPT), 3 * CHUNK) is None
    fetch = disk.begin(PROMPT, "", len(PROMPT), 3 * CHUNK - 1)
    assert fetch is not None and (fetch.start, fetch.chunks) == (CHUNK, 2)


def test_names_of_a_namespace_that_is_gone_are_none() -> None:
    names = FileNames(LASTING, CHUNK)
    assert names.chunks(PROMPT, "gone") == [] and names.ending(PROMPT, "gone") is None
    assert names.trail(PROMPT[:CHUNK], "gone") is None
    known = names.chunks(PROMPT, "")
    every = [*known, *(names.trail(PROMPT[: n * CHUNK], "") for n in range(1, 5))]
    every += [names.ending(PROMPT[:end], "") for end in range(1, len(PROMPT) + 1)]
    assert len(set(every)) == len(every) and names.trail(PROMPT[:-1], "") == names.trail(PROMPT[:-1], "", known)
    names.forget()
    assert not set(names.chunks(PROMPT, "")) & set(known)


@pytest.mark.parametrize(("trails", "fits"), [(2, True), (1, False), (0, False)])
def test_without_room_for_all_windows_nothing_is_read(trails: int, fits: bool) -> None:
    files = Files()
    files.store(range(4), range(4))
    fetch, world = files.found(), files.world
    assert fetch is not None
    disk = files.disk()
    room = 4 * CHUNK + trails * world.trails.beside[0]
    taken = world.tier.take(world.tier.num_blocks - room)
    assert taken is not None and disk.reserve(fetch) is fits
    assert disk.is_idle is not fits
    assert world.tier.take_given_up() == (), "the device has never heard of them"
    if fits:
        assert len(fetch.copies) == 6 and [copy.tokens for copy in fetch.copies] == [CHUNK] * 4 + [0, 0]
        disk.end(fetch, 0)
    assert world.tier.used_bytes == len(taken.blocks)


@pytest.mark.parametrize(("whole", "found", "lacking"), [(6, 4, [0, 1]), (5, 0, [0, 1, 3]), (3, 0, [0, 1, 2, 3])])
def test_only_what_was_whole_is_found(whole: int, found: int, lacking: list[int]) -> None:
    """Chunks come first, and then what windows have behind the last two of them."""
    files = Files()
    files.store(range(4), range(4))
    fetch, disk, world = files.found(), files.disk(), files.world
    assert fetch is not None and disk.reserve(fetch)
    disk.prepare(fetch, lambda: None)
    disk.end(fetch, whole)
    assert world.found(PROMPT) == found * CHUNK and world.lacking(PROMPT) == lacking
    assert world.tier.used_bytes == sum(copy.tokens or CHUNK for copy in fetch.copies[:whole])
    world.prefixes.flush()
    world.check()
    assert world.tier.used_bytes == 0 and disk.is_idle


@pytest.mark.parametrize("spare", [0, CHUNK, 2 * CHUNK])
def test_what_is_read_does_not_drive_out_what_comes_before_it(spare: int) -> None:
    """Memory has three of four chunks with their windows, and little room."""
    files = Files()
    files.store(range(4), range(4))
    files.world.serve(PROMPT[: 3 * CHUNK])
    fetch, disk, tier = files.found(), files.disk(), files.world.tier
    assert fetch is not None and len(fetch.names) == 2
    free = tier.num_blocks - tier.used_bytes
    assert spare == free or tier.take(free - spare) is not None
    assert disk.reserve(fetch) is (spare == 2 * CHUNK)
    if spare == 2 * CHUNK:
        assert tier.take(1) is None, "what is read is of no use without them"
        disk.prepare(fetch, lambda: None)
        disk.end(fetch, 2)
    assert files.world.found(PROMPT) == (4 if spare == 2 * CHUNK else 3) * CHUNK
    assert tier.take(1) is not None, "nothing is held any more"


@pytest.mark.parametrize("told", [False, True])
def test_what_is_held_for_a_read_goes_with_a_flush_meanwhile(told: bool) -> None:
    files = Files()
    files.store(range(4), range(4))
    files.stored = set(files.stored)
    files.world.serve(PROMPT[: 3 * CHUNK])
    fetch, disk, world = files.found(), files.disk(), files.world
    assert fetch is not None and disk.reserve(fetch)
    if told:
        disk.prepare(fetch, lambda: None)
    disk._eras[""] += 1
    world.prefixes.flush()
    assert world.found(PROMPT) == 3 * CHUNK
    disk.end(fetch, 2)
    assert world.found(PROMPT) == 0 and world.tier.used_bytes == 0
    assert disk.fetched == 0
