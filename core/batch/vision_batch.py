"""What a step has of images: those whose tokens it computes, and positions that are not the usual ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from core.batch.ragged import starts_of
from core.types.arrays import Ints
from core.types.image import PlacedImage, ReadImage


class VisionChunk(Protocol):
    """What a prompt chunk has of images: `places` as in `VisionBatch`, of its own tokens."""

    @property
    def row(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def images(self) -> tuple[PlacedImage, ...]: ...
    @property
    def places(self) -> Ints | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class StepImage:
    """An image whose tokens are all computed by this step."""

    row: int
    first: int
    """Its first token in the sequence."""
    place: int
    """The same in T."""
    image: ReadImage

    @property
    def end(self) -> int:
        """The place in T behind its last token."""
        return self.place + self.image.length


@dataclass(frozen=True, slots=True, eq=False)
class VisionBatch:
    """Host data that never change. `images` are in the order of their places."""

    images: tuple[StepImage, ...]
    places: Ints | None
    """int64[3, Tp]: positions of the tokens of chunks; None where all are the usual ones."""
    deltas: Ints | None
    """int64[n]: added to the position of each decode row; None where all are 0."""


def vision_batch(chunks: Sequence[VisionChunk], deltas: Ints | None) -> VisionBatch | None:
    """Of prompt chunks and decode rows, int64[n]; None in almost every step, which has nothing of images."""
    if deltas is None and not any(each.images or each.places is not None for each in chunks):
        return None
    starts = starts_of(np.array([each.length for each in chunks], np.int64)).tolist()
    images = [
        StepImage(each.row, placed.start, at + placed.start - each.start, placed.image)
        for at, each in zip(starts, chunks, strict=True)
        for placed in each.images
    ]
    places = None
    if any(each.places is not None for each in chunks):
        places = np.concatenate([_places(each) for each in chunks], axis=1)
    return VisionBatch(tuple(images), places, deltas)


def _places(chunk: VisionChunk) -> Ints:
    usual = np.arange(chunk.start, chunk.start + chunk.length, dtype=np.int64)
    return np.broadcast_to(usual, (3, chunk.length)) if chunk.places is None else chunk.places
