"""Device time between two marks is in seconds, and asked for only once it is known."""

from __future__ import annotations

import time

import pytest
import torch

from core.device.timer import CudaMark, mark


class TimingEvent:
    """As `torch.cuda.Event` with timing on: milliseconds, and only of events that have passed."""

    clock = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.passed = False

    def record(self) -> None:
        self.at = TimingEvent.clock

    def synchronize(self) -> None:
        self.passed = True

    def elapsed_time(self, end: TimingEvent) -> float:
        assert end.passed, "the device has not come there yet"
        return (end.at - self.at) * 1000.0


def test_marks_of_the_device_are_seconds_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", TimingEvent)
    cuda = torch.device("cuda")
    first = mark(cuda)
    TimingEvent.clock += 0.25
    second = mark(cuda)
    assert isinstance(second, CudaMark) and second.at is None
    assert second.seconds_since(first) == pytest.approx(0.25)


def test_marks_of_the_cpu_are_those_of_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    instants = iter((10.0, 10.5))
    monkeypatch.setattr(time, "monotonic", lambda: next(instants))
    first, second = (mark(torch.device("cpu")) for _ in range(2))
    assert (first.at, second.at, second.seconds_since(first)) == (10.0, 10.5, 0.5)
