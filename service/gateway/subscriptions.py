"""The subscribers to the prefix cache: their number, the speed at which they must read, and how they are ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from typing import Any

import grpc.aio

from core.engine.api import PrefixWatch
from core.errors import Draining, Overloaded, SlowConsumer
from service.access.caller import caller_of
from service.calls.open_calls import OpenCalls
from service.gateway.dialect import Load
from service.gateway.kv_events import KvEvents
from service.rpc.write_timeout import WriteBound

MAX_SUBSCRIBERS = 16
MAX_OF_ONE = 4
"""Subscriptions of one caller: of one name, or of one address where callers have no names. A gateway needs one."""
HEARTBEAT_SECONDS = 1.0
GATHER_SECONDS = 0.02
"""Seconds of changes that go into one batch: a decode step stores a page now and then, and takes milliseconds."""

Context = grpc.aio.ServicerContext[Any, Any]


class Subscriptions:
    """Every SubscribeKvEvents call of a server, of all its dialects."""

    def __init__(self, calls: OpenCalls, load: Callable[[], Awaitable[Load]]) -> None:
        self._calls = calls
        self._load = load
        self._open: dict[asyncio.Timeout, str] = {}
        """By the bound that ends a subscription: the caller that holds it."""
        self._closed = False

    async def serve(self, start: int, context: Context) -> None:
        """Write batches until the client goes, reads too slowly, or the server closes.

        A caller sees the blocks that its own requests can find, and no other caller's prompts. Raises Overloaded,
        SlowConsumer, Draining, and what `OpenCalls.watch_prefixes` does.
        """
        async with self._held(caller_of(context)):
            with closing(await self._calls.watch_prefixes()) as watch:
                try:
                    await self._write(watch, KvEvents(watch.page_size, start), context)
                except SlowConsumer:
                    self._calls.metrics.slow_consumer()
                    raise

    async def _write(self, watch: PrefixWatch, events: KvEvents, context: Context) -> None:
        load = self._load
        async with WriteBound(self._calls.config.write_timeout) as bound:

            async def write(batch: Any) -> None:
                bound.begin()
                await context.write(batch)
                bound.end()
                # A write that does not have to wait lets no other task run, and a large cache has many batches.
                await asyncio.sleep(0)

            for batch in events.snapshot(watch.contents, await load()):
                await write(batch)
            while True:
                try:
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        changes = await watch.changes()
                except TimeoutError:
                    await write(events.heartbeat(await load()))
                    continue
                for batch in events.changes(changes, await load()):
                    await write(batch)
                await asyncio.sleep(GATHER_SECONDS)

    @asynccontextmanager
    async def _held(self, holder: str) -> AsyncIterator[None]:
        """Hold one place among the subscribers. Raises Overloaded without a free place, and Draining on close."""
        if self._closed:
            raise Draining("the server is shutting down")
        if sum(each == holder for each in self._open.values()) >= MAX_OF_ONE:
            told = f"at most {MAX_OF_ONE} subscriptions of one caller"
            raise Overloaded(told, reason="SUBSCRIBERS", retry_after=10.0)
        if len(self._open) >= MAX_SUBSCRIBERS:
            raise Overloaded(f"at most {MAX_SUBSCRIBERS} subscribers", reason="SUBSCRIBERS", retry_after=10.0)
        bound = asyncio.timeout(None)
        self._open[bound] = holder
        try:
            async with bound:
                yield
        except TimeoutError:
            if not bound.expired():
                raise
            raise Draining("the server is shutting down") from None
        finally:
            del self._open[bound]

    def close(self) -> None:
        """End all subscriptions: an open stream would hold up the transport's stop. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for bound in self._open:
            bound.reschedule(asyncio.get_running_loop().time())
