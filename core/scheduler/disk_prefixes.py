"""Prefixes that host memory gives up come back from files, and so do those of a process before. Loop thread only.

Whatever is copied to host memory is written to files as well, so that nothing waits for a disk when host memory is
short. A newcomer whose prompt has more chunks in files than in memory waits until they are read, before it is queued;
it finds them in host memory then, as any other prefix. Threads read and write; blocks that they use are held meanwhile.
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from core.disk.chunk_names import chunk_names, ending_name
from core.disk.chunk_store import ChunkStore
from core.memory.companion import Portable
from core.memory.host_moves import HostCopy
from core.memory.host_prefixes import HeldPrefix, HostPrefixes
from core.memory.usable_prefix import Usable
from core.scheduler.outgoing import Outgoing
from core.types.arrays import Ints

READERS = 2
"""Threads that read; one more writes."""
MOST_ENDS = 4096
"""Pages at whose ends a place to go on from is looked for, from the end of a prompt on: some milliseconds."""
ALL = ""
"""Stands for all tenants, whose names it cannot be: a tenant without a name has this too, and is given up with them."""
BACKLOG = 4
"""Of host memory at most this part is held by writes; what comes beyond is not written."""


Era = tuple[int, int]
"""How often all was given up, and what one tenant had."""


@dataclass(frozen=True, slots=True)
class Lasting:
    """What a chunk is named by in every process: the model with its weights, and what shares prefixes."""

    stamp: str
    namespace: Callable[[str], str | None]
    """Of a namespace of this process the name that it has in others; None for one that is gone."""
    tenant: Callable[[str], str]
    """Of a namespace."""


@dataclass(eq=False, slots=True)
class Fetch:
    """Chunks of `ids` from token `start` on, which are read into `copies`. Nothing finds them until that is over.

    First `reserve`, then `prepare`, then `read`; and then `end`, whichever of them came last.
    """

    ids: Ints
    salt: str
    start: int
    names: list[str]
    ending: bool = False
    """Whether the last of the copies is not of a chunk, but of what is where `ids` end, of rows that hold more."""
    copies: tuple[HostCopy, ...] = ()
    told: bool = False
    """The device has heard of the copies."""
    era: Era = (0, 0)


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
        pools: tuple[Sequence[Portable], int] = ((), 1),
    ) -> None:
        """`wake`: of the loop, from any thread.

        `pools`: those of which rows hold something beside keys, and tokens of a page.
        """
        self._others, self._page_size = pools
        self._store = store
        self._prefixes = prefixes
        self._outgoing = outgoing
        self._lasting = lasting
        self._wake = wake
        # Requests wait for reads, and nothing waits for writes.
        self._readers = ThreadPoolExecutor(READERS, "slipstream-disk-read")
        self._writers = ThreadPoolExecutor(1, "slipstream-disk-write")
        self._written: deque[tuple[_Write, int]] = deque()
        """Each write that is over, and how many tokens are in files by it."""
        self._stamp = lasting.stamp
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
        """Whether rows hold more than keys, so that a prefix ends where all of that is: see `begin_ending`."""
        return bool(self._others)

    def keep(self, ids: Ints, salt: str, start: int, copies: tuple[HostCopy, ...]) -> Callable[[], None] | None:
        """`copies`, of the chunks of `ids` from token `start` on, are under way: what to call when they have landed."""
        chunk, end = self._prefixes.chunk, start + len(copies) * self._prefixes.chunk
        names = self._names(ids[:end], salt)[start // chunk :]
        wanted = [(name, copy) for name, copy in zip(names, copies, strict=False) if name not in self._store]
        # The first ones: without them nothing behind them is found.
        self.skipped += len(wanted[self._free :]) * chunk
        if not (wanted := wanted[: self._free]):
            return None
        return self._noted(wanted, self._prefixes.find(ids[:end], end, salt), salt)

    def _noted(self, wanted: list[tuple[str, HostCopy]], held: HeldPrefix, salt: str) -> Callable[[], None]:
        self._prefixes.lock(held)
        self._writing += len(wanted)
        return partial(self._write, _Write(wanted, held, self._lasting.tenant(salt), self._era(salt)))

    def _era(self, salt: str) -> Era:
        return self._eras[ALL], self._eras[self._lasting.tenant(salt)]

    @property
    def _free(self) -> int:
        """How many more chunks may wait to be written."""
        return max(0, max(1, self._prefixes.room // BACKLOG) - self._writing)

    def keep_ending(self, ids: Ints, salt: str, copy: HostCopy) -> Callable[[], None] | None:
        """As `keep`, for what rows hold behind `ids`, int64[n], in `copy` with the keys behind the last whole chunk."""
        name = self._ending_name(ids, salt)
        if name is None or name in self._store:
            return None
        if not self._free:
            self.skipped += copy.tokens
            return None
        held = self._prefixes.hold_ending(ids, salt)
        assert held is not None and held.ending is not None, "made just now"
        return self._noted([(name, copy)], held, salt)

    def begin(self, ids: Ints, salt: str, limit: int, cached: int) -> Fetch | None:
        """The chunks of the first `limit` tokens of `ids` that are in files and in no memory; None without any.

        `cached`: tokens that the device has.
        """
        chunk, start = self._prefixes.chunk, self._prefixes.peek(ids, limit, salt)
        names = self._names(ids[:limit], salt)[start // chunk :] if len(self._store) else []
        count = next((place for place, name in enumerate(names) if name not in self._store), len(names))
        if not count or start + count * chunk <= cached:
            return None
        return Fetch(ids, salt, start, names[:count])

    def begin_ending(self, ids: Ints, salt: str, usable: Usable, cached: int) -> Fetch | None:
        """As `begin`, of rows that hold more than keys: up to the last place in `ids` where files have all of it.

        `usable`: see `usable_prefix`.
        """
        chunk, most = self._prefixes.chunk, len(ids) - 1
        names = self._names(ids[:most], salt) if len(self._store) else []
        held = self._prefixes.peek(ids, most, salt) // chunk
        reach = next((n for n, name in enumerate(names) if n >= held and name not in self._store), len(names))
        here = self._prefixes.find_ending(ids, usable, salt)
        cached = max(cached, 0 if here is None else here.tokens)
        first = min(most, (reach + 1) * chunk) // self._page_size * self._page_size
        for end in range(first, max(cached, first - MOST_ENDS * self._page_size), -self._page_size):
            name = self._ending_name(ids[:end], salt, names)
            if name is not None and name in self._store and usable(end) == end:
                return Fetch(ids[:end], salt, held * chunk, [*names[held : (end - 1) // chunk], name], ending=True)
        return None

    def reserve(self, fetch: Fetch) -> bool:
        """Make room for `fetch`, or for the first of its chunks; whether there is any."""
        count = len(fetch.names) - fetch.ending
        copies, ending = self._prefixes.reserve(fetch.ids, fetch.salt, count), None
        if fetch.ending and len(copies) == count:
            beside = tuple(pool.slots_for(len(fetch.ids) // self._page_size) for pool in self._others)
            ending = self._prefixes.reserve_ending((len(fetch.ids) - 1) % self._prefixes.chunk + 1, beside)
        if fetch.ending and ending is None:
            # Without it the chunks are of no use.
            self._prefixes.put_back(copies)
            return False
        fetch.copies = copies if ending is None else (*copies, ending)
        fetch.names, fetch.era = fetch.names[: len(fetch.copies)], self._era(fetch.salt)
        self._reading += len(fetch.copies)
        return bool(fetch.copies)

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
        if not fetch.told:
            self._prefixes.put_back(fetch.copies)
            return
        if fetch.era != self._era(fetch.salt):
            whole = 0
        ended = fetch.ending and whole == len(fetch.copies)
        chunks = fetch.copies[: whole - 1 if ended else whole]
        self._prefixes.release(fetch.copies[whole:])
        self.fetched += self._prefixes.publish(fetch.ids, fetch.salt, fetch.start, chunks) * self._prefixes.chunk
        if ended:
            self.fetched += self._prefixes.publish_ending(fetch.ids, fetch.salt, fetch.copies[-1])

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
        self._stamp = secrets.token_hex(16)

    def stats(self) -> dict[str, int]:
        """The figures of now, by the fields of `EngineStats`."""
        return {
            "disk_cache_bytes": self._store.used_bytes,
            "disk_fetched_tokens": self.fetched,
            "disk_kept_tokens": self.kept,
            "disk_evicted_tokens": self._store.evicted * self._prefixes.chunk,
            "disk_skipped_tokens": self.skipped,
            "disk_failures": self._store.failures,
        }

    def close(self) -> None:
        """End the threads, once they have read or written a chunk, and leave the directory to the next process."""
        # A disk that hangs would hold up the end of the process.
        for threads in (self._readers, self._writers):
            threads.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    def _names(self, ids: Ints, salt: str) -> list[str]:
        namespace = self._lasting.namespace(salt)
        if namespace is None:
            return []
        tenant = self._lasting.tenant(salt)
        return chunk_names(self._stamp, namespace, tenant, ids, self._prefixes.chunk)

    def _ending_name(self, ids: Ints, salt: str, names: Sequence[str] | None = None) -> str | None:
        """`names`: those of chunks of `ids`, if they are known."""
        namespace, count = self._lasting.namespace(salt), (len(ids) - 1) // self._prefixes.chunk
        if namespace is None:
            return None
        known = self._names(ids[: count * self._prefixes.chunk], salt) if names is None else names
        tail, before = ids[count * self._prefixes.chunk :], known[count - 1] if count else ""
        return ending_name(self._stamp, namespace, self._lasting.tenant(salt), before, tail)

    def _write(self, write: _Write) -> None:
        views = [(name, self._outgoing.views(copy), copy.tokens) for name, copy in write.wanted]

        def still() -> bool:
            return not self._is_stale(write)

        def work() -> None:
            kept = sum(tokens for name, parts, tokens in views if self._store.write(name, parts, still))
            self._written.append((write, kept))
            self._wake()

        self._writers.submit(work)
