"""The prefix cache in a front end, over the connection to the engine process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, cast

from core.types.prefixes import PrefixChange, PrefixStored
from service.frontends.prefix_watches import changes_from_plain


class EngineLink(Protocol):
    """The methods of `RemoteEngine` that the prefix cache needs."""

    async def open(self, method: str, **arguments: Any) -> tuple[int, Any]:
        """Begin a call that stays open until `end`. Returns its number and its first answer."""
        ...

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call and return the answer. Raises the error of the engine's process."""
        ...

    def end(self, number: int) -> None:
        """End the open call `number`."""
        ...


class RemotePrefixWatch:
    """The `PrefixWatch` of `core.engine.api` in a front end. One task reads."""

    def __init__(self, engine: EngineLink, number: int, page_size: int, contents: Sequence[PrefixStored]) -> None:
        self.page_size = page_size
        self.contents = contents
        self._engine, self._number = engine, number
        self._asked: asyncio.Future[list[Any]] | None = None

    async def changes(self) -> Sequence[PrefixChange]:
        """Ask the engine's process for the changes since the last call; it answers once there are some.

        A caller that is cancelled while it waits gets the same answer with its next call. Raises SlowConsumer.
        """
        if self._asked is None:
            self._asked = asyncio.ensure_future(self._engine.call("prefix_changes", of=self._number))
            self._asked.add_done_callback(_look)
        # Shielded: the engine sends each change once, so a cancelled caller must not cancel the question.
        plain = await asyncio.shield(self._asked)
        self._asked = None
        return changes_from_plain(plain)

    def close(self) -> None:
        """End the watch in the engine's process. Idempotent."""
        if self._asked is not None:
            self._asked.cancel()
        self._engine.end(self._number)


class RemotePrefixes:
    """The `Prefixes` of `core.engine.api` in a front end."""

    def __init__(self, engine: EngineLink) -> None:
        self._engine = engine

    async def watch(self, cache_salt: str) -> RemotePrefixWatch:
        """Open a watch in the engine's process and fetch its contents. Raises Unsupported without a prefix cache.

        The contents come in pieces, so that the engine's process runs steps between them.
        """
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
        """Have the engine's process drop every cached page that no request holds. Returns their number."""
        return int(await self._engine.call("flush_prefixes", tenant=tenant))


def _look(asked: asyncio.Future[list[Any]]) -> None:
    """Retrieve the error of `asked`, if it has one: no caller may be waiting, and asyncio would log it as lost."""
    if not asked.cancelled():
        asked.exception()
