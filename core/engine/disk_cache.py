"""Prefixes in files: opens the directory, and has requests wait for what is read from there. Loop thread only."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from typing import Final

from core.config import EngineConfig, MemoryConfig
from core.disk.chunk_store import ChunkStore, check_directory
from core.engine.build_pools import Pools
from core.engine.disagg import LEAST_HOST_BYTES, facts_of
from core.memory.usable_prefix import usable_prefix
from core.models.base import ModelSpec
from core.scheduler.disk_prefixes import DiskPrefixes
from core.scheduler.file_names import Lasting
from core.scheduler.file_places import Fetch
from core.scheduler.scheduler import Scheduler
from core.types.request import Req

log = logging.getLogger(__name__)

PATIENCE: Final = 5.0
"""Seconds that a request waits for files, in which it could be computed."""


def with_disk(memory: MemoryConfig) -> MemoryConfig:
    """`memory`, with host memory where files need it. Raises ConfigError for a directory that cannot be used."""
    if memory.disk_cache is None:
        return memory
    check_directory(Path(memory.disk_cache))
    return dataclasses.replace(memory, host_cache_bytes=memory.host_cache_bytes or LEAST_HOST_BYTES)


def stamp_of(config: EngineConfig, spec: ModelSpec, pools: Pools) -> str:
    """What must be the same where keys in files are to mean the same to another process.

    Beside what engines of two roles compare: when the weights were written, since others may be put in their place.
    """
    folder, model = Path(config.model.path), config.model
    files = [(each.name, each.stat().st_mtime_ns) for each in sorted(folder.glob("*.safetensors"))]
    chosen = (model.native, model.deterministic, config.speculation.method, model.weight_version)
    facts = {**facts_of(config, spec, pools), "files": files, "chosen": chosen, "slipstream": version("slipstream")}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def build_disk_cache(config: EngineConfig, spec: ModelSpec, pools: Pools) -> DiskCache:
    """As configured. Raises ConfigError for a directory that cannot be used."""
    memory, table = config.memory, pools.adapters.table
    if memory.disk_cache is None:
        return DiskCache()
    store = ChunkStore(Path(memory.disk_cache), memory.disk_cache_bytes)
    return DiskCache(store, Lasting(stamp_of(config, spec, pools), table.lasting, table.tenant))


class DiskCache:
    """Files for prefixes of one engine, or none; `attach` it before requests come."""

    def __init__(self, store: ChunkStore | None = None, lasting: Lasting | None = None) -> None:
        """Without them nothing is kept in files."""
        self._store = store
        self._lasting = lasting
        self._scheduler: Scheduler | None = None
        self._wake: Callable[[], None] = lambda: None
        self._disk: DiskPrefixes | None = None
        self._reading: dict[str, asyncio.Future[None]] = {}
        """By the name of its first chunk, each fetch that is under way."""

    def attach(self, wake: Callable[[], None], scheduler: Scheduler) -> None:
        """`wake`: of the engine's loop, from any thread."""
        if self._store is None or self._lasting is None:
            return
        self._scheduler, self._wake = scheduler, wake
        if scheduler.host_cache is not None:
            self._disk = scheduler.host_cache.write_to(self._store, self._lasting, wake)
        if self._disk is None:
            log.warning("disk_cache is unused: no prefixes of this model are in host memory")

    @property
    def is_used(self) -> bool:
        """Whether files may have anything."""
        return self._disk is not None

    async def fetch(self, req: Req) -> None:
        """Return once all that files have of the prompt of `req`, and memory has not, is in host memory.

        As much as there is room for. Nothing is lost where it cannot be read: it is computed then.
        """
        disk = self._disk
        while disk is not None and (fetch := self._wanted(disk, req)) is not None:
            if (other := self._reading.get(fetch.names[0])) is None:
                if disk.reserve(fetch):
                    await self._read(disk, fetch)
                return
            # Two requests with one beginning: the second finds what the first has read.
            if not (await asyncio.wait([other], timeout=PATIENCE))[0]:
                return

    def close(self) -> None:
        """Leave the directory to the next process. Blocks for a moment. Idempotent."""
        if self._disk is not None:
            self._disk.close()
        elif self._store is not None:
            self._store.close()
        self._disk = self._store = None

    def _wanted(self, disk: DiskPrefixes, req: Req) -> Fetch | None:
        scheduler = self._scheduler
        # The pools may be lent, or about to be.
        if scheduler is None or scheduler.held or not req.reuses_prefix:
            return None
        memory, limit = scheduler.memory, req.usable(len(req.prompt) - 1)
        if disk.has_endings:
            found = usable_prefix(memory.cache, memory.companions, req.prompt, limit, req.salt, req.usable)
            return disk.begin_all(req.prompt, req.salt, req.usable, len(found[0].pages) * memory.page_size)
        return disk.begin(req.prompt, req.salt, limit, memory.cache.peek(req.prompt, limit, req.salt))

    async def _read(self, disk: DiskPrefixes, fetch: Fetch) -> None:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        done = self._reading[fetch.names[0]] = loop.create_future()

        def over(whole: int) -> None:
            disk.end(fetch, whole)
            del self._reading[fetch.names[0]]
            done.set_result(None)
            # An engine that is to be still waits for this.
            self._wake()

        try:
            disk.prepare(fetch, ready.set)
            await ready.wait()
        except BaseException:
            over(0)
            raise
        # However this ends: threads write into the blocks until then.
        disk.read(fetch).add_done_callback(lambda reads: _soon(loop, over, _count(reads)))
        if not (await asyncio.wait([done], timeout=PATIENCE))[0]:
            log.warning("disk_cache: nothing was read in %.0f s; a prompt is computed", PATIENCE)


def _soon(loop: asyncio.AbstractEventLoop, over: Callable[[int], None], whole: int) -> None:
    # An engine that has ended takes note of nothing.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(over, whole)


def _count(reads: Future[int]) -> int:
    return 0 if reads.cancelled() else reads.result()
