"""An asyncio event loop without a clock and without an operating system: time jumps to whatever comes next.

What asyncio promises is kept, because production may lean on it: callbacks of `call_soon` run in the order they were
given, timers never before their time, and what one pass makes ready waits for the next pass. What asyncio leaves open
is drawn from the seed: the order of timers that are due at one instant, and everything that comes from outside the loop
(threads, pipes), which arrives here as a timer with a drawn delay. Delays are multiples of `GRAIN`, so that what
happens at different places often happens at one instant.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable
from contextvars import Context
from typing import Any

GRAIN = 0.001
"""Seconds. Small against a step, and no smaller: what never meets at one instant is never permuted."""


class Deadlock(Exception):
    """Nothing is ready, no timer runs, and the run is not over."""


class Overdue(Exception):
    """The run should have been over by now."""


class Unseen(Exception):
    """An exception that was neither caught nor looked at."""


class _Timer(asyncio.TimerHandle):
    """Ordered by its instant, then by a number that was drawn for it."""

    __slots__ = ("drawn",)
    drawn: float

    def __lt__(self, other: Any) -> bool:
        return (self._when, self.drawn) < (other._when, other.drawn)  # type: ignore[attr-defined]


class _Jump:
    """What stands where a selector would: with nothing ready, time goes on to the next timer."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        loop = self._loop
        loop.passes += 1
        if loop.fatal is not None:
            raise loop.fatal
        if loop.passes > loop.most_passes:
            raise Overdue(f"{loop.passes} passes of the loop")
        if timeout is None:
            raise Deadlock("nothing is ready and no timer runs")
        if timeout > 0:
            loop.now += timeout
        if loop.now > loop.until:
            raise Overdue(f"{loop.now:.1f} s")
        return []

    def close(self) -> None:
        """There is nothing to close."""


class VirtualLoop(asyncio.BaseEventLoop):
    """`now` is its clock. `until` and `most_passes` bound a run: past them it raises Overdue, and never hangs."""

    def __init__(self, rng: random.Random, until: float = 1e9, most_passes: int = 1 << 60) -> None:
        super().__init__()
        self.now, self.passes = 0.0, 0
        self.until, self.most_passes = until, most_passes
        self.fatal: BaseException | None = None
        """Set by the run when it has seen enough: raised before the next callback."""
        self.forgiving = False
        """The run is over, and what is thrown away may complain."""
        self._rng = rng
        self._selector = _Jump(self)
        # Sums of delays would else miss each other by a rounding error; a tenth of a grain is one instant.
        self._clock_resolution = GRAIN / 10
        self.set_exception_handler(self._complained)

    def time(self) -> float:
        """The virtual clock."""
        return self.now

    def stall(self, seconds: float) -> None:
        """The callback that runs now takes so long: a collection of garbage, a page fault, a neighbour on the core."""
        self.now += seconds

    def delay(self, most: float) -> float:
        """A drawn number of grains, at least one and at most `most` seconds."""
        return GRAIN * (1 + int(self._rng.random() * (most / GRAIN)))

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        """As asyncio's, with a drawn order among equals."""
        self._check_closed()
        timer = _Timer(when, callback, args, self, context)
        timer.drawn = self._rng.random()
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        """From another thread, as far as the loop can tell: it comes some time later, between other things."""
        return self.call_later(self.delay(0.004), callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Work of another thread, done here when its turn has come. `executor` is a `threads.Pool`."""
        future: asyncio.Future[Any] = executor.hand_over(func, *args)
        return future

    def _complained(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What asyncio would have logged: an exception of a callback, or one that no task looked at."""
        if self.fatal is None and not self.forgiving:
            error = context.get("exception")
            self.fatal = error if isinstance(error, AssertionError) else Unseen(f"{context['message']}: {error!r}")

    def _check_closed(self) -> None:
        if not self.forgiving:
            super()._check_closed()

    def _process_events(self, event_list: list[Any]) -> None:
        """Nothing comes from a selector."""

    def _write_to_self(self) -> None:
        """No task sleeps in a system call."""
