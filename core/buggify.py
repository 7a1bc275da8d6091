"""Named places in the code where order matters, for a simulation. In production each costs one comparison with None.

After FoundationDB's BUGGIFY. At these places the simulation of the shell (`tests/proofs/sim/shell`) makes events happen
that are possible there but rare: a result arrives, the callback is delayed, another task gets its turn. Only `hooked`
switches them on. Only tests call it (`tests/tidy` checks that), and no flag, variable or message leads to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

POINTS: tuple[str, ...] = ("planned", "before_emit")
"""Places in the middle of a callback: other threads may do something here, and time may pass."""

PAUSES: tuple[str, ...] = ("reserved", "replied", "closed")
"""Places where a task may lose its turn to other tasks."""


class Hook(Protocol):
    """What a simulation does at a named place of `POINTS` or `PAUSES`."""

    def point(self, name: str) -> None:
        """The callback is here now."""
        ...

    async def pause(self, name: str) -> None:
        """The task is here now, and goes on when this returns."""
        ...


_hook: Hook | None = None


def point(name: str) -> None:
    """Mark the place `name` of `POINTS`; does nothing in production."""
    if _hook is not None:
        _hook.point(name)


async def pause(name: str) -> None:
    """Mark the place `name` of `PAUSES`; does nothing in production, and does not yield to other tasks."""
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
