"""Waits for work that nothing can interrupt, for as long as it has not used up its seconds of processor time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from core.engine.grammar.compile_queue import FULL
from core.errors import Overloaded

T = TypeVar("T")

PATIENCE = 10
"""Looks at work that does not end, each after the seconds that are left of it: where the machine has no core for it at
all, it takes ten times its seconds on the clock."""


class TookTooLong(Exception):
    """The work has used up its seconds."""


async def within(asked: asyncio.Future[T], used: Callable[[], float], seconds: float) -> T:
    """The result of `asked`, whose work so far is `used()` seconds of a processor.

    The clock goes on while a loaded machine has no core for the work, so it bounds only how long that is waited for.
    Raises TookTooLong, and Overloaded when the clock was the bound. `asked` is cancelled on every path.
    """
    began, looks = used(), 0
    left = seconds
    try:
        while not (await asyncio.wait((asked,), timeout=left))[0]:
            looks, left = looks + 1, seconds - (used() - began)
            if left <= 0:
                raise TookTooLong
            if looks >= PATIENCE:
                raise Overloaded("the machine has no core to compile the constraint on", reason=FULL)
            # Work of a few milliseconds that is left would be looked at that often.
            left = max(left, seconds / 4)
        return asked.result()
    finally:
        asked.cancel()
