"""The engine's `Prefixes`: watches of the prefix cache, and the flush.

The cache changes on the scheduler's path. There a change costs one call and one append per watch, and nothing where
there is no watch. The reader of a watch does everything else in its own time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from core.engine.adapters.table import AdapterTable
from core.errors import SlowConsumer, Unsupported
from core.models.lora.slots import NONE_SLOT
from core.scheduler.scheduler import Scheduler
from core.types.arrays import Ints
from core.types.prefixes import PrefixChange, PrefixRemoved, PrefixStored

MAX_UNREAD_PAGES = 65_536
"""Pages that a watch keeps unread: about 0.5 MiB of page numbers, and ids that the cache may have given up by then."""


class CachedPrefixWatch:
    """The `PrefixWatch` of `core.engine.api`: `CachedPrefixes` adds changes, one task reads them."""

    def __init__(
        self,
        page_size: int,
        contents: Sequence[PrefixStored],
        close: Callable[[CachedPrefixWatch], None],
        max_unread: int = MAX_UNREAD_PAGES,
    ) -> None:
        self.page_size = page_size
        self.contents = contents
        self._close = close
        self._max_unread = max_unread
        self._changes: deque[PrefixChange] = deque()
        self._unread = 0
        self._lost = False
        self._news = asyncio.Event()

    def add(self, change: PrefixChange) -> None:
        """Append one change. Past the bound everything unread is dropped, and the watch is over."""
        if self._lost:
            return
        self._changes.append(change)
        self._unread += len(change.pages)
        if self._unread > self._max_unread:
            self._lost = True
            self._changes.clear()
            self.close()
        self._news.set()

    async def changes(self) -> Sequence[PrefixChange]:
        """Changes since the last call, in order; waits for at least one.

        Raises SlowConsumer, now and on every later call, once changes were dropped.
        """
        await self._news.wait()
        if self._lost:
            raise SlowConsumer("the prefix cache changed more than was read; subscribe again")
        self._news.clear()
        read, self._changes, self._unread = self._changes, deque(), 0
        return read

    def close(self) -> None:
        """Stop following the cache. Idempotent."""
        self._close(self)


class CachedPrefixes:
    """The `Prefixes` of `core.engine.api`, and the cache's `PrefixObserver` while there are watches."""

    def __init__(self, scheduler: Scheduler, adapters: AdapterTable, refuse_unless_ready: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._memory = scheduler.memory
        self._adapters = adapters
        self._refuse_unless_ready = refuse_unless_ready
        self._watches: dict[CachedPrefixWatch, str] = {}
        """Watch -> the namespace that it follows."""

    def watch(self, cache_salt: str) -> CachedPrefixWatch:
        """Follow what requests with `cache_salt` and no adapter would find.

        Raises Unsupported when the engine has no prefix cache.
        """
        cache = self._memory.cache
        if not cache.observe(self):
            raise Unsupported("this server keeps no prefixes (prefix_cache is none)")
        salt = cache.namespace(self._adapters.salt(NONE_SLOT, cache_salt), None)
        watch = CachedPrefixWatch(self._memory.page_size, cache.contents(salt), self._forget)
        self._watches[watch] = salt
        return watch

    def flush(self, tenant: str | None = None) -> int:
        """Give up every cached page, of `tenant` or of all, that no request holds; returns how many.

        Raises Draining or EngineDead.
        """
        self._refuse_unless_ready()
        return self._scheduler.flush(tenant)

    def stored(self, salt: str, change: PrefixStored) -> None:
        """Add pages that the cache took over to the watches that follow the namespace `salt`."""
        # A copy, because a watch past its bound closes itself, which takes it out of the table.
        for watch, followed in list(self._watches.items()):
            if followed == salt:
                watch.add(change)

    def removed(self, pages: Ints) -> None:
        """Add `pages`, int64[n], to every watch: a cached node does not know its namespace, a reader knows its own."""
        change = PrefixRemoved(pages)
        for watch in list(self._watches):
            watch.add(change)

    def _forget(self, watch: CachedPrefixWatch) -> None:
        self._watches.pop(watch, None)
        if not self._watches:
            self._memory.cache.observe(None)
