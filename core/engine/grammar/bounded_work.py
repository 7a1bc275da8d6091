"""Waits for work that cannot be interrupted, until the work has used up its seconds of processor time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from core.engine.grammar.compile_queue import FULL
from core.errors import Overloaded

T = TypeVar("T")

PATIENCE = 10
"""How often unfinished work is looked at before the wait ends. Each look comes after the seconds that the work has
left, so work that gets no core at all is waited for ten times its seconds."""


class TookTooLong(Exception):
    """The work has used up its seconds."""


async def within(asked: asyncio.Future[T], used: Callable[[], float], seconds: float) -> T:
    """The result of `asked`, whose work may take `seconds` of processor time; `used()` is what it has taken so far.

    The clock bounds only the wait, because it goes on while a loaded machine has no core for the work. Raises
    TookTooLong when the seconds are used up, Overloaded when the wait ended before, and what `asked` raises. `asked` is
    cancelled on every path.
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
            # With a few milliseconds left, the work would be looked at every few milliseconds.
            left = max(left, seconds / 4)
        return asked.result()
    finally:
        asked.cancel()
