"""Puts images into a prompt: the text that stands for them, and where their tokens are once it is encoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from core.errors import InvalidRequest
from core.text.tokenizer import Tokenizer
from core.types.arrays import Ints
from core.types.image import NO_IMAGES, PlacedImage, PromptImages, ReadImage
from core.types.vision_spec import VisionSpec


class ImagePlacer:
    """Places images of one model. All methods may be called from any thread."""

    def __init__(self, spec: VisionSpec, tokenizer: Tokenizer) -> None:
        self.spec = spec
        name = tokenizer.name_of
        self.written = name(spec.begin_token)
        """The text that stands for an image in a prompt."""
        self._piece = name(spec.image_token)
        begin = "" if spec.begin_token == spec.image_token else self.written
        begin += "" if spec.first_token is None else name(spec.first_token)
        end = "" if spec.end_token is None else name(spec.end_token)
        self._around = spec.around[0] + begin, end + spec.around[1]

    def expanded(self, text: str, images: Sequence[ReadImage], field: str) -> str:
        """`text` with a run of tokens in the place of each `written`.

        Raises InvalidRequest with `field` unless there are as many as `images`.
        """
        parts = text.split(self.written)
        if len(parts) - 1 != len(images):
            said = f"has {len(images)} images, but the prompt has {len(parts) - 1} places for them ({self.written})"
            raise InvalidRequest.of(field, said)
        begin, end = self._around
        runs = [begin + self._run(image) + end for image in images]
        return "".join(part + run for part, run in zip(parts, [*runs, ""], strict=True))

    def _run(self, image: ReadImage) -> str:
        if self.spec.rows is None:
            return self._piece * image.length
        between, last = self.spec.rows
        return between.join([self._piece * image.columns] * image.rows) + last

    def placed(self, ids: Ints, images: Sequence[ReadImage], field: str) -> PromptImages:
        """Where `images` are in the prompt `ids`, int64[n].

        Raises InvalidRequest with `field` unless each has a run of its length there, and nothing else has.
        """
        if not images:
            return NO_IMAGES
        runs = _runs(ids == self.spec.image_token)
        placed = _filled(runs, images) if self.spec.rows is None else _in_rows(runs, images)
        if placed is None:
            said = f"take runs of {[image.length for image in images]} image tokens, but the prompt has others"
            raise InvalidRequest.of(field, said)
        return PromptImages(placed, _places(len(ids), placed, self.spec.merge) if self.spec.places else None)


def _runs(where: np.ndarray) -> list[tuple[int, int]]:
    """(first, behind the last) of each run of True in `where`, bool[n]."""
    edges = np.flatnonzero(np.diff(where, prepend=False, append=False))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _filled(runs: Sequence[tuple[int, int]], images: Sequence[ReadImage]) -> tuple[PlacedImage, ...] | None:
    """`images` in their order in `runs`, of which each is filled by one or by several; None where they do not fit."""
    left, found = deque(images), list[PlacedImage]()
    for start, end in runs:
        while left and start + left[0].length <= end:
            found.append(PlacedImage(start, left[0]))
            start += left.popleft().length
        if start != end:
            return None
    return None if left else tuple(found)


def _in_rows(runs: Sequence[tuple[int, int]], images: Sequence[ReadImage]) -> tuple[PlacedImage, ...] | None:
    """`images` in their order in `runs`, a run for each row, with one token between two; None where they do not fit."""
    rows, found = deque(runs), list[PlacedImage]()
    for image in images:
        taken = [rows.popleft() for _ in range(min(image.rows, len(rows)))]
        start = taken[0][0] if taken else 0
        step = image.columns + 1
        if taken != [(start + row * step, start + row * step + image.columns) for row in range(image.rows)]:
            return None
        found.append(PlacedImage(start, image))
    return None if rows else tuple(found)


def _places(length: int, placed: Sequence[PlacedImage], merge: int) -> Ints:
    """int64[3, length]: texts count on in all three; an image counts its rows and columns (Qwen2-VL, M-RoPE)."""
    parts, at, behind = [], 0, 0
    for each in placed:
        assert each.image.grid is not None, "sizes differ where positions are three"
        time, height, width = each.image.grid[0], each.image.grid[1] // merge, each.image.grid[2] // merge
        parts.append(np.broadcast_to(np.arange(each.start - behind) + at, (3, each.start - behind)))
        at += each.start - behind
        parts.append(np.indices((time, height, width)).reshape(3, -1) + at)
        at, behind = at + max(height, width), each.end
    parts.append(np.broadcast_to(np.arange(length - behind) + at, (3, length - behind)))
    return np.concatenate(parts, axis=1).astype(np.int64)
