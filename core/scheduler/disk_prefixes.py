"""Prefixes that host memory gives up come back from files, and so do those of a process before. Loop thread only.

Whatever is copied to host memory is written to files as well, so that nothing waits for a disk when host memory is
short. A newcomer whose prompt has more chunks in files than in memory waits until they are read, before it is queued;
it finds them in host memory then, as any other prefix. Threads read and write; blocks that they use are held meanwhile.
"""

from __future__ import annotations

import secrets
from collections import deque
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

THREADS = 2
MOST_ENDS = 4096
"""Pages at whose ends a place to go on from is looked for, from the end of a prompt on: some milliseconds."""
BACKLOG = 4
"""Of host memory at most this part is held by writes; what comes beyond is not written."""


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
    """Chunks of `ids` from token `start` on, which are read into `copies`. Nothing finds them until that is over."""

    ids: Ints
    salt: str
    start: int
    names: list[str]
    copies: tuple[HostCopy, ...]
    era: int
    ending: bool = False
    """Whether the last of the copies is not of a chunk, but of what is where `ids` end, of rows that hold more."""


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
        self._threads = ThreadPoolExecutor(THREADS, "slipstream-disk")
        self._written: deque[tuple[HeldPrefix, int, int]] = deque()
        """(what was held for it, chunks, tokens of those that are in files by now) of each write that is over."""
        self._stamp = lasting.stamp
        self._writing = self._reading = 0
        """Chunks that threads read from, or fill."""
        self._era = 0
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
        held = self._prefixes.find(ids[:end], end, salt)
        self._prefixes.lock(held)
        self._writing += len(wanted)
        return partial(self._write, wanted, held)

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
        self._prefixes.lock(held)
        self._writing += 1
        return partial(self._write, [(name, copy)], held)

    def begin(self, ids: Ints, salt: str, limit: int, cached: int) -> Fetch | None:
        """Make room for chunks of the first `limit` tokens of `ids` that are in files and in no memory.

        `cached`: tokens that the device has. None where there are none, or no room. `prepare` comes next.
        """
        chunk, start = self._prefixes.chunk, self._prefixes.peek(ids, limit, salt)
        names = self._names(ids[:limit], salt)[start // chunk :] if len(self._store) else []
        count = next((place for place, name in enumerate(names) if name not in self._store), len(names))
        if not count or start + count * chunk <= cached:
            return None
        copies = self._prefixes.reserve(ids, salt, count)
        if not copies:
            return None
        self._reading += len(copies)
        return Fetch(ids, salt, start, names[: len(copies)], copies, self._era)

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
                return self._to_ending(ids[:end], salt, held, [*names[held : (end - 1) // chunk], name])
        return None

    def _to_ending(self, ids: Ints, salt: str, held: int, names: list[str]) -> Fetch | None:
        """Room for the chunks and the ending with these `names`, behind the first `held` chunks of `ids`; else None."""
        begin = (len(ids) - 1) // self._prefixes.chunk * self._prefixes.chunk
        pages = len(ids) // self._page_size
        copies = self._prefixes.reserve(ids, salt, len(names) - 1)
        beside = tuple(pool.slots_for(pages) for pool in self._others)
        ending = self._prefixes.reserve_ending(len(ids) - begin, beside) if len(copies) == len(names) - 1 else None
        if ending is None:
            self._prefixes.release(copies)
            return None
        self._reading += len(names)
        start = held * self._prefixes.chunk
        return Fetch(ids, salt, start, names, (*copies, ending), self._era, ending=True)

    def prepare(self, fetch: Fetch, ready: Callable[[], None]) -> None:
        """Call `ready` once no step reads what was in the blocks of `fetch` before: `read` may come then."""
        self._outgoing.vacate(fetch.copies, ready)

    def read(self, fetch: Fetch) -> Future[int]:
        """Begin to fill the blocks of `fetch`: how many of its first chunks are whole. `end` comes next."""
        wanted = [(name, self._outgoing.views(copy)) for name, copy in zip(fetch.names, fetch.copies, strict=True)]

        def work() -> int:
            return next((n for n, (name, parts) in enumerate(wanted) if not self._store.read(name, parts)), len(wanted))

        return self._threads.submit(work)

    def end(self, fetch: Fetch, whole: int) -> None:
        """No thread fills the blocks of `fetch` any more, and its first `whole` chunks are found from now on."""
        self._reading -= len(fetch.copies)
        if fetch.era != self._era:
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
            held, count, kept = self._written.popleft()
            self._prefixes.unlock(held)
            self._writing -= count
            self.kept += kept
        return any_written

    def flush(self, tenant: str | None) -> None:
        """Delete every file, of `tenant` only if given, and publish nothing that is being read."""
        self._era += 1
        self._store.flush(tenant)

    def forget(self) -> None:
        """The model is another one from now on, of which no other process knows: nothing is found that was written."""
        self._era += 1
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
        """End the threads, and leave the directory to the next process. Blocks for as long as a chunk takes."""
        self._threads.shutdown(cancel_futures=True)
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

    def _write(self, wanted: list[tuple[str, HostCopy]], held: HeldPrefix) -> None:
        views = [(name, self._outgoing.views(copy), copy.tokens) for name, copy in wanted]

        def work() -> None:
            kept = sum(tokens for name, parts, tokens in views if self._store.write(name, parts))
            self._written.append((held, len(views), kept))
            self._wake()

        self._threads.submit(work)
