"""The checkpoint's own image processor, from `transformers`: an image to what the vision tower reads."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from core.errors import ConfigError, InvalidRequest, ModelLoadError
from core.types.arrays import Floats, Ints
from core.types.image import Grid, ReadImage
from core.types.vision_spec import VisionSpec

if TYPE_CHECKING:
    from PIL.Image import Image

BLANK = (96, 64)
MAX_GROWN = 1 << 23
"""Pixels of an image that is made so large that its shorter side fits, and is cut then (CLIP): some hundred MiB."""
MISSING = "the checkpoint sees images, which needs Pillow: pip install 'slipstream[vision]'"

Own = Callable[[Grid], Ints]
"""Of an image of such a grid, int64[n] from 0: which tokens from its first to its last stand for pieces of it."""


def has_pillow() -> bool:
    """Whether the library that decodes images is installed."""
    return importlib.util.find_spec("PIL") is not None


def in_rows(grid: Grid) -> Ints:
    """An `Own`: a grid of tokens, with one token between two rows."""
    _, rows, columns = grid
    own: Ints = (np.arange(rows)[:, None] * (columns + 1) + np.arange(columns)).ravel()
    return own


class ImageProcessor:
    """Any thread may call it, several at once."""

    def __init__(self, processor: Any, spec: VisionSpec, own: Own) -> None:
        self._processor = processor
        self._spec, self._own = spec, own

    @classmethod
    def load(cls, path: Path, spec: VisionSpec, own: Own = in_rows) -> ImageProcessor:
        """Of the checkpoint at `path`. `own`: tells which tokens stand for pieces, where text is between them.

        Raises ConfigError without Pillow, ModelLoadError for a file that is no good.
        """
        if not has_pillow():
            raise ConfigError(MISSING)
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        try:
            found = AutoImageProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise ModelLoadError(f"{path} sees images, but has no usable preprocessor_config.json: {reason}") from error
        return cls(found, spec, own)

    def read(self, image: Image, field: str) -> ReadImage:
        """The image, resized and normalised. Raises InvalidRequest with `field` for one that it refuses."""
        self._refuse_grown(image, field)
        try:
            found = self._processor(images=image, return_tensors="np", **self._options())
        except Exception as error:  # it raises ValueError for a ratio of sides, and whatever else
            reason = str(error).partition("\n")[0]
            raise InvalidRequest.of(field, f"cannot be processed: {reason}") from error
        pixels = np.asarray(found["pixel_values"], np.float32)
        if self._spec.length is not None:
            return ReadImage(pixels, None, self._spec.length)
        if self._spec.tiles is not None:
            return self._apart(pixels[0], (1, int(found["rows"][0][0]), int(found["cols"][0][0])))
        if self._spec.tile is not None:
            return ReadImage(pixels, None, len(pixels) * self._spec.tile)
        if self._spec.side is not None:
            height, width = (int(side) // self._spec.side for side in pixels.shape[-2:])
            return self._apart(pixels, (1, height, width))
        if "image_grid_thw" in found:
            time, height, width = (int(side) for side in found["image_grid_thw"][0])
        else:
            # Gemma 4 fills up to as many patches as an image may have, with some of no place.
            places = np.asarray(found["image_position_ids"])[0]
            there = places[:, 0] >= 0
            width, height = (int(side) + 1 for side in places[there].max(axis=0))
            time, pixels = 1, np.ascontiguousarray(pixels[:, there])
        if self._spec.most_patches is not None and max(height, width) > self._spec.most_patches:
            raise InvalidRequest.of(field, f"has sides too unlike: {max(height, width)} patches in a row")
        return ReadImage(pixels, (time, height, width), time * height * width // self._spec.merge**2)

    def _apart(self, pixels: Floats, grid: Grid) -> ReadImage:
        """An image with text between its rows or tiles."""
        own = self._own(grid)
        return ReadImage(pixels, grid, int(own[-1]) + 1, own)

    def _refuse_grown(self, image: Image, field: str) -> None:
        """Raises InvalidRequest where the processor would first make it larger than MAX_GROWN, to cut a part out."""
        shortest = dict(getattr(self._processor, "size", None) or {}).get("shortest_edge")
        if not shortest or self._spec.length is None:
            return
        short, long = sorted(image.size)
        if shortest * shortest * long > MAX_GROWN * short:
            raise InvalidRequest.of(field, f"has sides too unlike: {image.width} x {image.height} pixels")

    def read_blank(self) -> ReadImage:
        """A small grey image. Raises ModelLoadError where even that is refused."""
        from PIL import Image

        try:
            return self.read(Image.new("RGB", BLANK, "grey"), "image")
        except Exception as error:  # of another kind than the model's, it gives something else
            raise ModelLoadError(f"its image processor reads no image: {error!r}") from error

    def _options(self) -> dict[str, Any]:
        if self._spec.side is not None:
            return {"patch_size": {"height": self._spec.side, "width": self._spec.side}}
        if self._spec.tiles is not None:
            return {"return_row_col_info": True}
        if self._spec.tile is not None:
            return {"crop_to_patches": True}
        # Crops beside the whole would need a text that tells of them.
        return {"do_pan_and_scan": False} if hasattr(self._processor, "do_pan_and_scan") else {}
