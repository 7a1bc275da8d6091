"""A thread that is busy in Python gives the interpreter up sooner where this process writes to the clients itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from service.process.switch_interval import ENGINE_ONLY_SECONDS, WRITING_SECONDS, shorten_switch_interval


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(("writes", "seconds"), [(True, WRITING_SECONDS), (False, ENGINE_ONLY_SECONDS)])
def test_a_process_that_writes_to_clients_is_quicker_to_hand_over(writes: bool, seconds: float) -> None:
    assert WRITING_SECONDS < ENGINE_ONLY_SECONDS < 0.005
    shorten_switch_interval(writes=writes)
    assert sys.getswitchinterval() == pytest.approx(seconds)
