"""The history checker finds every fault it is there for."""

from __future__ import annotations

import pytest

from tests.chaos.history import FULL, LEFT, Stream, Verdict, judge

TOKENS = [5, 6, 7, 8]


def seen(*events: tuple[int, tuple[int, ...]], terminals: tuple[str, ...] = (FULL,), **more: int) -> Stream:
    stream = Stream([1], len(TOKENS), terminals=list(terminals), **more)
    stream.events = [(position, tokens, 0.0) for position, tokens in events]
    return stream


@pytest.mark.parametrize(
    "stream",
    [
        seen((0, (5, 6)), (2, (7, 8))),
        seen((0, (5, 6, 7, 8)), reported=4),
        seen((0, (5, 6)), terminals=("cancelled",)),
        seen(terminals=("DRAINING",)),
        seen((0, (5,)), terminals=("DRAINING",), reported=3),
        seen((0, (5,)), terminals=(LEFT,)),
    ],
)
def test_correct_histories_pass(stream: Stream) -> None:
    assert judge(stream, TOKENS) == Verdict()


@pytest.mark.parametrize(
    ("stream", "fault"),
    [
        (seen((0, (5, 6)), (1, (6, 7, 8))), Verdict(duplicated=1)),
        (seen((0, (5, 6)), (3, (8,))), Verdict(missing=1)),
        (seen((0, (5, 6))), Verdict(missing=2)),
        (seen((1, (6,)), terminals=("cancelled",)), Verdict(missing=1)),
        (seen((0, (5, 9, 7, 8))), Verdict(wrong=1)),
        (seen((0, (5, 6, 7, 8, 9))), Verdict(beyond=1)),
        (seen((0, (5,)), terminals=()), Verdict(terminals=1)),
        (seen((0, (5, 6, 7, 8)), terminals=(FULL, "DRAINING")), Verdict(terminals=1)),
        (seen((0, (5, 6, 7, 8)), after_terminal=2), Verdict(after_terminal=2)),
        (seen((0, (5, 6, 7, 8)), foreign=1), Verdict(foreign=1)),
        (seen((0, (5, 6, 7, 8)), reported=3), Verdict(miscounted=1)),
        (seen((0, (5, 6)), terminals=("DRAINING",), reported=1), Verdict(miscounted=1)),
    ],
)
def test_each_fault_is_found(stream: Stream, fault: Verdict) -> None:
    assert judge(stream, TOKENS) == fault


def test_faults_add_up() -> None:
    assert Verdict(wrong=1) + Verdict(wrong=2, missing=1) == Verdict(wrong=3, missing=1)
