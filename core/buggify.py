"""Places where order matters, named for a simulation; in production every one of them is a look at a None.

After FoundationDB's BUGGIFY. The simulation of the shell (`tests/sim/shell`) has things happen at these places that may
happen there and seldom do: a result arrives, the callback is held up, another task gets its turn. Only `hooked` gives
them a meaning; it is called by tests alone (`tests/tidy`), and no flag, variable or message leads to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

POINTS: tuple[str, ...] = ("planned", "before_emit")
"""Places in the middle of a callback: other threads may do something here, and time may pass."""

PAUSES: tuple[str, ...] = ("reserved", "replied", "closed")
"""Places where a task may lose its turn."""


class Hook(Protocol):
    """What a simulation does at a place; names are those of `POINTS` and `PAUSES`."""

    def point(self, name: str) -> None:
        """The callback is here now."""
        ...

    async def pause(self, name: str) -> None:
        """The task is here now, and goes on when this returns."""
        ...


_hook: Hook | None = None


def point(name: str) -> None:
    """The place `name` of `POINTS`."""
    if _hook is not None:
        _hook.point(name)


async def pause(name: str) -> None:
    """The place `name` of `PAUSES`."""
    if _hook is not None:
        await _hook.pause(name)


@contextmanager
def hooked(hook: Hook) -> Iterator[None]:
    """While the body runs, `hook` decides what happens at all places of this process."""
    global _hook
    assert _hook is None, "one simulation at a time"
    _hook = hook
    try:
        yield
    finally:
        _hook = None
