"""Tokenize and Detokenize calls: how many of one caller are at work at once. Each caller has its own line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.limits.admission import Admission


class TextCalls:
    """At most `at_once` calls of one caller are handed to the engine, whose threads are shared by caller in rotation.

    Further calls wait at most `max_wait` seconds, as in `Admission`. A caller's line is dropped with its last call.
    """

    def __init__(self, at_once: int, max_wait: float) -> None:
        self._at_once, self._max_wait = at_once, max_wait
        self._callers: dict[str, Admission] = {}

    @asynccontextmanager
    async def slot(self, caller: str, deadline: float | None) -> AsyncIterator[None]:
        """Hold one of the caller's places while the body runs. Raises Overloaded and DeadlinePassed."""
        mine = self._callers.get(caller)
        if mine is None:
            mine = self._callers[caller] = Admission(self._at_once, max_wait=self._max_wait)
        try:
            async with mine.slot(deadline):
                yield
        finally:
            if not (mine.open or mine.waiting):
                self._callers.pop(caller, None)
