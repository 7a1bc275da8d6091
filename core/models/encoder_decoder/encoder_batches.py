"""Runs an encoder over the inputs of one step: those of similar length together, padded.

One input at a time reads every weight once per input: through six layers of width 1024 on one CPU core, 8 inputs of 30
tokens take twice as long as in one batch, 8 inputs of 8 tokens seven times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from core.types.arrays import Floats, Ints

SOUNDS = 4
"""Sounds that are encoded together. All are as long as a sound can be."""
MAX_PADDED = 1.25
"""Most tokens of a batch, padding included, per token that is not padding."""


def encode_inputs(encoder: Any, ids: torch.Tensor, lens: Ints) -> torch.Tensor:
    """[E, H]: last hidden states of the inputs in `ids`, int64[E], one after another; `lens` int64[n] on the host."""
    parts = ids.split(lens.tolist())
    hidden: list[Any] = [None] * len(parts)
    for group in similar_lengths(lens):
        some = [parts[place] for place in group]
        if len(some) == 1:
            states = encoder(input_ids=some[0][None]).last_hidden_state
        else:
            # Made on the device from lengths that the host knows, so the host does not wait for the device.
            mask = pad_sequence([torch.ones_like(part) for part in some], batch_first=True)
            states = encoder(input_ids=pad_sequence(some, batch_first=True), attention_mask=mask).last_hidden_state
        for i, place in enumerate(group):
            hidden[place] = states[i, : lens[place]]
    return torch.cat(hidden)


def encode_sounds(encoder: Any, sounds: Sequence[Floats], like: torch.Tensor) -> torch.Tensor:
    """[E, H]: last hidden states of `sounds`, float32[mels, frames] each, one after another; `like` has their dtype."""
    found = []
    for start in range(0, len(sounds), SOUNDS):
        some = torch.from_numpy(np.stack(sounds[start : start + SOUNDS])).to(like.device, like.dtype)
        found.append(encoder(some).last_hidden_state.flatten(0, 1))
    return torch.cat(found)


def similar_lengths(lens: Ints) -> list[list[int]]:
    """Places in `lens`, int64[n], in groups that padding makes at most MAX_PADDED times as large; longest first."""
    groups: list[list[int]] = []
    longest = total = 0
    for place in np.argsort(-lens, kind="stable").tolist():
        length = int(lens[place])
        if groups and longest * (len(groups[-1]) + 1) <= MAX_PADDED * (total + length):
            groups[-1].append(place)
            total += length
        else:
            groups.append([place])
            longest = total = length
    return groups
