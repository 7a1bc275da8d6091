"""Replicas of engines that only note what is asked of them."""

from __future__ import annotations

from typing import Any

from tests.support.fakes.fake_engine import FakeEngine
from tests.support.until import until
from tests.unit.service.replicas.rig import Rig, replicas


def fakes(count: int = 2) -> Any:
    """Replicas of engines that only note what is asked of them."""
    return replicas(count, make=lambda _: FakeEngine())


def engines(rig: Rig) -> list[FakeEngine]:
    """The newest engine of each place."""
    return [engine for _, engine in sorted(rig.engines.items()) if isinstance(engine, FakeEngine)]


async def again(rig: Rig, place: int) -> FakeEngine:
    """The engine that took the place of one that was lost."""
    started = len(rig.processes)
    rig.lose(place)
    await until(lambda: len(rig.processes) > started and rig.replicas.stats.replicas[place].ready)
    return engines(rig)[place]
