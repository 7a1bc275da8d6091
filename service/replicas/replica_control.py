"""Holds all replicas still, and changes the weights of all: `Control` of `core.engine.api`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from core.errors import Overloaded
from core.types.control import CONTROL_BUSY, Activity, Nap, WeightSource, WeightUpdate
from service.checkpoints.model_name import pinned
from service.engine.builder import in_daemon_thread
from service.replicas.standing import Members, Standing, done_in_all, to_its_end

Done = TypeVar("Done")


class ReplicaControl:
    """Each call is done in all replicas, and then again in each that starts.

    `updates` and `failures` count calls of `update_weights`: replicas count those that were done again too.
    """

    def __init__(self, members: Members, standing: Standing, on_weights: Callable[[], None]) -> None:
        """`on_weights` is called when there are new ones: what was computed with the old ones is forgotten."""
        self.updates = self.failures = 0
        self._members, self._standing, self._on_weights = members, standing, on_weights
        self._told: Callable[[Activity], None] | None = None
        self._known = Activity.SERVING
        self._fetch: Callable[[str], Path] | None = None
        self._busy = False

    def follow(self, told: Callable[[Activity], None]) -> None:
        """Call `told` now, and whenever what they do together changes."""
        self._told = told
        told(self._known)

    def heard(self, activity: Activity) -> None:
        """Take what they do together now."""
        changed, self._known = activity is not self._known, activity
        if changed and self._told is not None:
            self._told(activity)

    def fetch_by(self, fetch: Callable[[str], Path]) -> None:
        """Fetch weights by name here first, so that replicas find them and do not all fetch the same files."""
        self._fetch = fetch

    async def pause(self, *, ends: bool = False) -> int:
        """See `Control`. The number is that of all replicas."""

        async def paused() -> int:
            streams = await done_in_all(self._members, lambda engine: engine.control.pause(ends=ends))
            self._standing.paused = ends
            return sum(streams)

        return await self._standing.alone(paused())

    async def resume(self) -> None:
        """See `Control`."""

        async def resumed() -> None:
            await done_in_all(self._members, lambda engine: engine.control.resume())
            self._standing.paused = None

        await self._standing.alone(resumed())

    async def update_weights(self, source: WeightSource, version: str) -> WeightUpdate:
        """See `Control`. Fails where no replica could take the weights, and then nothing has changed.

        Where some could, the others are started again with them: a server has one version of its weights.
        """
        return await self._busily(lambda: self._updated(source, version))

    async def _updated(self, source: WeightSource, version: str) -> WeightUpdate:
        self.failures += 1
        fetch = self._fetch
        if source.name and fetch is not None:
            # Not in turn: it may take minutes, in which engines end and start.
            directory = await in_daemon_thread(lambda: fetch(source.name))
            # A branch may move before the last of them asks, or before one starts again.
            source = replace(source, name=pinned(source.name, directory))
        each = await self._standing.in_turn(self._taken(source, version))
        self.updates, self.failures = self.updates + 1, self.failures - 1
        return WeightUpdate(
            version,
            each[0].replaced,
            load_seconds=max(update.load_seconds for update in each),
            held_seconds=max(update.held_seconds for update in each),
            restarted=sum(update.restarted for update in each),
        )

    async def _taken(self, source: WeightSource, version: str) -> Sequence[WeightUpdate]:
        answers = await done_in_all(self._members, lambda engine: engine.control.update_weights(source, version))
        self._standing.weights = source, version
        self._on_weights()
        return answers

    async def sleep(self) -> Nap:
        """See `Control`."""

        async def slept() -> Nap:
            naps = await done_in_all(self._members, lambda engine: engine.control.sleep())
            self._standing.asleep = True
            self._on_weights()
            return Nap(sum(nap.freed_bytes for nap in naps), sum(nap.live_requests for nap in naps))

        return await self._busily(lambda: self._standing.in_turn(slept()))

    async def wake(self) -> None:
        """See `Control`."""

        async def woken() -> None:
            await done_in_all(self._members, lambda engine: engine.control.wake())
            self._standing.asleep = False

        await self._busily(lambda: self._standing.in_turn(woken()))

    async def _busily(self, work: Callable[[], Coroutine[Any, Any, Done]]) -> Done:
        """The result of `work`, beside which nothing else of the kind is begun. Raises Overloaded beside another."""
        if self._busy:
            raise Overloaded("weights are being changed, or the engines fall asleep or wake", reason=CONTROL_BUSY)
        self._busy = True

        async def in_the_end() -> Done:
            try:
                return await work()
            finally:
                self._busy = False

        return await to_its_end(in_the_end())
