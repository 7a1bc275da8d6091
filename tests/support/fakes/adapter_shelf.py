"""The adapters of an engine without a model: names that come and go, nothing behind them."""

from __future__ import annotations

from functools import cached_property

from core.errors import AdapterExists, AdapterNotFound, SlipstreamError
from core.types.adapters import AdapterInfo, AdapterList, AdapterLoad


class AdapterShelf:
    """The part of `core.engine.api.Engine` that is about adapters."""

    refuse_with: SlipstreamError | Exception | None = None

    @cached_property
    def adapters(self) -> dict[str, AdapterInfo]:
        """What was loaded and not unloaded, by name."""
        return {}

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> AdapterLoad:
        """Takes any name that is not there; the path is kept nowhere."""
        if self.refuse_with is not None:
            raise self.refuse_with
        if name in self.adapters:
            raise AdapterExists("an adapter of this name is loaded")
        made = AdapterInfo(name, len(self.adapters) + 1, 8, 1000, pinned, False, 0, None)
        self.adapters[name] = made
        return AdapterLoad(made, ("older",) if path == "evicts" else ())

    def unload_adapter(self, name: str) -> int:
        """Forget it."""
        if self.adapters.pop(name, None) is None:
            raise AdapterNotFound("no adapter of this name is loaded")
        return 0

    def list_adapters(self) -> AdapterList:
        """What is there, as if each took 1000 bytes of 4000."""
        return AdapterList(tuple(self.adapters.values()), 1000 * len(self.adapters), 4000)
