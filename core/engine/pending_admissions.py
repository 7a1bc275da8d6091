"""Requests that are not queued yet: they tokenise, or wait for their constraint, and can be ended meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from core.errors import DeadlinePassed, RequestAborted, SlipstreamError

T = TypeVar("T")


class Arrivals:
    """By request id, the error that ends the request as soon as it looks. Used on the loop thread."""

    def __init__(self) -> None:
        self._ended: dict[str, asyncio.Future[SlipstreamError]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ended

    @contextmanager
    def entered(self, request_id: str) -> Iterator[None]:
        """For as long as the request arrives. Raises what it was ended with, if it got through all the same."""
        ended = self._ended[request_id] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._ended[request_id]
        if ended.done():
            raise ended.result()

    def abort(self, request_id: str) -> bool:
        """End one request; whether it is arriving."""
        ended = self._ended.get(request_id)
        if ended is None:
            return False
        if not ended.done():
            ended.set_result(RequestAborted("the request was aborted"))
        return True

    def end_all(self, error: SlipstreamError) -> None:
        """End everyone who is arriving."""
        for ended in self._ended.values():
            if not ended.done():
                ended.set_result(error)

    async def wait(self, request_id: str, work: Awaitable[T], deadline: float | None) -> T:
        """The result of `work`, unless the request is ended or its `deadline` passes first."""
        task, ended = asyncio.ensure_future(work), self._ended[request_id]
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            await asyncio.wait((task, ended), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise ended.result()
            if not task.done():
                raise DeadlinePassed("the deadline passed while the constraint was compiled")
            return task.result()
        finally:
            task.cancel()
            if task.done() and not task.cancelled():
                task.exception()
