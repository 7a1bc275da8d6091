"""What becomes of a client's input where an encoder reads it: the decoder starts from ids of the checkpoint's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from core.models.encoder_decoder.encoder_spec import EncoderSpec
from core.types.arrays import Ints


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """Splits requests for an encoder-decoder. `max_tokens`: of the longest input."""

    spec: EncoderSpec
    max_tokens: int

    def sides(self, ids: Ints) -> dict[str, Any]:
        """Fields of the `Req` whose client sent `ids`, int64[L]."""
        return {
            "prompt": np.array(self.spec.start_ids, np.int64),
            "encoder_ids": ids,
            "forced_first": self.spec.forced_first,
            "forced_last": self.spec.forced_last,
        }


def encoder_input(spec: EncoderSpec | None, max_tokens: int) -> EncoderInput | None:
    """None for a model without an encoder."""
    return None if spec is None else EncoderInput(spec, max_tokens)
