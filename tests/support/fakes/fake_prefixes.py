"""The prefix cache of an engine without one: the test says what it holds and what changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from core.types.prefixes import PrefixChange, PrefixStored


def stored(parent: int, pages: Sequence[int], page_size: int = 4) -> PrefixStored:
    """Pages with ids that count up from a thousandfold of the first."""
    ids = np.arange(len(pages) * page_size) + 100 * pages[0]
    return PrefixStored(parent, ids, np.array(pages))


class FakeWatch:
    """See `core.engine.api.PrefixWatch`. What is put into `queue` is read, errors are raised."""

    page_size = 4

    def __init__(self, contents: Sequence[PrefixStored]) -> None:
        self.contents = contents
        self.queue: asyncio.Queue[Sequence[PrefixChange] | Exception] = asyncio.Queue()
        self.closed = False

    async def changes(self) -> Sequence[PrefixChange]:
        """The next of the queue."""
        found = await self.queue.get()
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """Remembered."""
        self.closed = True


class FakePrefixes:
    """See `core.engine.api.Prefixes`."""

    def __init__(self) -> None:
        self.contents: dict[str, list[PrefixStored]] = {}
        self.watches: list[FakeWatch] = []
        self.flushed: list[str | None] = []
        """Whose pages, call by call."""

    def watch(self, cache_salt: str) -> FakeWatch:
        """A watch of what the test put there."""
        self.watches.append(FakeWatch(self.contents.get(cache_salt, [])))
        return self.watches[-1]

    @property
    def flushes(self) -> int:
        """How many there were."""
        return len(self.flushed)

    def flush(self, tenant: str | None = None) -> int:
        """Always three pages."""
        self.flushed.append(tenant)
        return 3
