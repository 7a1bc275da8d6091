"""Reads WAV files: PCM as integers, which Python's own library takes apart within what the file says of itself."""

from __future__ import annotations

import io
import wave
from typing import Final

import numpy as np

from core.errors import InvalidRequest
from core.types.arrays import Floats

FIELD: Final = "audio.data"
MAX_CHANNELS: Final = 8
MAX_CHUNKS: Final = 1 << 10
"""Each is passed over in Python; recorders write a few."""
_EXTENSIBLE, _INTEGERS = b"\xfe\xff", bytes.fromhex("0100000000001000800000aa00389b71")
_FULL: Final = {1: 128.0, 2: 32_768.0, 4: 2_147_483_648.0}
"""Bytes of a sample -> the number that stands for 1."""


def read_wav(data: bytes, rate: int, longest: int) -> Floats:
    """float32[n], -1 to 1: the samples of `data` at `rate` a second, its channels mixed; at most `longest` of them.

    Raises InvalidRequest, field `audio.data`, for what is no such file, has another rate, or is longer.
    """
    _refuse_chunks(data)
    try:
        with wave.open(io.BytesIO(_plain(data))) as file:
            channels, width, found, count = file.getparams()[:4]
            _refuse(channels, width, found, count, rate, longest)
            raw = file.readframes(count)
    except (wave.Error, EOFError, OSError, ValueError, RuntimeError) as error:
        reason = str(error) or "it is cut off"
        raise InvalidRequest.of(FIELD, f"is no WAV file with integer samples: {reason}") from error
    whole = len(raw) // (channels * width) * channels * width
    samples = np.frombuffer(raw[:whole], {1: np.uint8, 2: np.int16, 4: np.int32}[width]).astype(np.float32)
    if width == 1:
        samples -= _FULL[1]
    mixed: Floats = (samples / np.float32(_FULL[width])).reshape(-1, channels).mean(axis=1, dtype=np.float32)
    if not len(mixed):
        raise InvalidRequest.of(FIELD, "has no samples")
    return mixed


def _plain(data: bytes) -> bytes:
    """`data` with a header that Python before 3.12 knows, where an extension of it says that samples are integers."""
    at = data.find(b"fmt ", 12, 1 << 12) + len(b"fmt ") + 4
    if data[at : at + 2] == _EXTENSIBLE and data[at + 24 : at + 40] == _INTEGERS:
        return data[:at] + b"\x01\x00" + data[at + 2 :]
    return data


def _refuse_chunks(data: bytes) -> None:
    at = len(b"RIFF....WAVE") if data[:4] == b"RIFF" else len(data)
    for _ in range(MAX_CHUNKS):
        if at + 8 > len(data) or data[at : at + 4] == b"data":
            return
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8 + size + size % 2
    raise InvalidRequest.of(FIELD, f"has more than {MAX_CHUNKS} chunks before its samples; save it as a plain WAV")


def _refuse(channels: int, width: int, found: int, count: int, rate: int, longest: int) -> None:
    if found != rate:
        raise InvalidRequest.of(FIELD, f"has {found} samples a second, the model hears {rate}: resample it")
    if not 1 <= channels <= MAX_CHANNELS or width not in _FULL:
        said = f"has {channels} channels of {8 * width} bits; 1 to {MAX_CHANNELS} of 8, 16 or 32 can be read"
        raise InvalidRequest.of(FIELD, said)
    if count > longest:
        raise InvalidRequest.of(FIELD, f"takes {count / rate:.1f} s, the model hears {longest / rate:g} s: cut it")
