"""Requests that are not queued yet: being tokenised, or waiting for their constraint. They can be ended meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from core.errors import DeadlinePassed, RequestAborted, SlipstreamError

T = TypeVar("T")


class Arrivals:
    """Requests that are being tokenised or compiled. Used on the loop thread."""

    def __init__(self) -> None:
        self._ended: dict[str, asyncio.Future[SlipstreamError]] = {}
        """Request id -> future that, once set, holds the error to raise."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ended

    @contextmanager
    def entered(self, request_id: str) -> Iterator[None]:
        """Let the request be ended while the block runs. Raises what it was ended with, even if the block succeeded."""
        ended = self._ended[request_id] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._ended[request_id]
        if ended.done():
            raise ended.result()

    def abort(self, request_id: str) -> bool:
        """End the request with RequestAborted; returns whether it is arriving."""
        ended = self._ended.get(request_id)
        if ended is None:
            return False
        if not ended.done():
            ended.set_result(RequestAborted("the request was aborted"))
        return True

    def end_all(self, error: SlipstreamError) -> None:
        """End every arriving request with `error`."""
        for ended in self._ended.values():
            if not ended.done():
                ended.set_result(error)

    async def wait(self, request_id: str, work: Awaitable[T], deadline: float | None) -> T:
        """The result of `work`: a compiled constraint, images that were read. `deadline`: `time.monotonic` seconds.

        Raises what the request is ended with, and DeadlinePassed when `deadline` passes first. Cancels `work` then.
        """
        task, ended = asyncio.ensure_future(work), self._ended[request_id]
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            await asyncio.wait((task, ended), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise ended.result()
            if not task.done():
                raise DeadlinePassed("the deadline passed before the request was queued")
            return task.result()
        finally:
            task.cancel()
            if task.done() and not task.cancelled():
                # Retrieved, because asyncio logs an exception that nothing has asked for.
                task.exception()
