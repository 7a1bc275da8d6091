"""Headers that cost more than the picture behind them are refused before any of it is read, and real ones are not."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from core.errors import InvalidRequest
from core.text.images.reading import MAX_SEGMENTS, read_image

PICTURE = Image.linear_gradient("L").resize((60, 40)).convert("RGB")


def encoded(kind: str, **options: object) -> bytes:
    data = io.BytesIO()
    PICTURE.save(data, kind, **options)
    return data.getvalue()


JPEG, PNG = encoded("JPEG"), encoded("PNG")


def segment(mark: int, data: bytes = b"") -> bytes:
    return bytes((0xFF, mark)) + struct.pack(">H", len(data) + 2) + data


def behind_the_start(inserted: bytes) -> bytes:
    return JPEG[:2] + inserted + JPEG[2:]


def hidden(mark: int) -> bytes:
    """Segments that a reader passes over who takes the two bytes behind `mark` for a length."""
    return bytes((0xFF, mark)) + segment(0xE1, b"Exif\0\0aa") * 4_600


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_chunks(inserted: bytes) -> bytes:
    """Behind the header, which takes 33 bytes with the signature."""
    return PNG[:33] + inserted + PNG[33:]


PROFILE = chunk(b"iCCP", b"k\0\0" + zlib.compress(b"a" * 1000))
OWN = JPEG.count(b"\xff", 0, JPEG.index(b"\xff\xda"))
"""Marks of the JPEG itself before its scan; no other byte there is 255."""


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (behind_the_start(segment(0xE1, b"Exif\0\0aaaa") * MAX_SEGMENTS), "segments"),
        (behind_the_start(segment(0xFE) * (MAX_SEGMENTS - OWN + 2)), "segments"),
        (behind_the_start(segment(0xC4) * MAX_SEGMENTS), "segments"),
        (behind_the_start(b"\xff" * MAX_SEGMENTS), "segments"),
        (behind_the_start(segment(0xFE) + b"junk" * MAX_SEGMENTS), "segments"),
        (behind_the_start(b"\xff\xd0" * MAX_SEGMENTS), "segments"),
        (behind_the_start(b"\xff\x00" * MAX_SEGMENTS), "segments"),
        *((behind_the_start(hidden(mark)), "segments") for mark in (0xC8, 0xD8, 0xD9, 0xF0, 0xFD)),
        (with_chunks(PROFILE * 2), "several colour profiles"),
    ],
    ids=["exif", "comments", "tables", "fill", "junk", "alone", "escaped", "c8", "d8", "d9", "f0", "fd", "profiles"],
)
def test_headers_of_many_parts(data: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_image(data, "images[2]")
    (violation,) = refused.value.violations
    assert violation.field == "images[2]" and says in violation.description


@pytest.mark.parametrize(
    "data",
    [
        JPEG,
        behind_the_start(segment(0xFE) * (MAX_SEGMENTS // 2)),
        behind_the_start(segment(0xE2, b"ICC_PROFILE\0\1\1" + b"\xff\xda\xff\xff" * 20)),
        behind_the_start(b"\xff" * 100),
        JPEG[:-2] + b"\xff\xfe" * MAX_SEGMENTS + JPEG[-2:],
        encoded("JPEG", progressive=True, quality=95, icc_profile=b"\xff\xd8" * 70_000),
        with_chunks(PROFILE),
    ],
    ids=["plain", "half", "marks within", "fill", "behind the scan", "several parts", "one profile"],
)
def test_headers_of_some_parts(data: bytes) -> None:
    refused = None
    try:
        found = read_image(data, "images[2]")
    except InvalidRequest as error:
        refused = error
    assert refused is None
    assert found.size == PICTURE.size
    assert np.abs(np.asarray(found, np.int16) - np.asarray(PICTURE, np.int16)).mean() < 4
