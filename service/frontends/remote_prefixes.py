"""The prefix cache in a front end, over the connection to the engine process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, cast

from core.types.prefixes import PrefixChange, PrefixStored
from service.frontends.prefix_watches import changes_from_plain


class EngineLink(Protocol):
    """The calls of a `RemoteEngine` that the prefix cache needs; a call that is open has a number."""

    async def open(self, method: str, **arguments: Any) -> tuple[int, Any]:
        """Begin a call: its number and its first answer."""
        ...

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call and return the answer."""
        ...

    def end(self, number: int) -> None:
        """End an open call."""
        ...


class RemotePrefixWatch:
    """The `PrefixWatch` of `core.engine.api` in a front end. One task reads."""

    def __init__(self, engine: EngineLink, number: int, page_size: int, contents: Sequence[PrefixStored]) -> None:
        self.page_size = page_size
        self.contents = contents
        self._engine, self._number = engine, number
        self._asked: asyncio.Future[list[Any]] | None = None

    async def changes(self) -> Sequence[PrefixChange]:
        """See `PrefixWatch.changes`. A reader that gives up waiting finds the answer at its next call."""
        if self._asked is None:
            self._asked = asyncio.ensure_future(self._engine.call("prefix_changes", of=self._number))
            self._asked.add_done_callback(_look)
        # What the engine has told is told once: it must not get lost with the reader's patience.
        plain = await asyncio.shield(self._asked)
        self._asked = None
        return changes_from_plain(plain)

    def close(self) -> None:
        """See `PrefixWatch`."""
        if self._asked is not None:
            self._asked.cancel()
        self._engine.end(self._number)


class RemotePrefixes:
    """The `Prefixes` of `core.engine.api` in a front end."""

    def __init__(self, engine: EngineLink) -> None:
        self._engine = engine

    async def watch(self, cache_salt: str) -> RemotePrefixWatch:
        """See `Prefixes.watch`. The state comes in pieces, between which the engine goes on with its steps."""
        number, known = await self._engine.open("watch_prefixes", cache_salt=cache_salt)
        contents: list[PrefixStored] = []
        try:
            while len(contents) < known["stored"]:
                piece = await self._engine.call("prefix_contents", of=number, start=len(contents))
                contents += cast(list[PrefixStored], changes_from_plain(piece))
        except BaseException:
            self._engine.end(number)
            raise
        return RemotePrefixWatch(self._engine, number, known["page_size"], contents)

    async def flush(self, tenant: str | None = None) -> int:
        """See `Prefixes.flush`."""
        return int(await self._engine.call("flush_prefixes", tenant=tenant))


def _look(asked: asyncio.Future[list[Any]]) -> None:
    """An engine that goes away while nobody waits is not an error that nobody looked at."""
    if not asked.cancelled():
        asked.exception()
