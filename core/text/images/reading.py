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
MAX_SEGMENTS: Final = 1 << 10
"""Of a JPEG before its first scan, with bytes between them. Pillow takes each in Python, and adds those of EXIF data to
the earlier ones: 200,000 in 4 MB took 9 s. A 20 MiB file of nothing else has 320 of the largest."""
MAX_CHUNKS: Final = 1 << 14
"""Of a PNG, each of which Pillow reads in Python. Encoders write some of 8 to 64 KiB."""
_JPEG, _PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
_SCAN: Final = b"\xff\xda"
"""Begins a scan. Within one, 0xff is followed by 0 or by a mark of its own."""
_MARK, _SCANS, _ALONE = 0xFF, 0xDA, frozenset({0x00, 0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)})
"""Begins a segment; what follows in that of a scan; what follows where Pillow reads no length behind it."""
_PROFILE: Final = b"iCCP"
"""A chunk that a PNG has once. Each is inflated to 1 MB: 4,500 of them in 4 MB took 10 s."""


def read_image(data: bytes, field: str, most_pixels: int = MAX_PIXELS) -> Image:
    """The image in `data` as RGB, turned as its EXIF data say, which is what `transformers` makes of it.

    Of an animation it is the first frame. Raises InvalidRequest with `field` for other formats, broken data, and more
    than MAX_PIXELS, which its header tells, or than `most_pixels`, which other images of the request leave.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    # Bounded here, by each header; what Pillow warns of is written in files, and would fill the log.
    Image.MAX_IMAGE_PIXELS = None
    _hush()
    try:
        _refuse_chunks(data, field)
        _refuse_segments(data, field)
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
                said = f"has {width} x {height} pixels, at most {MAX_PIXELS} and {MAX_SIDE} a side can be read"
                raise InvalidRequest.of(field, said)
            if width * height > most_pixels:
                said = f"has {width} x {height} pixels, and the images before it leave {most_pixels} for the request"
                raise InvalidRequest.of(field, said)
            _refuse_scans(data, width * height, field)
            return ImageOps.exif_transpose(opened).convert("RGB")
    except InvalidRequest:
        raise
    except UnidentifiedImageError:
        raise InvalidRequest.of(field, f"is no image that can be read; send one of {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise InvalidRequest.of(field, "cannot be decoded: it is broken or cut off") from error


def _refuse_scans(data: bytes, pixels: int, field: str) -> None:
    # By the first bytes: what Pillow calls it is in the file's hands (a JPEG of several images is an MPO).
    scans = data.count(_SCAN) if data.startswith(_JPEG) else 0
    if scans > MAX_SCANS or (scans > 1 and scans * pixels > MAX_SCANNED):
        said = f"has {scans} scans of {pixels} pixels, at most {MAX_SCANS} and {MAX_SCANNED} pixels of all of them"
        raise InvalidRequest.of(field, f"{said}; save it as a plain JPEG")


def _refuse_chunks(data: bytes, field: str) -> None:
    at, count, profiles = len(_PNG), 0, 0
    while data.startswith(_PNG) and at + 8 <= len(data):
        profiles += data[at + 4 : at + 8] == _PROFILE
        at, count = at + 12 + int.from_bytes(data[at : at + 4], "big"), count + 1
        if count > MAX_CHUNKS:
            raise InvalidRequest.of(field, f"has more than {MAX_CHUNKS} chunks; save it as a plain PNG")
        if profiles > 1:
            raise InvalidRequest.of(field, "has several colour profiles; save it as a plain PNG")


def _refuse_segments(data: bytes, field: str) -> None:
    """Goes from mark to mark as Pillow does, which passes over whatever else is between them, byte by byte."""
    at = len(_JPEG) if data.startswith(_JPEG) else len(data)
    for _ in range(MAX_SEGMENTS):
        if at + 4 > len(data):
            return
        if data[at] != _MARK or data[at + 1] == _MARK:
            at += 1
        elif data[at + 1] == _SCANS:
            return
        else:
            at += 2 if data[at + 1] in _ALONE else 2 + max(2, int.from_bytes(data[at + 2 : at + 4], "big"))
    raise InvalidRequest.of(field, f"has more than {MAX_SEGMENTS} segments before its pixels; save it as a plain JPEG")


@cache
def _hush() -> None:
    """Once for the process, since filters of warnings are not a thread's own."""
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL").setLevel(logging.ERROR)
