"""Decodes images that clients send: a few formats, within bounds that are checked before a pixel is decoded."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Final

from core.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS: Final = ("PNG", "JPEG", "WEBP")
MAX_PIXELS: Final = 1 << 25
"""33 million pixels take 100 MB as RGB."""
MAX_SIDE: Final = 16_384


def read_image(data: bytes, field: str) -> Image:
    """The image in `data` as RGB, turned as its EXIF data say, which is what `transformers` makes of it.

    Of an animation it is the first frame. Raises InvalidRequest with `field` for other formats, broken data, and more
    than MAX_PIXELS, which its header tells.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
                said = f"has {width} x {height} pixels, at most {MAX_PIXELS} and {MAX_SIDE} a side can be read"
                raise InvalidRequest.of(field, said)
            return ImageOps.exif_transpose(opened).convert("RGB")
    except InvalidRequest:
        raise
    except UnidentifiedImageError:
        raise InvalidRequest.of(field, f"is no image that can be read; send one of {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise InvalidRequest.of(field, f"cannot be decoded: {type(error).__name__}") from error
