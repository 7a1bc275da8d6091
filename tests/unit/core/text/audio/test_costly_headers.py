"""A sound in a file of very many chunks is refused before they are gone through."""

from __future__ import annotations

import io
import struct
import wave

import pytest

from core.errors import InvalidRequest
from core.text.audio.reading import MAX_CHUNKS, read_wav


def sound() -> bytes:
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setparams((1, 2, 16_000, 4, "NONE", ""))
        file.writeframes(struct.pack("<4h", 0, 16_384, -16_384, 0))
    return data.getvalue()


def with_chunks(count: int, size: int) -> bytes:
    """Behind the form's name; chunks of an odd size have a byte behind them."""
    made = (b"LIST" + struct.pack("<I", size) + b"d" * (size + size % 2)) * count
    whole = sound()
    return whole[:4] + struct.pack("<I", len(whole) - 8 + len(made)) + whole[8:12] + made + whole[12:]


@pytest.mark.parametrize("size", [0, 1, 4])
def test_chunks_before_the_samples(size: int) -> None:
    for count in (0, MAX_CHUNKS - 2):
        assert read_wav(with_chunks(count, size), 16_000, 100).tolist() == [0, 0.5, -0.5, 0]
    with pytest.raises(InvalidRequest, match=f"audio.data: has more than {MAX_CHUNKS} chunks"):
        read_wav(with_chunks(MAX_CHUNKS, size), 16_000, 100)
