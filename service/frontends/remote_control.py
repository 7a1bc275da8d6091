"""The engine's `Control` as a front end sees it: each call asks the engine process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from core.types.control import Activity, Nap, WeightSource, WeightUpdate
from core.types.plain import to_plain
from service.frontends.plain_json import from_plain


class RemoteControl:
    """The `Control` of a front end: `call(method, ...)` answers or raises as the engine did there, or EngineDead."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call
        self._told: Callable[[Activity], None] | None = None
        self._known = Activity.SERVING

    def follow(self, told: Callable[[Activity], None]) -> None:
        """Call `told` now, and whenever a STATE frame tells of a change."""
        self._told = told
        told(self._known)

    def fetch_by(self, fetch: Callable[[str], Path]) -> None:
        """Nothing: weights are found in the engine process."""

    def heard(self, activity: Activity) -> None:
        """Take what a STATE frame said."""
        changed, self._known = activity is not self._known, activity
        if changed and self._told is not None:
            self._told(activity)

    async def pause(self, *, ends: bool = False) -> int:
        """See `Control`. The number is that of all front ends."""
        return int(await self._call("pause", ends=ends))

    async def resume(self) -> None:
        """See `Control`."""
        await self._call("resume")

    async def update_weights(self, source: WeightSource, version: str) -> WeightUpdate:
        """See `Control`."""
        done = await self._call("update_weights", source=to_plain(source), version=version)
        return from_plain(WeightUpdate, done)

    async def sleep(self) -> Nap:
        """See `Control`."""
        return from_plain(Nap, await self._call("sleep"))

    async def wake(self) -> None:
        """See `Control`."""
        await self._call("wake")
