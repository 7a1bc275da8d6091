"""The checkpoint's own feature extractor, from `transformers`: a sound to what the encoder hears."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from core.errors import InvalidRequest, ModelLoadError
from core.text.audio.reading import read_wav
from core.types.arrays import Floats
from core.types.audio import Audio
from core.types.audio_spec import AudioSpec


class Listener:
    """Any thread may call it, several at once."""

    def __init__(self, extractor: Any, spec: AudioSpec) -> None:
        self._extractor = extractor
        self.spec = spec

    @classmethod
    def load(cls, path: Path, spec: AudioSpec) -> Listener:
        """Of the checkpoint at `path`. Raises ModelLoadError for a file that is none, or of another model."""
        from transformers.models.auto.feature_extraction_auto import AutoFeatureExtractor

        try:
            found = AutoFeatureExtractor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise ModelLoadError(f"{path} hears audio, but has no usable preprocessor_config.json: {reason}") from error
        frames = found.n_samples // found.hop_length
        if (found.feature_size, frames) != (spec.mels, spec.frames):
            said = f"makes {found.feature_size} x {frames} features, but its encoder hears {spec.mels} x {spec.frames}"
            raise ModelLoadError(f"{path}: preprocessor_config.json {said}")
        return cls(found, spec)

    def hear(self, audio: Audio) -> Floats:
        """float32[mels, frames]: what the encoder hears of it. Raises InvalidRequest, field `audio.data`."""
        rate = self._extractor.sampling_rate
        samples = read_wav(audio.data, rate, self._extractor.n_samples)
        features = self._extractor(samples, sampling_rate=rate, return_tensors="np")["input_features"][0]
        return np.ascontiguousarray(features, np.float32)

    def prompt(self, start: tuple[int, ...], audio: Audio) -> list[int]:
        """Ids that the decoder begins with: its start, the language and task, and that no times are wanted.

        Raises InvalidRequest, field `audio.language` or `audio.task`, for those that the model does not know.
        """
        spec, wanted = self.spec, [*start]
        if spec.languages:
            if audio.language not in spec.languages:
                known = ", ".join(sorted(spec.languages))
                raise InvalidRequest.of("audio.language", f"must be one of {known}")
            if audio.task.value not in spec.tasks:
                raise InvalidRequest.of("audio.task", f"must be one of {', '.join(sorted(spec.tasks))}")
            wanted += [spec.languages[audio.language], spec.tasks[audio.task.value]]
        elif audio.language or audio.task.value != "transcribe":
            raise InvalidRequest.of("audio.language", "the served model knows one language; leave it and task out")
        return wanted if spec.no_timestamps is None else [*wanted, spec.no_timestamps]
