"""What a client's input is to an encoder-decoder: the encoder reads it, and the decoder starts by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from core.models.encoder_decoder.encoder_spec import EncoderSpec
from core.types.arrays import Ints


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """How an input reaches an encoder-decoder: the encoder reads it, and the decoder starts from the checkpoint's ids.

    `max_tokens`: of the longest input.
    """

    spec: EncoderSpec
    max_tokens: int

    def sides(self, ids: Ints) -> dict[str, Any]:
        """Fields of the `Req` for a client that sent `ids`, int64[L]."""
        return {
            "prompt": np.array(self.spec.start_ids, np.int64),
            "encoder_ids": ids,
            "forced_first": self.spec.forced_first,
            "forced_last": self.spec.forced_last,
        }


def encoder_input(spec: EncoderSpec | None, max_tokens: int) -> EncoderInput | None:
    """The `EncoderInput` for `spec`; None for a model without an encoder."""
    return None if spec is None else EncoderInput(spec, max_tokens)
