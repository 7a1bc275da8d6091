"""Images as clients send them: what is read, and what is refused before a pixel is decoded."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from core.errors import InvalidRequest
from core.text.images.reading import MAX_PIXELS, MAX_SIDE, read_image


def encoded(image: Any, kind: str, **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def drawn(width: int = 5, height: int = 3) -> Any:
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def claiming(width: int, height: int) -> bytes:
    """A PNG whose header claims that size, and has nothing of it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1", "LA"])
def test_images_of_any_mode_are_read_as_rgb(kind: str, mode: str) -> None:
    image = drawn().convert(mode)
    read = read_image(encoded(image, kind, **({"lossless": True} if kind == "WEBP" else {})), "images[0]")
    assert read.mode == "RGB" and read.size == (5, 3)
    if mode == "RGB":
        assert np.array_equal(np.asarray(read), np.asarray(image))


def test_an_image_is_turned_as_its_camera_was_held() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert read_image(encoded(drawn(), "JPEG", exif=exif), "images[0]").size == (3, 5)


def test_of_an_animation_the_first_frame_is_read() -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    read = read_image(encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True), "images[0]")
    assert read.getpixel((0, 0)) == (255, 0, 0)


def several(data: bytes) -> bytes:
    """The JPEG in `data`, told to be the first of two in its file: an MPO, as Pillow calls it."""
    entries = [(0xB000, 7, 4, b"0100"), (0xB001, 4, 1, struct.pack("<L", 2)), (0xB002, 7, 32, struct.pack("<L", 50))]
    body = b"MPF\0II*\0" + struct.pack("<LH", 8, 3) + b"".join(struct.pack("<HHL4s", *each) for each in entries)
    body += bytes(4) + 2 * struct.pack("<LLLHH", 0x030000, 100, 0, 0, 0)
    return data[:2] + b"\xff\xe2" + struct.pack(">H", len(body) + 2) + body + data[2:]


def test_a_file_of_several_images_is_one_to_pillow() -> None:
    made = several(encoded(drawn(), "JPEG"))
    assert Image.open(io.BytesIO(made), formats=("JPEG",)).format == "MPO", "so its format tells nothing of scans"
    assert read_image(made, "images[0]").size == (5, 3)


WHOLE = encoded(drawn(40, 40), "PNG")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no image that can be read"),
        (b"hello" * 100, "no image that can be read"),
        (WHOLE[:20], "cannot be decoded"),
        (WHOLE[:-200], "cannot be decoded"),
        (encoded(drawn(), "GIF"), "send one of PNG, JPEG, WEBP"),
        (encoded(drawn(), "TIFF"), "send one of PNG, JPEG, WEBP"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "no image that can be read"),
        (claiming(8_000, 8_000), "8000 x 8000 pixels, at most"),
        (claiming(1_000_000, 2), "1000000 x 2 pixels"),
        (claiming(2**31 - 1, 2**31 - 1), "pixels"),
        (claiming(2, 1_000_000), "2 x 1000000 pixels"),
        (encoded(drawn(40, 40), "JPEG", progressive=True) + b"\xff\xda" * 64, "at most 64"),
        (several(encoded(drawn(40, 40), "JPEG", progressive=True)) + b"\xff\xda" * 64, "at most 64"),
        (encoded(Image.new("L", (5800, 5700)), "JPEG", progressive=True) + b"\xff\xda" * 12, "of 33060000 pixels"),
        (WHOLE[:8] + bytes(12) * (1 << 14) + WHOLE[8:], "more than 16384 chunks"),
        (claiming(MAX_SIDE, MAX_PIXELS // MAX_SIDE), "cannot be decoded"),
    ],
    ids=[
        *("nothing", "text", "head", "half", "gif", "tiff", "postscript"),
        *("claiming0", "long", "huge", "tall", "scans", "scans of several", "scanned", "chunks", "empty"),
    ],
)
def test_what_is_no_image_or_too_large_is_refused_by_field(data: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_image(data, "images[3]")
    (violation,) = refused.value.violations
    assert violation.field == "images[3]" and says in violation.description


def test_a_progressive_image_is_read_and_nothing_is_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    assert read_image(encoded(drawn(64, 64), "JPEG", progressive=True), "images[0]").size == (64, 64)
    for side in range(12_000, 12_005):
        with pytest.raises(InvalidRequest, match="pixels"):
            read_image(claiming(side, side), "images[0]")
    assert not [each for each in recwarn if "PIL" in str(each.category)]
