"""The loop is told of each copy once it has landed, and woken for it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from core.executor.landings import Landings


class Landed:
    """An event that a test fires."""

    def __init__(self) -> None:
        self.fired = threading.Event()
        self.lost = False

    def record(self, stream: Any = None) -> None:
        """Made with the copy."""

    def query(self) -> bool:
        return self.fired.is_set()

    def synchronize(self) -> None:
        assert self.fired.wait(10)
        if self.lost:
            raise RuntimeError("device lost")

    def wait(self, stream: Any = None) -> None:
        """On no stream."""


def test_a_copy_in_flight_is_told_once_it_has_landed() -> None:
    woken = threading.Semaphore(0)
    landings = Landings(woken.release)
    late, done = Landed(), Landed()
    done.fired.set()
    landings.bring(1, done)
    assert woken.acquire(timeout=10) and landings.take() == [1]
    landings.bring(2, late)
    landings.bring(3, done)
    assert landings.take() == [], "in their order"
    late.fired.set()
    assert woken.acquire(timeout=10) and woken.acquire(timeout=10)
    assert landings.take() == [2, 3] and landings.take() == []
    landings.stop()
    landings.stop()


def test_a_device_that_is_lost_under_a_copy_is_told_to_the_loop() -> None:
    """With no step in flight nothing else would tell, and the requests that wait for leased pages would hang."""
    woken = threading.Semaphore(0)
    landings, copy = Landings(woken.release), Landed()
    landings.bring(1, copy)
    copy.lost = True
    copy.fired.set()
    assert woken.acquire(timeout=10)
    with pytest.raises(RuntimeError, match="device lost"):
        landings.take()
    landings.stop()
