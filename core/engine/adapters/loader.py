"""Loads and unloads adapters while requests stream: a thread reads the files, the loop thread changes the table.

Reading ends before anything changes, so a load that fails or is cancelled leaves no trace. A load that succeeds is a
change of the table, and one copy to the device at the start of the next step.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from core.config import ADAPTER_NAME
from core.engine.adapters.table import AdapterTable
from core.engine.workers import Workers
from core.errors import AdapterExists, AdaptersOff, InvalidRequest, ModelLoadError, Overloaded, SlipstreamError
from core.histogram import Histogram
from core.models.directory import directory_below
from core.models.lora.packed import Adapter
from core.types.adapters import AdapterLoad
from core.types.stats import EngineStats

log = logging.getLogger(__name__)

MAX_LOADS = 16
"""Loads that are read or wait to be read; each may hold a whole file in memory when its turn comes."""

ADAPTER_LOADS = "ADAPTER_LOADS"
"""The `reason` of Overloaded when there are MAX_LOADS loads."""
LOAD_SECONDS = "adapter_load_seconds"
"""Name of the histogram: seconds that each successful load took."""

Read = Callable[[Path], Adapter]
"""Reads a directory and fits it to the served model, in any thread. Raises ModelLoadError without a path in it."""


class AdapterLoader:
    """Loads adapters from below `root`. Loop thread only, but for `add_stats`.

    Without a `root` nothing can be loaded; `table` may still hold adapters that were given at start.
    """

    def __init__(self, table: AdapterTable, root: str | None = None, read: Read | None = None) -> None:
        self.table = table
        self._root = None if root is None else Path(root)
        self._read = read
        # One thread: two loads at once would want twice the memory, and no stream of a client waits for a load.
        self._workers = Workers(1, "slipstream-adapters")
        self._loading: set[str] = set()
        self._failures = 0
        self._seconds = Histogram()
        self._seconds_seen = self._seconds.stats()

    async def load(self, name: str, path: str, *, pinned: bool, still_wanted: Callable[[], None]) -> AdapterLoad:
        """Read the directory `path` (empty: `name`) below the root, and let requests ask for it as `name`.

        `still_wanted` raises when the engine stopped taking work while the files were read. Raises AdaptersOff,
        InvalidRequest, AdapterExists, Overloaded, Draining, and what `still_wanted` raises; nothing has changed then.
        """
        began = time.monotonic()
        try:
            self._refuse(name)
            self._loading.add(name)
            try:
                adapter = await self._workers.run(self._read_below, path or name)
            finally:
                self._loading.discard(name)
            still_wanted()
            info, evicted = self.table.load(name, adapter, pinned=pinned)
        except SlipstreamError:
            self._failures += 1
            raise
        seconds = time.monotonic() - began
        self._seconds.observe(np.array([seconds]))
        self._seconds_seen = self._seconds.stats()
        gone = f", evicted {', '.join(evicted)}" if evicted else ""
        log.info("loaded adapter %s: %d bytes in %.3f s%s", name, info.nbytes, seconds, gone)
        return AdapterLoad(info, evicted)

    def read_by(self, read: Read) -> None:
        """Read by `read` from now on: other weights serve, and the adapters that there are fit them as well."""
        self._read = read

    def unload(self, name: str) -> int:
        """Refuse new requests for `name`; returns how many still use it. Raises AdapterNotFound."""
        left = self.table.unload(name)
        log.info("unloaded adapter %s: %d requests still use it", name, left)
        return left

    def add_stats(self, stats: EngineStats) -> EngineStats:
        """`stats` with the figures of adapters. Callable from any thread; the figures may be of different moments."""
        return dataclasses.replace(
            stats,
            adapters_loaded=len(self.table),
            adapter_bytes=self.table.used_bytes,
            adapter_evictions=self.table.evictions,
            adapter_load_failures=self._failures,
            histograms={**stats.histograms, LOAD_SECONDS: self._seconds_seen},
        )

    def close(self) -> None:
        """End the worker thread without waiting for loads that have not begun."""
        self._workers.close()

    def _refuse(self, name: str) -> None:
        if self._root is None or self._read is None:
            raise AdaptersOff("this server loads no adapters while it serves; it was started without --lora-dir")
        if not ADAPTER_NAME.fullmatch(name):
            raise InvalidRequest.of("name", "must be 1 to 128 characters of A-Z a-z 0-9 . _ : / -")
        self.table.refuse_name(name)
        if name in self._loading:
            raise AdapterExists("an adapter of this name is being loaded")
        if len(self._loading) >= MAX_LOADS:
            raise Overloaded("too many adapters are being loaded", reason=ADAPTER_LOADS)

    def _read_below(self, path: str) -> Adapter:
        assert self._root is not None and self._read is not None, "refused before"
        try:
            return self._read(directory_below(self._root, path, "adapters"))
        except ModelLoadError as error:
            raise InvalidRequest.of("path", error.message) from error
