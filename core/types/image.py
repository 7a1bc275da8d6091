"""One image of a prompt, ready for the model. Immutable; steps share it without a copy."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from core.types.arrays import Ints

FIRST_KEY = 1 << 30
"""The prefix cache names tokens of images by numbers from here on, which are no tokens of any vocabulary."""

MAX_IMAGES: Final = 16
"""Images of one request."""
BLIND: Final = "the served model sees no images"

Grid = tuple[int, int, int]
"""Patches of an image: in time, from top to bottom, from left to right."""


@dataclass(frozen=True, eq=False)
class ReadImage:
    """An image as the vision tower reads it, before it has a place.

    `length`: tokens from the first that stands for it to the last, with what is between them.
    """

    pixels: npt.NDArray[np.float32]
    """Of the shape that the family of the model takes."""
    grid: Grid | None
    """None where all images have one size."""
    length: int
    own: Ints | None = None
    """int64[n], from 0 to length - 1: which of those tokens stand for pieces of it, where text is between them (rows,
    tiles); None for all."""

    @property
    def pieces(self) -> int:
        """Tokens that stand for a piece of it."""
        return self.length if self.own is None else len(self.own)

    def name(self, ids: Ints) -> None:
        """Put names into the place of the tokens that stand for its pieces. `ids`: int64[m], its first tokens.

        Text between them keeps its ids: another text there makes other keys.
        """
        if self.own is None:
            ids[:] = self.keys[: len(ids)]
        else:
            there = self.own[: np.searchsorted(self.own, len(ids))]
            ids[there] = self.keys[there]

    @cached_property
    def keys(self) -> Ints:
        """int64[length]: names of its tokens in the prefix cache, 30 bits of a hash of its pixels each."""
        told = hashlib.shake_256(repr((self.pixels.shape, self.grid)).encode())
        told.update(np.ascontiguousarray(self.pixels).data)
        words = np.frombuffer(told.digest(4 * self.length), np.uint32).astype(np.int64)
        keys: Ints = (words & (FIRST_KEY - 1)) | FIRST_KEY
        return keys


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """An image whose tokens are `start` to `end` of a sequence."""

    start: int
    image: ReadImage

    @property
    def end(self) -> int:
        """The token behind its last one."""
        return self.start + self.image.length


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """All images of one prompt, in order, and where its tokens stand if images turn positions into three."""

    placed: tuple[PlacedImage, ...] = ()
    places: Ints | None = None
    """int64[3, prompt]: position of each prompt token in time, height and width; None where those are the usual."""
    _spans: Ints = field(init=False)

    def __post_init__(self) -> None:
        spans = np.array([(each.start, each.end) for each in self.placed], np.int64).reshape(-1, 2)
        object.__setattr__(self, "_spans", spans)

    @property
    def delta(self) -> int:
        """What is added to the usual position of every token behind the prompt."""
        return 0 if self.places is None else int(self.places.max()) + 1 - self.places.shape[1]

    def keyed(self, ids: Ints) -> Ints:
        """`ids`, int64[n], the first tokens of the sequence, with the keys of images in place of their tokens."""
        if not self.placed:
            return ids
        keyed = ids.copy()
        for each in self.placed:
            each.image.name(keyed[each.start : each.end])
        return keyed

    def outside(self, tokens: int) -> int:
        """The most tokens, up to `tokens`, that end within no image."""
        if not self.placed:
            return tokens
        within = self._spans[(self._spans[:, 0] < tokens) & (tokens < self._spans[:, 1])]
        return int(within[0, 0]) if len(within) else tokens

    def cut(self, start: int, stop: int) -> int:
        """Where a chunk that begins at `start` and may go on to `stop` ends: within no image, and behind `start`."""
        end = self.outside(stop)
        if end > start:
            return end
        return int(self._spans[self._spans[:, 0] == start][0, 1]) if end < stop else stop

    def within(self, start: int, stop: int) -> tuple[PlacedImage, ...]:
        """Images whose tokens are among `start` to `stop`."""
        return tuple(each for each in self.placed if start <= each.start and each.end <= stop)

    def places_of(self, start: int, stop: int) -> Ints | None:
        """int64[3, stop - start]: positions of tokens `start` to `stop`, also of those behind the prompt."""
        if self.places is None:
            return None
        length = self.places.shape[1]
        behind = np.arange(max(start, length), stop, dtype=np.int64) + self.delta
        return np.concatenate([self.places[:, start:stop], np.broadcast_to(behind, (3, len(behind)))], axis=1)


NO_IMAGES = PromptImages()
