"""Sounds on their way to an encoder: which models take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from core.engine.audio_inputs import AudioInputs
from core.errors import InvalidRequest
from core.types.audio import DEAF, HEARS, Audio
from core.types.io import GenerateRequest


class Echo:
    """A listener whose prompts and features say what they were made of."""

    def prompt(self, start: tuple[int, ...], audio: Audio) -> list[int]:
        return [*start, len(audio.language)]

    def hear(self, audio: Audio) -> Any:
        return np.full((2, 3), len(audio.data), np.float32)


async def test_a_model_hears_or_reads() -> None:
    heard: Any = Echo()
    hears, deaf = AudioInputs(heard, (9,)), AudioInputs()
    assert hears.hears and not deaf.hears
    sound, text = GenerateRequest(audio=Audio(b"abc", "en")), GenerateRequest(text="a")
    hears.refuse_others(sound, "audio")
    deaf.refuse_others(text, "text")
    for inputs, request, field, says in ((hears, text, "text", HEARS), (deaf, sound, "audio", DEAF)):
        with pytest.raises(InvalidRequest, match=says) as refused:
            inputs.refuse_others(request, "text")
        assert refused.value.violations[0].field == field
    assert sound.audio is not None
    prompt, features = await hears.heard(sound.audio, "")
    assert prompt.tolist() == [9, 2] and features.tolist() == [[3.0] * 3] * 2
    hears.close()
    deaf.close()
