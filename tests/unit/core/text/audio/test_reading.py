"""Sounds as clients send them: WAV files, and what is none."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from core.errors import InvalidRequest
from core.text.audio.reading import read_wav
from tests.support.speech_checkpoints import RATE, wav

RAMP = np.linspace(-1, 1, 9)[:-1]


@pytest.mark.parametrize(("kind", "full"), [(np.uint8, 127), (np.int16, 32_767), (np.int32, 2_147_483_647)])
def test_samples_of_any_width_are_read(kind: type, full: int) -> None:
    data = np.round(RAMP * full).astype(np.int64) + (128 if kind is np.uint8 else 0)
    found = read_wav(wav(data.astype(kind)), RATE, 100)
    assert found.dtype == np.float32 and np.abs(found - RAMP).max() < 0.02
    if kind is np.int16:
        assert np.array_equal(found, data.astype(np.float32) / 32_768), "as transformers' pipelines read them"


def test_channels_are_mixed() -> None:
    both = np.stack([np.array([0, 16_384], np.int16), np.array([16_384, -16_384], np.int16)], axis=1)
    assert read_wav(wav(both), RATE, 2).tolist() == [0.25, 0.0]


def test_integers_that_an_extended_header_tells_of_are_read() -> None:
    """As many tools write samples of 32 bits, or of several channels."""
    plain, subformat = wav(np.array([0, 16_384], np.int16)), bytes.fromhex("0100000000001000800000aa00389b71")
    told = struct.pack("<HHI", 22, 16, 4) + subformat
    body = plain[8:16] + struct.pack("<IH", 40, 0xFFFE) + plain[22:36] + told + plain[36:]
    body = plain[:4] + struct.pack("<I", len(body)) + body
    assert read_wav(body, RATE, 2).tolist() == [0.0, 0.5]
    with pytest.raises(InvalidRequest):
        read_wav(body.replace(subformat, b"\3" + subformat[1:]), RATE, 2)


SOUND = wav(np.zeros(200, np.int16))
FLOATS = SOUND[:20] + struct.pack("<H", 3) + SOUND[22:]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no WAV file"),
        (b"hello" * 100, "no WAV file"),
        (SOUND[:30], "no WAV file"),
        (FLOATS, "no WAV file"),
        (wav(np.zeros(200, np.int16), 44_100), "has 44100 samples a second, the model hears 16000"),
        (wav(np.zeros(201, np.int16)), "takes 0.0 s"),
        (wav(np.zeros((20, 9), np.int16)), "9 channels"),
        (wav(np.zeros(0, np.int16)), "has no samples"),
        (SOUND[:40] + struct.pack("<I", 2**31) + SOUND[44:], "takes"),
    ],
    ids=["nothing", "text", "head", "floats", "rate", "long", "channels", "empty", "claiming"],
)
def test_what_cannot_be_heard_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_wav(data, RATE, 200)
    (violation,) = refused.value.violations
    assert violation.field == "audio.data" and says in violation.description


def test_a_file_that_was_cut_is_read_as_far_as_it_goes() -> None:
    assert len(read_wav(SOUND[:-101], RATE, 200)) == 149
