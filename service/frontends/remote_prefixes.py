"""The prefix cache in a front end: it can be flushed from here, and followed only where it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from core.errors import Unsupported


class RemotePrefixes:
    """The `Prefixes` of `core.engine.door` in a front end. `call` asks the engine's process."""

    def __init__(self, call: Callable[[str], Awaitable[Any]]) -> None:
        self._call = call

    def watch(self, cache_salt: str) -> NoReturn:
        """Raises Unsupported: every change of every step would go to every front end."""
        raise Unsupported("changes of the prefix cache do not cross to front ends; serve without --frontends for them")

    async def flush(self) -> int:
        """See `Prefixes.flush`."""
        return int(await self._call("flush_prefixes"))
