"""A reader of lengths that comes while they are published is told of them, one way or the other."""

from __future__ import annotations

import numpy as np

from core.batch.result import Published
from core.executor.length_fence import LengthFence
from core.types.arrays import Ints

ONE: Ints = np.ones(1, np.int64)


def lengths(step_id: int) -> Published:
    return Published(step_id, ONE, ONE, ONE, ONE)


def test_lengths_that_are_there_are_handed_out_without_a_call() -> None:
    woken = list[int]()
    fence = LengthFence(lambda: woken.append(1))
    fence.publish(lengths(3))
    found = fence.resolve(3)
    assert found is not None and found.step_id == 3
    assert fence.resolve(4) is None
    fence.publish(lengths(4))
    fence.publish(lengths(5))
    assert woken == [1], "once, for the step that was asked for"


def test_lengths_that_come_right_behind_the_look_for_them_wake_the_reader() -> None:
    """The other thread publishes between the reader's look and its answer: the worst moment there is."""
    woken = list[int]()

    class Racing(LengthFence):
        """Publishes step 3 once, as soon as its newest lengths were read."""

        raced = False

        @property
        def _newest(self) -> Published | None:
            seen = self._held
            if not self.raced and self._watched:
                self.raced = True
                self.publish(lengths(3))
            return seen

        @_newest.setter
        def _newest(self, published: Published | None) -> None:
            self._held = published

        _held: Published | None = None
        _watched = False

    fence = Racing(lambda: woken.append(1))
    fence._watched = True
    assert fence.resolve(3) is None
    assert woken == [1]
