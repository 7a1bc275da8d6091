"""Silence is counted in looks: what stood still itself, or is late, does not take the time for the other's silence."""

from __future__ import annotations

from service.frontends.heartbeat import DEAD_SECONDS, MOST_PER_LOOK, PERIOD, STALE_SECONDS, Silence


class Heard:
    """A link on which something arrives when the test says so."""

    def __init__(self) -> None:
        self.count = 0
        self.now = 100.0
        self.silence = Silence(lambda: self.count, self.now)

    def look(self, after: float = PERIOD) -> float:
        """A look, `after` seconds behind the last."""
        self.now += after
        return self.silence.look(self.now)


def test_silence_adds_up_until_something_arrives() -> None:
    heard = Heard()
    assert [heard.look() for _ in range(4)] == [PERIOD, 2 * PERIOD, 3 * PERIOD, 4 * PERIOD]
    heard.count += 1
    assert [heard.look() for _ in range(2)] == [0.0, PERIOD]


def test_an_observer_that_stood_still_has_not_seen_a_silence() -> None:
    """Stopped, suspended, or frozen together with the other process: a minute is one look."""
    heard = Heard()
    assert heard.look(60.0) == MOST_PER_LOOK < STALE_SECONDS


def test_a_look_that_is_late_counts_up_to_its_period_twice() -> None:
    """A loaded machine looks seldom; a process that is dead there is still found out in time."""
    heard = Heard()
    assert [heard.look(after * PERIOD) for after in (1.5, 2.0, 2.5)] == [1.5 * PERIOD, 3.5 * PERIOD, 5.5 * PERIOD]


def test_a_loop_that_is_busy_for_seconds_is_far_from_being_killed() -> None:
    heard = Heard()
    for _ in range(4):
        assert max(heard.look() for _ in range(int(4.0 / PERIOD))) < DEAD_SECONDS / 2
        heard.count += 1
        assert heard.look() == 0.0
