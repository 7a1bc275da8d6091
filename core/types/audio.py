"""A sound as a client sends it, and what is to be done with it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

DEAF: Final = "the served model hears no audio"
HEARS: Final = "the served model hears audio, and reads no text; send audio"


class AudioTask(Enum):
    """What the text that comes of a sound is: its words, or its words in English."""

    TRANSCRIBE = "transcribe"
    TRANSLATE = "translate"


@dataclass(frozen=True, slots=True)
class Audio:
    """An encoded sound. `language`: as `en`; empty for a model that knows one alone."""

    data: bytes
    language: str = ""
    task: AudioTask = AudioTask.TRANSCRIBE
