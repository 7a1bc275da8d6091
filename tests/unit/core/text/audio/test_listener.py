"""The checkpoint's feature extractor, and prompts of the decoder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from core.errors import InvalidRequest, ModelLoadError
from core.text.audio.listener import Listener
from core.types.audio import Audio, AudioTask
from core.types.audio_spec import AudioSpec
from tests.support.speech_checkpoints import RATE, samples, wav

MANY = AudioSpec(16, 100, 50, {"en": 11, "de": 12}, {"transcribe": 21, "translate": 22}, 30)
ONE = AudioSpec(16, 100, 50, no_timestamps=30)


def listener(directory: Path, spec: AudioSpec) -> Listener:
    WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(directory)
    return Listener.load(directory, spec)


def test_a_sound_is_heard_as_transformers_hears_it(tmp_path: Path) -> None:
    sound = samples(3, 0.4)
    found = listener(tmp_path, MANY).hear(Audio(wav(sound)))
    extractor = WhisperFeatureExtractor.from_pretrained(tmp_path)
    want = extractor(sound.astype(np.float32) / 32_768, sampling_rate=RATE, return_tensors="np")["input_features"][0]
    assert found.shape == (16, 100) and found.dtype == np.float32 and np.array_equal(found, want)
    with pytest.raises(InvalidRequest, match=r"audio\.data.*takes 1\.0 s, the model hears 1 s"):
        listener(tmp_path, MANY).hear(Audio(wav(samples(3, 1.01))))


def test_a_prompt_says_what_is_to_be_done(tmp_path: Path) -> None:
    many, one = listener(tmp_path, MANY), listener(tmp_path, ONE)
    assert many.prompt((9,), Audio(b"", "de")) == [9, 12, 21, 30]
    assert many.prompt((9,), Audio(b"", "en", AudioTask.TRANSLATE)) == [9, 11, 22, 30]
    assert one.prompt((9,), Audio(b"")) == [9, 30]
    assert listener(tmp_path, AudioSpec(16, 100, 50)).prompt((9,), Audio(b"")) == [9]
    for heard, audio, field, says in (
        (many, Audio(b"", ""), "audio.language", "one of de, en"),
        (many, Audio(b"", "fr"), "audio.language", "one of de, en"),
        (one, Audio(b"", "en"), "audio.language", "one language"),
        (one, Audio(b"", "", AudioTask.TRANSLATE), "audio.language", "one language"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            heard.prompt((9,), audio)
        assert refused.value.violations[0].field == field and says in refused.value.violations[0].description


def test_features_of_another_model_are_told_at_start(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no usable preprocessor_config\.json"):
        Listener.load(tmp_path, MANY)
    listener(tmp_path, MANY)
    with pytest.raises(ModelLoadError, match="makes 16 x 100 features, but its encoder hears 80 x 3000"):
        Listener.load(tmp_path, AudioSpec(80, 3_000, 1_500))
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "feature_size": "many"}))
    with pytest.raises(ModelLoadError):
        Listener.load(tmp_path, MANY)
