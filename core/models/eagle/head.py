"""What a draft head is to a drafter: one pass of one layer over tokens and the features before them.

At place p of a sequence the head takes the embedding of token p + 1 and a feature of place p, and says what token p + 2
is. The feature is fused from what inner layers of the target read at p; behind the last place that the target has
computed, it is the head's own output one place before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from core.types.arrays import Ints


@dataclass(frozen=True, slots=True)
class HeadStep:
    """T places of n sequences, sequence after sequence, and S of them at which logits are wanted."""

    ids: torch.Tensor
    """int64[T]: the token behind each place."""
    features: torch.Tensor
    """[T, layers * target's H], of the target; or [T, H], the head's own. Contiguous, in the head's dtype."""
    positions: torch.Tensor
    """int64[T]."""
    slots: torch.Tensor
    """int64[T]: where the keys and values of each place are written."""
    rows: torch.Tensor
    """int64[n]: the line of `table` that each sequence reads."""
    prefixes: Ints
    """int64[n] on the host: places of each before these. What is missing among them makes drafts worse."""
    extends: Ints
    """int64[n] on the host: places of each in this step."""
    wanted: torch.Tensor
    """int64[S], rising: which of the T."""
    table: torch.Tensor
    """int32[R, width]: slot of every place."""


class Head(Protocol):
    """Forward thread only."""

    def run(self, step: HeadStep) -> tuple[torch.Tensor, torch.Tensor]:
        """(float32[S, Vd] logits over the draft vocabulary, [T, H] the head's own features); writes keys and values."""
        ...
