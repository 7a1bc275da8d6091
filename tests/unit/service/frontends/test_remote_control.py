"""What holds the engine still crosses to its process and back, and a front end hears of every change."""

from __future__ import annotations

import pytest

from core.errors import Asleep
from core.types.control import Activity, WeightSource
from core.types.plain import to_plain
from service.frontends.wire import Kind
from tests.support.fakes.fake_engine import FakeEngine
from tests.unit.service.frontends.test_pair import Pair, paired


async def hears(pair: Pair, engine: FakeEngine) -> Activity:
    """What the front end knows after the engine's process has sent a STATE frame."""
    pair.host.send(
        Kind.STATE,
        {"state": "ready", "live": 0, "draining": False, "leaving": False, "stats": to_plain(engine.stats)},
    )
    await pair.settle()
    return pair.remote.stats.activity


async def test_each_call_is_answered_by_the_engines_process() -> None:
    engine = FakeEngine()
    async with paired(await engine.start()) as pair:
        control, told = pair.remote.control, list[Activity]()
        control.follow(told.append)
        assert await control.pause(ends=True) == 7 and await hears(pair, engine) is Activity.REFUSING
        assert await control.pause() == 7 and await hears(pair, engine) is Activity.PAUSED
        await control.resume()
        done = await control.update_weights(WeightSource(name="org/model"), "v2")
        assert (done.version, done.replaced, done.load_seconds, done.restarted) == ("v2", "first", 1.5, 3)
        assert engine.control.updates == [WeightSource(name="org/model")]
        assert (await control.sleep()).freed_bytes == 4096 and await hears(pair, engine) is Activity.ASLEEP
        assert pair.remote.stats.weight_version == "v2"
        with pytest.raises(Asleep):
            await control.resume()
        await control.wake()
        assert await hears(pair, engine) is Activity.SERVING
        assert await hears(pair, engine) is Activity.SERVING
    assert told == [Activity.SERVING, Activity.REFUSING, Activity.PAUSED, Activity.ASLEEP, Activity.SERVING]


async def test_a_front_end_that_follows_late_hears_what_is() -> None:
    engine = FakeEngine()
    async with paired(await engine.start()) as pair:
        await engine.control.sleep()
        await hears(pair, engine)
        told = list[Activity]()
        pair.remote.control.follow(told.append)
        assert told == [Activity.ASLEEP]
