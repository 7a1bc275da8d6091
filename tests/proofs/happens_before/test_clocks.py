"""The algorithm on hand-made traces: what orders two accesses, and what only seems to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.proofs.happens_before.clocks import VectorClocks

F, C = "forward stream", "copy stream"


@pytest.fixture
def clocks() -> VectorClocks:
    return VectorClocks()


@contextmanager
def on(clocks: VectorClocks, lane: str) -> Iterator[None]:
    clocks.enter(lane)
    yield
    clocks.leave()


def wrote(clocks: VectorClocks, lane: str, place: int = 1) -> None:
    with on(clocks, lane):
        clocks.wrote("kv", (place,))


def read(clocks: VectorClocks, lane: str, place: int = 1) -> None:
    with on(clocks, lane):
        clocks.read("kv", (place,))


def test_one_stream_is_an_order(clocks: VectorClocks) -> None:
    wrote(clocks, F)
    read(clocks, F)
    wrote(clocks, F)
    assert not clocks.races


def test_two_streams_are_none_and_the_story_says_who(clocks: VectorClocks) -> None:
    wrote(clocks, F)
    read(clocks, C)
    (race,) = clocks.races
    assert race.between(C, F) and race.buffer == "kv" and race.places == {1}
    assert str(race) == (
        "unordered: kv[1]\n"
        f"  {F}, outside of steps: write in wrote < test_two_streams_are_none_and_the_story_says_who\n"
        f"  {C}, outside of steps: read in read < test_two_streams_are_none_and_the_story_says_who"
    )


def test_an_event_orders_what_came_before_it(clocks: VectorClocks) -> None:
    wrote(clocks, F)
    clocks.recorded("event", F)
    clocks.awaited("event", C)
    read(clocks, C)
    assert not clocks.races
    wrote(clocks, F)
    assert [race.between(F, C) for race in clocks.races] == [True], "but not what the other stream does later"


def test_an_event_does_not_order_what_came_after_it(clocks: VectorClocks) -> None:
    clocks.recorded("event", F)
    wrote(clocks, F)
    clocks.awaited("event", C)
    read(clocks, C)
    assert len(clocks.races) == 1


def test_waiting_comes_before_reading(clocks: VectorClocks) -> None:
    wrote(clocks, F)
    clocks.recorded("event", F)
    read(clocks, C)
    clocks.awaited("event", C)
    assert len(clocks.races) == 1


@pytest.mark.parametrize("wrong", ["other", "never recorded"])
def test_the_wrong_event_orders_nothing(clocks: VectorClocks, wrong: str) -> None:
    clocks.recorded("other", F)
    wrote(clocks, F)
    clocks.recorded("right", F)
    clocks.awaited(wrong, C)
    read(clocks, C)
    assert len(clocks.races) == 1


def test_d05_recording_again_on_another_stream_loses_the_fence(clocks: VectorClocks) -> None:
    wrote(clocks, F)
    clocks.recorded("publish", F)
    clocks.recorded("publish", "schedule stream")
    clocks.awaited("publish", C)
    read(clocks, C)
    assert len(clocks.races) == 1


def test_a_wait_keeps_what_the_event_stood_for_at_that_moment(clocks: VectorClocks) -> None:
    wrote(clocks, F)
    clocks.recorded("publish", F)
    clocks.awaited("publish", C)
    clocks.recorded("publish", "schedule stream")
    read(clocks, C)
    assert not clocks.races


def test_order_is_transitive_over_streams_and_threads(clocks: VectorClocks) -> None:
    wrote(clocks, F)
    clocks.recorded("published", F)
    clocks.awaited("published", C)
    clocks.recorded("copied", C)
    with clocks.as_thread("waiter"):
        clocks.passed("copied")
        clocks.sent("result")
    with clocks.as_thread("loop"):
        clocks.received("result")
        clocks.wrote("kv", (1,))
    assert not clocks.races


def test_a_queue_orders_sender_before_receiver_and_not_the_other_way(clocks: VectorClocks) -> None:
    with clocks.as_thread("loop"):
        clocks.wrote("batch", (7,))
        clocks.sent("item")
        clocks.wrote("next batch", (8,))
    with clocks.as_thread("forward"):
        clocks.received("item")
        clocks.read("batch", (7,))
        assert not clocks.races
        clocks.read("next batch", (8,))
    assert [race.buffer for race in clocks.races] == ["next batch"]


def test_a_launch_orders_the_thread_before_the_stream_and_not_the_other_way(clocks: VectorClocks) -> None:
    clocks.wrote("kv", (1,))
    read(clocks, F)
    assert not clocks.races
    clocks.wrote("kv", (1,))
    assert len(clocks.races) == 1, "the thread that launched it does not know that it has run"


def test_blocking_on_an_event_tells_the_thread(clocks: VectorClocks) -> None:
    read(clocks, F)
    clocks.recorded("done", F)
    clocks.passed("done")
    clocks.wrote("kv", (1,))
    assert not clocks.races


def test_draining_the_device_tells_the_thread_of_all_streams(clocks: VectorClocks) -> None:
    wrote(clocks, F, 1)
    wrote(clocks, C, 2)
    clocks.drained()
    clocks.wrote("kv", (1, 2))
    assert not clocks.races


def test_two_writes_conflict_and_two_reads_do_not(clocks: VectorClocks) -> None:
    read(clocks, F)
    read(clocks, C)
    assert not clocks.races
    wrote(clocks, F, 2)
    wrote(clocks, C, 2)
    assert [race.places for race in clocks.races] == [{2}]


def test_other_places_do_not_conflict(clocks: VectorClocks) -> None:
    wrote(clocks, F, 1)
    wrote(clocks, C, 2)
    assert not clocks.races


def test_a_write_is_checked_against_every_reader(clocks: VectorClocks) -> None:
    read(clocks, C)
    read(clocks, F)
    wrote(clocks, F)
    assert [race.between(C, F) for race in clocks.races] == [True], "the other stream's older read is not forgotten"


def test_equal_pairs_are_one_report(clocks: VectorClocks) -> None:
    for place in (1, 2, 3):
        wrote(clocks, F, place)
    for place in (1, 2, 3):
        read(clocks, C, place)
    (race,) = clocks.races
    assert race.places == {1, 2, 3}
