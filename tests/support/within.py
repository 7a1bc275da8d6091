"""A bound on how long something may take, whose passing is a failure of the test and not an error in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def within(seconds: float, what: str) -> AsyncIterator[None]:
    """The body has to end within `seconds`, else AssertionError says that `what` did not happen.

    A TimeoutError that the body raises by itself stays one.
    """
    bound = asyncio.timeout(seconds)
    try:
        async with bound:
            yield
    except TimeoutError:
        if not bound.expired():
            raise
        raise AssertionError(f"within {seconds:g} s: {what}") from None
