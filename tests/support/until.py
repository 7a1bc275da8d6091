"""Waiting for what no event tells of: bounded, and past the bound a failure of the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE = 10.0
"""Seconds after which something that should have happened in this process counts as missing."""

TURNS = 100
"""Looks at first, one each turn of the loop: what needs nothing but the loop has come by then, and is not passed by."""

PAUSE = 0.002
"""Seconds between later looks: threads and other processes need the processor too."""


async def until(condition: Callable[[], object], within: float = PATIENCE) -> None:
    """Let the loop run until `condition` holds; AssertionError after `within` seconds."""
    end, looks = time.monotonic() + within, 0
    while not condition():
        assert time.monotonic() < end, f"within {within:g} s the condition did not hold"
        await asyncio.sleep(0 if looks < TURNS else PAUSE)
        looks += 1


def eventually(condition: Callable[[], object], within: float = 3 * PATIENCE) -> None:
    """`until` where no loop runs: what is waited for is the work of threads or other processes, which takes longer."""
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end, f"within {within:g} s the condition did not hold"
        time.sleep(0.01)


async def turns(count: int) -> None:
    """Let the loop turn so often: tasks that can go on have done so. For showing that one of them could not."""
    for _ in range(count):
        await asyncio.sleep(0)
