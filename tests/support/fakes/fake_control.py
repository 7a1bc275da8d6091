"""A `Control` without an engine: it notes what it is asked and answers with fixed figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from core.errors import Asleep, SlipstreamError
from core.types.control import Activity, Nap, WeightSource, WeightUpdate


class FakeControl:
    """See `core.engine.api.Control`. `refuse_with`: what every method raises, if it is set."""

    def __init__(self) -> None:
        self.activity, self.version = Activity.SERVING, "first"
        self.updates: list[WeightSource] = []
        self.refuse_with: SlipstreamError | None = None
        self.fetch: Callable[[str], Path] | None = None
        self._told: Callable[[Activity], None] = lambda _: None

    def follow(self, told: Callable[[Activity], None]) -> None:
        """Tell now, and at every change."""
        self._told = told
        told(self.activity)

    def fetch_by(self, fetch: Callable[[str], Path]) -> None:
        """Keep `fetch`."""
        self.fetch = fetch

    def become(self, activity: Activity) -> None:
        """Raise what is to be raised, else change."""
        if self.refuse_with is not None:
            raise self.refuse_with
        self.activity = activity
        self._told(activity)

    async def pause(self, *, ends: bool = False) -> int:
        """7 streams."""
        self.become(Activity.REFUSING if ends else Activity.PAUSED)
        return 7

    async def resume(self) -> None:
        """Serve."""
        if self.activity is Activity.ASLEEP:
            raise Asleep("wake it")
        self.become(Activity.SERVING)

    async def update_weights(self, source: WeightSource, version: str) -> WeightUpdate:
        """The version changes, and nothing else."""
        self.become(self.activity)
        self.updates.append(source)
        replaced, self.version = self.version, version
        return WeightUpdate(version, replaced, 1.5, 0.25, 3)

    async def sleep(self) -> Nap:
        """4096 bytes, 2 streams."""
        self.become(Activity.ASLEEP)
        return Nap(4096, 2)

    async def wake(self) -> None:
        """Serve."""
        self.become(Activity.SERVING)
