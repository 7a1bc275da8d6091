"""What goes wrong around the clients, and the meaning of production's named places (`core.buggify`) in a simulation."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from core.buggify import PAUSES, POINTS
from tests.proofs.sim.shell.loop import GRAIN

if TYPE_CHECKING:
    from tests.proofs.sim.shell.world import ShellWorld

BACKOFF = 0.1
"""Seconds until another front end stands in the place of one that was lost."""


class Places:
    """The `Hook` of one run."""

    def __init__(self, world: ShellWorld, rate: float, rng: random.Random) -> None:
        self._world, self._rate, self._rng = world, rate, rng

    def point(self, name: str) -> None:
        """The device finishes a step here, or the callback is held up, or both."""
        assert name in POINTS, name
        if self._rng.random() >= self._rate:
            return
        self._world.hits(f"at_{name}")
        if self._rng.random() < 0.7:
            self._world.process.device.hurry()
        if self._rng.random() < 0.5:
            self._world.loop.stall(GRAIN * self._rng.randrange(20))

    async def pause(self, name: str) -> None:
        """Others get a few turns, or some time passes."""
        assert name in PAUSES, name
        if self._rng.random() >= self._rate:
            return
        self._world.hits(f"at_{name}")
        if self._rng.random() < 0.5:
            await asyncio.sleep(self._world.loop.delay(0.02))
        else:
            for _ in range(self._rng.randrange(1, 6)):
                await asyncio.sleep(0)


class Trouble:
    """Moments, spread over the run, at which something happens to the engine or to a front end."""

    def __init__(self, world: ShellWorld, rng: random.Random) -> None:
        self._world, self._rng = world, rng

    async def run(self) -> None:
        """All of them."""
        scenario = self._world.scenario
        moments = sorted(self._rng.random() * scenario.span * 1.2 for _ in range(scenario.troubles))
        for moment in moments:
            await asyncio.sleep(max(0.0, moment - self._world.loop.now))
            if self._world.ended:
                return
            for name, act in (("nan_row", self._spoil), ("front_end_loss", self._lose), ("unload", self._unload)):
                if self._rng.random() < scenario.faults.get(name, 0.0):
                    act()

    def _spoil(self) -> None:
        self._world.process.device.spoil = self._rng.randrange(8)
        self._world.note("the next step yields a row of NaN")

    def _unload(self) -> None:
        table, loaded = self._world.process.table, sorted({"red", "green"} - self._world.unloaded)
        if loaded and len(table):
            name = self._rng.choice(loaded)
            self._world.unloaded.add(name)
            left = self._world.process.engine.unload_adapter(name)
            self._world.note(f"unload of {name}, {left} use it")
            self._world.hits("unloaded_in_use" if left else "unloaded")

    def _lose(self) -> None:
        whole = [front_end for front_end in self._world.front_ends if not front_end.doomed]
        if not whole:
            return
        front_end = self._rng.choice(whole)
        front_end.doomed = True
        if self._rng.random() < 0.5:
            front_end.cut()
            self._world.note(f"{front_end.name} is lost")
            self._world.hits("loss")
        else:
            more = self._rng.randrange(1, 400)
            front_end.cut_after(more)
            self._world.note(f"{front_end.name} is lost {more} bytes from now")
            self._world.hits("loss_at_byte")
        self._world.spawn(self._replace(front_end.name), f"{front_end.name}: replaced")

    async def _replace(self, name: str) -> None:
        """As `service.frontends.group` keeps its front ends; the old host hangs up as well."""
        while not (front_end := self._world.named(name)).host.lost:
            await asyncio.sleep(BACKOFF)
            if self._world.ended:
                return
        front_end.host.link.close()
        await asyncio.sleep(BACKOFF)
        if not self._world.ended:
            self._world.replace(front_end)
