"""What clients are told of the server's state, before there is an engine, while it serves, and while it goes."""

from __future__ import annotations

import pytest

from core.engine.api import EngineState
from core.types.stats import EngineStats
from service.engine.slot import EngineSlot
from service.errors import EngineSilent, NotReady
from service.rpc.status import PUSHBACK_TRAILER, status_of
from tests.support.fakes.fake_engine import FakeEngine


def slot_with(state: EngineState | None, *, draining: bool) -> EngineSlot:
    slot = EngineSlot()
    if state is not None:
        engine = FakeEngine()
        engine.state = state
        slot.engine = engine
    slot.draining = draining
    return slot


@pytest.mark.parametrize(
    ("engine", "draining", "told"),
    [
        (None, False, EngineState.STARTING),
        (None, True, EngineState.DRAINING),
        (EngineState.READY, False, EngineState.READY),
        (EngineState.READY, True, EngineState.DRAINING),
        (EngineState.DRAINING, True, EngineState.DRAINING),
        (EngineState.DEAD, False, EngineState.DEAD),
        (EngineState.DEAD, True, EngineState.DEAD),
    ],
)
async def test_a_drain_hides_readiness_and_no_death(
    engine: EngineState | None, draining: bool, told: EngineState
) -> None:
    assert slot_with(engine, draining=draining).state is told


async def test_without_an_engine_calls_are_refused_and_figures_are_empty() -> None:
    slot = EngineSlot()
    assert (slot.stats, slot.startup_seconds, slot.drain_seconds) == (EngineStats(), 0.0, 0.0)
    with pytest.raises(NotReady, match="still being loaded"):
        slot.require()


async def test_a_silent_engine_is_not_asked() -> None:
    slot = slot_with(EngineState.READY, draining=False)
    assert slot.require() is slot.engine
    slot.silent = True
    with pytest.raises(EngineSilent) as refused:
        slot.require()
    status = status_of(refused.value)
    assert status.code.name == "UNAVAILABLE"
    assert int(dict(status.trailers).get(PUSHBACK_TRAILER, 0)) >= 1000
    slot.silent = False
    assert slot.require() is slot.engine


async def test_a_drain_is_measured_from_its_first_word(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("service.engine.slot.time.monotonic", lambda: now)
    slot = EngineSlot()
    now = 103.0
    slot.engine = FakeEngine()
    slot.draining = True
    now = 105.0
    slot.draining = True
    now = 106.0
    assert (slot.startup_seconds, slot.drain_seconds) == (3.0, 3.0)
