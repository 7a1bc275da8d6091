"""Decodes images that clients send: a few formats, within bounds that are checked before a pixel is decoded."""

from __future__ import annotations

import io
import logging
import warnings
from functools import cache
from typing import TYPE_CHECKING, Final

from core.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS: Final = ("PNG", "JPEG", "WEBP")
MAX_PIXELS: Final = 1 << 25
"""33 million pixels take 100 MB as RGB."""
MAX_SIDE: Final = 16_384
MAX_SCANS: Final = 64
"""Of a progressive JPEG: each goes over the whole image, and may take few bytes of the file. Cameras write a dozen."""
MAX_SCANNED: Final = 1 << 29
"""Pixels of all scans together."""
MAX_CHUNKS: Final = 1 << 14
"""Of a PNG, each of which Pillow reads in Python. Encoders write some of 8 to 64 KiB."""
_JPEG, _PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
_SCAN: Final = b"\xff\xda"
"""Begins a scan. Within one, 0xff is followed by 0 or by a mark of its own."""


def read_image(data: bytes, field: str) -> Image:
    """The image in `data` as RGB, turned as its EXIF data say, which is what `transformers` makes of it.

    Of an animation it is the first frame. Raises InvalidRequest with `field` for other formats, broken data, and more
    than MAX_PIXELS, which its header tells.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    # Bounded here, by each header; what Pillow warns of is written in files, and would fill the log.
    Image.MAX_IMAGE_PIXELS = None
    _hush()
    try:
        _refuse_chunks(data, field)
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
                said = f"has {width} x {height} pixels, at most {MAX_PIXELS} and {MAX_SIDE} a side can be read"
                raise InvalidRequest.of(field, said)
            _refuse_scans(data, width * height, field)
            return ImageOps.exif_transpose(opened).convert("RGB")
    except InvalidRequest:
        raise
    except UnidentifiedImageError:
        raise InvalidRequest.of(field, f"is no image that can be read; send one of {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise InvalidRequest.of(field, f"cannot be decoded: {type(error).__name__}") from error


def _refuse_scans(data: bytes, pixels: int, field: str) -> None:
    # By the first bytes: what Pillow calls it is in the file's hands (a JPEG of several images is an MPO).
    scans = data.count(_SCAN) if data.startswith(_JPEG) else 0
    if scans > MAX_SCANS or (scans > 1 and scans * pixels > MAX_SCANNED):
        said = f"has {scans} scans of {pixels} pixels, at most {MAX_SCANS} and {MAX_SCANNED} pixels of all of them"
        raise InvalidRequest.of(field, f"{said}; save it as a plain JPEG")


def _refuse_chunks(data: bytes, field: str) -> None:
    at, count = len(_PNG), 0
    while data.startswith(_PNG) and at + 8 <= len(data):
        at, count = at + 12 + int.from_bytes(data[at : at + 4], "big"), count + 1
        if count > MAX_CHUNKS:
            raise InvalidRequest.of(field, f"has more than {MAX_CHUNKS} chunks; save it as a plain PNG")


@cache
def _hush() -> None:
    """Once for the process, since filters of warnings are not a thread's own."""
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL").setLevel(logging.ERROR)
