"""Puts images into a prompt: the text that stands for them, and where their tokens are once it is encoded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.errors import InvalidRequest
from core.text.tokenizer import Tokenizer
from core.types.arrays import Ints
from core.types.image import NO_IMAGES, Grid, PlacedImage, PromptImages, ReadImage
from core.types.vision_spec import VisionSpec


class ImagePlacer:
    """Places images of one model. All methods may be called from any thread."""

    def __init__(self, spec: VisionSpec, tokenizer: Tokenizer) -> None:
        self.spec = spec
        self._tokenizer = tokenizer
        self._own = dict[Grid, Ints]()
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
        runs = [begin + self._run(image.grid, image.length) + end for image in images]
        return "".join(part + run for part, run in zip(parts, [*runs, ""], strict=True))

    def own(self, grid: Grid) -> Ints:
        """Of an image of such a grid, int64[n] from 0: which tokens from its first to its last stand for its pieces.

        For few different grids, of tiles: what it finds is kept.
        """
        found = self._own.get(grid)
        if found is None:
            ids = np.asarray(self._tokenizer.encode(self._run(grid, 0), add_special_tokens=False), np.int64)
            places = np.flatnonzero(ids == self.spec.image_token)
            found = self._own[grid] = places - places[0]
        return found

    def _run(self, grid: Grid | None, length: int) -> str:
        if grid is not None and self.spec.tiles is not None:
            return self.spec.tiles.run(self._piece * (self.spec.tile or 1), *grid[1:])
        if grid is not None and self.spec.rows is not None:
            between, last = self.spec.rows
            return between.join([self._piece * grid[2]] * grid[1]) + last
        return self._piece * length

    def placed(self, ids: Ints, images: Sequence[ReadImage], field: str) -> PromptImages:
        """Where `images` are in the prompt `ids`, int64[n].

        Raises InvalidRequest with `field` unless each has a run of its length there, and nothing else has.
        """
        if not images:
            return NO_IMAGES
        placed = _placed(np.flatnonzero(ids == self.spec.image_token), images)
        if placed is None:
            said = f"take runs of {[image.length for image in images]} image tokens, but the prompt has others"
            raise InvalidRequest.of(field, said)
        return PromptImages(placed, _places(len(ids), placed, self.spec.merge) if self.spec.places else None)


def _placed(there: Ints, images: Sequence[ReadImage]) -> tuple[PlacedImage, ...] | None:
    """`images` in their order, each on as many image tokens as it has, at its distances. `there`: int64[n], all tokens.

    None where they do not fit, or tokens are left.
    """
    at, found = 0, list[PlacedImage]()
    for image in images:
        taken = there[at : at + image.pieces]
        at += image.pieces
        wanted = np.arange(image.length) if image.own is None else image.own
        if len(taken) < len(wanted) or (taken - taken[0] != wanted).any():
            return None
        found.append(PlacedImage(int(taken[0]), image))
    return tuple(found) if at == len(there) else None


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
