"""Prefixes that host memory gives up come back from files, and so do those of a process before. Loop thread only.

Whatever is copied to host memory is written to files as well, so that nothing waits for a disk when host memory is
short. A newcomer whose prompt has more chunks in files than in memory waits until they are read, before it is queued;
it finds them in host memory then, as any other prefix. Threads read and write; blocks that they use are held meanwhile.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from core.disk.chunk_store import ChunkStore
from core.memory.companion import Portable
from core.memory.host_moves import HostCopy
from core.memory.host_prefixes import HeldPrefix, HostPrefixes
from core.memory.usable_prefix import Usable
from core.scheduler.file_names import FileNames, Lasting
from core.scheduler.file_places import Era, Fetch, FilePlaces
from core.scheduler.outgoing import Outgoing
from core.scheduler.trails import Trails
from core.types.arrays import Ints

READERS = 2
"""Threads that read; one more writes."""
ALL = ""
"""Stands for all tenants, whose names it cannot be: a tenant without a name has this too, and is given up with them."""
BACKLOG = 4
"""Of host memory at most this part is held by writes; what comes beyond is not written."""


@dataclass(frozen=True, slots=True)
class _Write:
    """Copies with their names, which `held` keeps in host memory until they are in files."""

    wanted: list[tuple[str, HostCopy]]
    held: HeldPrefix
    tenant: str
    era: Era


class DiskPrefixes:
    """Which chunks are in files, and which are on their way there or back."""

    def __init__(
        self,
        store: ChunkStore,
        prefixes: HostPrefixes,
        outgoing: Outgoing,
        lasting: Lasting,
        wake: Callable[[], None],
        pools: tuple[Sequence[Portable], int, Trails | None] = ((), 1, None),
    ) -> None:
        """`wake`: of the loop, from any thread.

        `pools`: those of which rows hold something beside keys, tokens of a page, and whether prompts can be gone on
        from within.
        """
        self._others, self._page_size, self._trails = pools
        self._names = FileNames(lasting, prefixes.chunk)
        self._places = FilePlaces(store, prefixes, self._names, self._page_size, self._trails)
        self._store = store
        self._prefixes = prefixes
        self._outgoing = outgoing
        self._wake = wake
        # Requests wait for reads, and nothing waits for writes.
        self._readers = ThreadPoolExecutor(READERS, "slipstream-disk-read")
        self._writers = ThreadPoolExecutor(1, "slipstream-disk-write")
        self._written: deque[tuple[_Write, int]] = deque()
        """Each write that is over, and how many tokens are in files by it."""
        self._writing = self._reading = 0
        """Chunks that threads read from, or fill."""
        self._eras: Counter[str] = Counter()
        """By tenant, how often what it had was given up: what was begun before is not kept, nor found. "" is all."""
        self.fetched = self.kept = self.skipped = 0
        """Tokens that were read so far; tokens that were written; tokens that were not, since threads were behind."""

    @property
    def is_idle(self) -> bool:
        """Whether no thread uses blocks of host memory."""
        return not (self._writing or self._reading)

    @property
    def has_endings(self) -> bool:
        """Whether rows hold more than keys, so that a prefix ends where all of that is: see `begin_all`."""
        return bool(self._others)

    def keep(self, ids: Ints, salt: str, start: int, copies: tuple[HostCopy, ...]) -> Callable[[], None] | None:
        """`copies`, of the chunks of `ids` from token `start` on, are under way: what to call when they have landed."""
        chunk, end = self._prefixes.chunk, start + len(copies) * self._prefixes.chunk
        names = self._names.chunks(ids[:end], salt)[start // chunk :]
        wanted = [(name, copy) for name, copy in zip(names, copies, strict=False) if name not in self._store]
        # The first ones: without them nothing behind them is found.
        self.skipped += len(wanted[self._free :]) * chunk
        if not (wanted := wanted[: self._free]):
            return None
        return self._noted(wanted, self._prefixes.find(ids[:end], end, salt), salt)

    def _noted(self, wanted: list[tuple[str, HostCopy]], held: HeldPrefix, salt: str) -> Callable[[], None]:
        self._prefixes.lock(held)
        self._writing += len(wanted)
        return partial(self._write, _Write(wanted, held, self._names.tenant(salt), self._era(salt)))

    def _era(self, salt: str) -> Era:
        return self._eras[ALL], self._eras[self._names.tenant(salt)]

    @property
    def _free(self) -> int:
        """How many more chunks may wait to be written."""
        return max(0, max(1, self._prefixes.room // BACKLOG) - self._writing)

    def keep_ending(self, ids: Ints, salt: str, copy: HostCopy) -> Callable[[], None] | None:
        """As `keep`, for what rows hold behind `ids`, int64[n], in `copy` with the keys behind the last whole chunk."""
        held = self._prefixes.hold_ending(ids, salt)
        assert held is not None and held.ending is not None, "made just now"
        return self._keep_one(self._names.ending(ids, salt), copy, held, salt)

    def keep_trail(self, ids: Ints, salt: str, copy: HostCopy) -> Callable[[], None] | None:
        """As `keep`, for what rows hold beside the keys of the last whole chunk of `ids`, int64[n], in `copy`."""
        held = self._prefixes.find(ids, len(ids), salt)
        return self._keep_one(self._names.trail(ids[: held.tokens], salt), copy, held, salt)

    def _keep_one(self, name: str | None, copy: HostCopy, held: HeldPrefix, salt: str) -> Callable[[], None] | None:
        if name is None or name in self._store:
            return None
        if not self._free:
            self.skipped += copy.tokens
            return None
        return self._noted([(name, copy)], held, salt)

    def begin(self, ids: Ints, salt: str, limit: int, cached: int) -> Fetch | None:
        """The chunks of the first `limit` tokens of `ids` that are in files and in no memory; None without any.

        `cached`: tokens that the device has.
        """
        chunk, start = self._prefixes.chunk, self._prefixes.peek(ids, limit, salt)
        names = self._names.chunks(ids[:limit], salt)[start // chunk :] if len(self._store) else []
        count = next((place for place, name in enumerate(names) if name not in self._store), len(names))
        if not count or start + count * chunk <= cached:
            return None
        return Fetch(ids, salt, start, names[:count])

    def reach(self, ids: Ints, salt: str) -> int:
        """How many tokens of `ids`, int64[n], are in whole chunks that files or memory have, one behind the other."""
        return self._places.reach(ids, salt) if len(self._store) else 0

    def begin_all(self, ids: Ints, salt: str, usable: Usable, cached: int) -> Fetch | None:
        """As `begin`, of rows that hold more than keys: see `FilePlaces.find`."""
        return self._places.find(ids, salt, usable, cached) if len(self._store) else None

    def reserve(self, fetch: Fetch) -> bool:
        """Make room for `fetch`, or for the first of its chunks; whether there is any."""
        held = self._prefixes.find(fetch.ids, fetch.start, fetch.salt)
        self._prefixes.lock(held)
        copies = self._prefixes.reserve(fetch.ids, fetch.salt, fetch.chunks)
        if self.has_endings and len(copies) == fetch.chunks:
            copies += self._reserved_beside(fetch)
        # Without all that rows hold chunks are of no use.
        if not copies or (self.has_endings and len(copies) < len(fetch.names)):
            self._prefixes.put_back(copies)
            self._prefixes.unlock(held)
            return False
        fetch.copies, fetch.held = copies, held
        fetch.names, fetch.era = fetch.names[: len(fetch.copies)], self._era(fetch.salt)
        self._reading += len(fetch.copies)
        return True

    def _reserved_beside(self, fetch: Fetch) -> tuple[HostCopy, ...]:
        """As much of the room for what rows hold beside keys as there is."""
        if fetch.ending:
            beside = tuple(pool.slots_for(len(fetch.ids) // self._page_size) for pool in self._others)
            sizes = [((len(fetch.ids) - 1) % self._prefixes.chunk + 1, beside)]
        else:
            assert self._trails is not None
            sizes = [(0, self._trails.beside)] * len(fetch.trails)
        taken = (self._prefixes.reserve_beside(*size) for size in sizes)
        return tuple(copy for copy in taken if copy is not None)

    def prepare(self, fetch: Fetch, ready: Callable[[], None]) -> None:
        """Call `ready` once no step reads what was in the blocks of `fetch` before: `read` may come then."""
        fetch.told = True
        self._outgoing.vacate(fetch.copies, ready)

    def read(self, fetch: Fetch) -> Future[int]:
        """Begin to fill the blocks of `fetch`: how many of its first chunks are whole. `end` comes next."""
        wanted = [(name, self._outgoing.views(copy)) for name, copy in zip(fetch.names, fetch.copies, strict=True)]

        def work() -> int:
            return next((n for n, (name, parts) in enumerate(wanted) if not self._store.read(name, parts)), len(wanted))

        return self._readers.submit(work)

    def end(self, fetch: Fetch, whole: int) -> None:
        """No thread fills the blocks of `fetch` any more, and its first `whole` chunks are found from now on."""
        self._reading -= len(fetch.copies)
        if fetch.held is not None:
            self._prefixes.unlock(fetch.held)
        stale = fetch.era != self._era(fetch.salt)
        if stale:
            # What was held for it a flush had to leave.
            self._prefixes.flush(self._names.tenant(fetch.salt))
            whole = 0
        if not fetch.told:
            self._prefixes.put_back(fetch.copies)
            return
        chunks, beside = fetch.copies[: min(whole, fetch.chunks)], fetch.copies[fetch.chunks : whole]
        self._prefixes.release(fetch.copies[whole:])
        self.fetched += self._prefixes.publish(fetch.ids, fetch.salt, fetch.start, chunks) * self._prefixes.chunk
        if fetch.ending and beside:
            self.fetched += self._prefixes.publish_ending(fetch.ids, fetch.salt, *beside)
        for end, copy in zip(fetch.trails, beside, strict=False):
            self._prefixes.publish_trail(fetch.ids[:end], fetch.salt, copy)

    def settle(self) -> bool:
        """Let go of what was written; whether anything was."""
        any_written = bool(self._written)
        while self._written:
            write, kept = self._written.popleft()
            self._prefixes.unlock(write.held)
            self._writing -= len(write.wanted)
            self.kept += kept
            if self._is_stale(write):
                # What was held for it a flush had to leave.
                self._prefixes.flush(write.tenant)
        return any_written

    def _is_stale(self, write: _Write) -> bool:
        return write.era != (self._eras[ALL], self._eras[write.tenant])

    def flush(self, tenant: str | None) -> None:
        """Delete every file, of `tenant` only if given, and keep and publish nothing that is on its way."""
        self._eras[ALL if tenant is None else tenant] += 1
        self._store.flush(tenant)

    def forget(self) -> None:
        """The model is another one from now on, of which no other process knows: nothing is found that was written."""
        self._eras[ALL] += 1
        self._names.forget()

    def stats(self) -> dict[str, int]:
        """The figures of now, by the fields of `EngineStats`."""
        return {
            "disk_cache_bytes": self._store.used_bytes,
            "disk_fetched_tokens": self.fetched,
            "disk_kept_tokens": self.kept,
            "disk_evicted_tokens": self._store.evicted * self._prefixes.chunk,
            "disk_skipped_tokens": self.skipped,
            "disk_pending_chunks": self._writing,
            "disk_failures": self._store.failures,
        }

    def close(self) -> None:
        """End the threads, once they have read or written a chunk, and leave the directory to the next process."""
        # A disk that hangs would hold up the end of the process.
        for threads in (self._readers, self._writers):
            threads.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    def _write(self, write: _Write) -> None:
        views = [(name, self._outgoing.views(copy), copy.tokens) for name, copy in write.wanted]

        def still() -> bool:
            return not self._is_stale(write)

        def work() -> None:
            kept = sum(tokens for name, parts, tokens in views if self._store.write(name, parts, still))
            self._written.append((write, kept))
            self._wake()

        self._writers.submit(work)
