"""Rows in the order of admission, whenever that is asked for; and what moves positions behind images."""

from __future__ import annotations

import numpy as np

from core.memory.seat import Seat
from core.scheduler.running import RunningSet
from core.types.image import PromptImages
from core.types.request import Req
from core.types.sampling_params import SamplingParams


def req(number: int) -> Req:
    return Req(str(number), 0, np.arange(3), SamplingParams(), 0, 4)


def test_a_row_that_is_taken_again_stands_there_once() -> None:
    running, first, second, third = RunningSet(4, 16), req(1), req(2), req(3)
    running.add(first, Seat(1, 0, 0))
    running.add(second, Seat(2, 0, 0))
    running.remove(first)
    running.add(third, Seat(1, 1, 0))
    assert running.order.tolist() == [2, 1]
    assert running.owner(1) is third and running.members() == [second, third]


def test_a_text_that_leaves_takes_no_image_along() -> None:
    running, text, seeing = RunningSet(4, 16), req(1), req(2)
    seeing.images = PromptImages(places=np.zeros((3, 3), np.int64))
    running.add(text, Seat(1, 0, 0))
    running.add(seeing, Seat(2, 0, 0))
    running.remove(text)
    moved = running.deltas_of(np.array([2]))
    assert moved is not None and moved.tolist() == [-2]
    running.remove(seeing)
    running.add(req(3), Seat(2, 1, 0))
    assert running.deltas_of(np.array([2])) is None
