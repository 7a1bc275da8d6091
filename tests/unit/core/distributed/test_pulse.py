"""A rank of another machine that gives no sign of life is noticed, and one that does is not."""

from __future__ import annotations

import threading
import time

import pytest

from core.distributed import pulse as module
from core.distributed.pulse import PERIOD, SILENT_SECONDS, Pulse


class Kept:
    """A store in this process, in which rank 1 counts while `alive`."""

    def __init__(self) -> None:
        self.words: dict[str, str] = {}
        self.alive = True
        self.count = 0
        self.asked = threading.Condition()

    def set(self, name: str, value: str) -> None:
        self.words[name] = value

    def get(self, name: str) -> bytes:
        with self.asked:
            self.count += self.alive
            self.asked.notify_all()
        return str(self.count).encode()


def looked(pulse: Pulse, seconds: float, begin: float = 0.0) -> str | None:
    """What the last of as many looks finds as there are in so many seconds."""
    found = None
    for count in range(int(seconds / PERIOD)):
        found = pulse.silent(begin + (count + 1) * PERIOD)
    return found


def test_a_rank_that_says_nothing_is_lost_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "monotonic", lambda: 0.0)
    pulse = Pulse(Kept(), 0, {1: "rank 1 at here"})
    assert looked(pulse, SILENT_SECONDS) is None
    assert pulse.silent(SILENT_SECONDS + PERIOD) == "rank 1 at here"


def test_a_process_that_was_stopped_blames_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock is far ahead, and signs came meanwhile that it has not seen yet."""
    monkeypatch.setattr(module.time, "monotonic", lambda: 0.0)
    pulse = Pulse(Kept(), 0, {1: "rank 1"})
    assert pulse.silent(1000 * SILENT_SECONDS) is None


def test_signs_are_given_and_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD", 0.001)
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.02)
    kept, begin = Kept(), time.monotonic()
    pulse = Pulse(kept, 0, {1: "rank 1"})
    pulse.start()
    with kept.asked:
        assert kept.asked.wait_for(lambda: kept.count > 3, 10)
    assert int(kept.words["beat-0"]) >= 2
    for look in range(60):
        with kept.asked:
            seen = kept.count
            assert kept.asked.wait_for(lambda seen=seen: kept.count > seen + 1, 10)  # type: ignore[misc]
        assert pulse.silent(begin + 10 + look * 0.001) is None
    pulse.stop()


def test_silence_ends_what_waits_for_that_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD", 0.001)
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.05)
    kept, ended = Kept(), threading.Event()
    kept.alive = False
    pulse = Pulse(kept, 1, {0: "rank 0"})
    pulse.start()
    pulse.end_when_silent(ended.set)
    assert ended.wait(10)


def test_a_rank_that_has_ended_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD", 0.001)
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.0)
    pulse = Pulse(Kept(), 1, {0: "rank 0"})
    pulse.stop()
    before = set(threading.enumerate())
    pulse.end_when_silent(lambda: pytest.fail("it has ended"))
    for each in set(threading.enumerate()) - before:
        each.join(10)


def test_a_watch_that_is_over_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD", 0.001)
    kept, looks, ended, begun = Kept(), list[float](), list[str](), threading.Event()
    pulse, before = Pulse(kept, 0, {1: "rank 1"}), set(threading.enumerate())

    def silent(now: float) -> str | None:
        looks.append(now)
        if len(looks) < 3:
            return None
        assert begun.wait(10), "the watch looks before its end has a name"
        over()
        return "rank 1" if len(looks) > 3 else None

    monkeypatch.setattr(pulse, "silent", silent)
    over = pulse.end_when_silent(lambda: ended.append("rank 1"))
    begun.set()
    for each in set(threading.enumerate()) - before:
        each.join(10)
    assert len(looks) == 3 and ended == []
    pulse.start()
    with kept.asked:
        assert kept.asked.wait_for(lambda: kept.count > 3, 10), "signs go on"
    pulse.stop()


def test_a_store_that_is_gone_is_no_error_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    class Gone(Kept):
        def set(self, name: str, value: str) -> None:
            raise RuntimeError("connection reset")

    before = set(threading.enumerate())
    Pulse(Gone(), 1, {0: "rank 0"}).start()
    for each in set(threading.enumerate()) - before:
        each.join(10)
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR", "CRITICAL")]
