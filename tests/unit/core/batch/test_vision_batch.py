"""What a step has of images: where their tokens are, and positions that are not the usual ones."""

from __future__ import annotations

import numpy as np

from core.batch.build import Segment, joined
from core.batch.vision_batch import vision_batch
from core.types.image import PlacedImage, ReadImage


def image(length: int) -> ReadImage:
    return ReadImage(np.zeros((length, 3), np.float32), None, length)


def segment(row: int, start: int, length: int, *images: PlacedImage, moved: int | None = None) -> Segment:
    usual = np.arange(start, start + length)
    places = None if moved is None else np.stack([usual, usual, usual + moved])
    return Segment(row, start, usual + 100, True, images=images, places=places)


def test_a_step_of_texts_has_nothing() -> None:
    assert vision_batch([segment(1, 0, 3), segment(2, 5, 4)], None) is None and vision_batch([], None) is None


def test_images_stand_where_their_chunks_do() -> None:
    first, second = PlacedImage(1, image(2)), PlacedImage(9, image(3))
    found = vision_batch([segment(1, 0, 3, first), segment(2, 0, 4), segment(3, 8, 4, second)], None)
    assert found is not None and found.places is None and found.deltas is None
    told = [(each.row, each.first, each.place, each.end, each.image) for each in found.images]
    assert told == [(1, 1, 1, 3, first.image), (3, 9, 8, 11, second.image)]


def test_texts_beside_moved_positions_keep_theirs() -> None:
    found = vision_batch([segment(1, 4, 2), segment(2, 0, 2, moved=7)], np.array([0, -3]))
    assert found is not None and found.places is not None and found.deltas is not None
    assert found.places.tolist() == [[4, 5, 0, 1], [4, 5, 0, 1], [4, 5, 7, 8]] and found.deltas.tolist() == [0, -3]


def test_joined_chunks_keep_their_images_and_places() -> None:
    first, second = PlacedImage(0, image(2)), PlacedImage(3, image(2))
    (found,) = joined([segment(1, 0, 3, first, moved=5), segment(1, 3, 2, second, moved=5)])
    assert found.images == (first, second) and found.ids.tolist() == [100, 101, 102, 103, 104]
    assert found.places is not None and found.places[2].tolist() == [5, 6, 7, 8, 9]
