"""What clients are told of the server's state, before there is an engine, while it serves, and while it goes."""

from __future__ import annotations

import pytest

from core.engine.api import EngineState
from core.types.stats import EngineStats
from service.engine.handle import EngineHandle
from service.errors import EngineSilent, NotReady
from service.rpc.status import PUSHBACK_TRAILER, status_of
from tests.support.fakes.fake_engine import FakeEngine


def handle_with(state: EngineState | None, *, draining: bool) -> EngineHandle:
    handle = EngineHandle()
    if state is not None:
        engine = FakeEngine()
        engine.state = state
        handle.engine = engine
    handle.draining = draining
    return handle


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
    assert handle_with(engine, draining=draining).state is told


async def test_without_an_engine_calls_are_refused_and_figures_are_empty() -> None:
    handle = EngineHandle()
    assert (handle.stats, handle.startup_seconds, handle.drain_seconds) == (EngineStats(), 0.0, 0.0)
    with pytest.raises(NotReady, match="still being loaded"):
        handle.require()


async def test_a_silent_engine_is_not_asked() -> None:
    handle = handle_with(EngineState.READY, draining=False)
    assert handle.require() is handle.engine
    handle.silent = True
    with pytest.raises(EngineSilent) as refused:
        handle.require()
    status = status_of(refused.value)
    assert status.code.name == "UNAVAILABLE"
    assert int(dict(status.trailers).get(PUSHBACK_TRAILER, 0)) >= 1000
    handle.silent = False
    assert handle.require() is handle.engine


async def test_a_drain_is_measured_from_its_first_word(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("service.engine.handle.time.monotonic", lambda: now)
    handle = EngineHandle()
    now = 103.0
    handle.engine = FakeEngine()
    handle.draining = True
    now = 105.0
    handle.draining = True
    now = 106.0
    assert (handle.startup_seconds, handle.drain_seconds) == (3.0, 3.0)
