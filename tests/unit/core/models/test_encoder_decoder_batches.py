"""Sounds of one step through an encoder, a few at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from core.models.encoder_decoder.encoder_batches import SOUNDS, encode_sounds


def test_each_sound_is_heard_in_its_place() -> None:
    sizes = []

    def encoder(features: torch.Tensor) -> Any:
        sizes.append(len(features))
        return SimpleNamespace(last_hidden_state=features.transpose(1, 2)[:, ::2])

    sounds = [np.full((2, 4), place, np.float32) for place in range(2 * SOUNDS + 1)]
    found = encode_sounds(encoder, sounds, torch.empty(0, dtype=torch.float64))
    assert found.dtype == torch.float64 and sizes == [SOUNDS, SOUNDS, 1]
    assert found.tolist() == [[place, place] for place in range(2 * SOUNDS + 1) for _ in range(2)]
