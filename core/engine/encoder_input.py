"""What a client's input is to an encoder-decoder: the encoder reads it, and the decoder starts by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from core.models.encoder_decoder.encoder_spec import EncoderSpec
from core.types.arrays import Floats, Ints


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """How an input reaches an encoder-decoder: the encoder reads it, and the decoder starts from the checkpoint's ids.

    `max_tokens`: of the longest input.
    """

    spec: EncoderSpec
    max_tokens: int

    def sides(self, ids: Ints, features: Floats | None = None) -> dict[str, Any]:
        """Fields of the `Req` for a client that sent `ids`, int64[L]; or a sound, whose decoder begins with them."""
        audio = self.spec.audio
        if features is not None and audio is not None:
            heard = np.zeros(audio.positions, np.int64)
            return {"prompt": ids, "encoder_ids": heard, "encoder_features": features, "not_first": audio.not_first}
        return {
            "prompt": np.array(self.spec.start_ids, np.int64),
            "encoder_ids": ids,
            "forced_first": self.spec.forced_first,
            "forced_last": self.spec.forced_last,
        }


def encoder_input(spec: EncoderSpec | None, max_tokens: int) -> EncoderInput | None:
    """The `EncoderInput` for `spec`; None for a model without an encoder."""
    return None if spec is None else EncoderInput(spec, max_tokens)
