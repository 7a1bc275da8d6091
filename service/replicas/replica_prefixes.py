"""The prefix caches of all replicas as one: `Prefixes` of `core.engine.api`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from core.errors import SlowConsumer
from core.types.prefixes import PrefixChange, PrefixRemoved, PrefixStored
from service.frontends.remote_prefixes import RemotePrefixWatch
from service.replicas.standing import Members, done_in_all, in_all


class ReplicaPrefixWatch:
    """A `PrefixWatch` over those of all replicas. Their pages are told apart: page p of place i of n is p * n + i.

    It ends, as that of a reader that was too slow does, when a replica comes, goes or falls silent: the reader then
    begins anew.
    """

    def __init__(self, watches: Mapping[int, RemotePrefixWatch], count: int, changed: asyncio.Event) -> None:
        self._watches, self._count, self._changed = watches, count, changed
        self.page_size = next(iter(watches.values())).page_size
        self.contents: Sequence[PrefixStored] = [
            self._stored(stored, place) for place, watch in watches.items() for stored in watch.contents
        ]
        self._asking: dict[int, asyncio.Task[Sequence[PrefixChange]]] = {}

    async def changes(self) -> Sequence[PrefixChange]:
        """Changes since the last call; waits for at least one. Raises SlowConsumer."""
        for place, watch in self._watches.items():
            if place not in self._asking:
                self._asking[place] = asyncio.ensure_future(watch.changes())
        gone = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait((*self._asking.values(), gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if self._changed.is_set():
            raise SlowConsumer("the engines of this server have changed: subscribe again")
        found: list[PrefixChange] = []
        for place in [place for place, task in self._asking.items() if task.done()]:
            for change in self._asking.pop(place).result():
                if isinstance(change, PrefixStored):
                    found.append(self._stored(change, place))
                else:
                    found.append(PrefixRemoved(change.pages * self._count + place))
        return found

    def _stored(self, change: PrefixStored, place: int) -> PrefixStored:
        # 0 stands for no parent, whatever the place; no page has this number.
        parent = change.parent and change.parent * self._count + place
        return replace(change, parent=parent, pages=change.pages * self._count + place)

    def close(self) -> None:
        """End the watches. Idempotent."""
        for task in self._asking.values():
            task.cancel()
        self._asking.clear()
        for watch in self._watches.values():
            watch.close()


def _close(opened: asyncio.Future[tuple[dict[int, RemotePrefixWatch], dict[int, BaseException]]]) -> None:
    """Close the watches of a caller that has left."""
    if not opened.cancelled() and opened.exception() is None:
        for watch in opened.result()[0].values():
            watch.close()


class ReplicaPrefixes:
    """`changed` is the event of the next replica that comes or goes. `on_flush` is called when all is flushed."""

    def __init__(
        self, members: Members, count: int, changed: Callable[[], asyncio.Event], on_flush: Callable[[], None]
    ) -> None:
        self._members, self._count, self._changed, self._on_flush = members, count, changed, on_flush

    async def watch(self, cache_salt: str) -> ReplicaPrefixWatch:
        """Follow all caches. Raises Unsupported without a prefix cache, EngineDead without a replica."""
        changed = self._changed()
        opening = asyncio.ensure_future(
            in_all(self._members, lambda engine: engine.prefixes.watch(cache_salt), changes=False)
        )
        try:
            watches, errors = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close)
            raise
        for error in errors.values():
            for watch in watches.values():
                watch.close()
            raise error
        return ReplicaPrefixWatch(watches, self._count, changed)

    async def flush(self, tenant: str | None = None) -> int:
        """Give up every cached page that no request holds, in all replicas. Returns their number."""
        if tenant is None:
            self._on_flush()
        flushed = await done_in_all(self._members, lambda engine: engine.prefixes.flush(tenant))
        return sum(flushed)
