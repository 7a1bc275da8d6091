"""Guesses that the host makes of texts whose ends it does not know yet, and what the device makes of them.

On an accelerator the tokens of a step are on the host a step late. So the host guesses how the text that it knows goes
on, far enough for what is sampled meanwhile, and says how much it knew. The device shifts each guess to where its row
stands, and takes it only where the newest token is the one that was guessed there. A guess that is right by chance
there, or wrong behind, costs time and no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from core.batch.schedule_batch import ScheduleBatch
from core.speculation.drafter import Ran
from core.types.arrays import Ints


@dataclass(frozen=True, slots=True)
class Guesses:
    """How the texts of n rows go on, on the host."""

    ids: Ints
    """int64[n, M]; what stands at and behind `lens` means nothing."""
    lens: Ints
    """int64[n], 0 to M."""


class Guesser(Protocol):
    """Drafts from text that it hears late. Used by the forward thread only, which it must not make wait."""

    def begin(self, batch: ScheduleBatch) -> None:
        """Take note of the new owners of `batch`."""
        ...

    def hear(self, ran: Ran) -> None:
        """Take note of what a step sampled, once that is on the host: in the order of steps, and of owners that were
        not replaced since. `ran` is kept as it is."""
        ...

    def guess(self, rows: Ints, most: int) -> Guesses:
        """Up to `most` tokens behind all that was heard of each of `rows`, int64[n]; none for rows that have none."""
        ...


def far_enough(most: int) -> int:
    """Tokens that a guess must have for `most` drafts behind a step that verified as many."""
    return 2 * most + 1


@dataclass(frozen=True, slots=True)
class LateGuesses:
    """`Guesses` on the device, and what the host knew when it made them."""

    ids: torch.Tensor
    """int64[n, M]."""
    lens: torch.Tensor
    """int64[n]."""
    known: torch.Tensor
    """int64[n]: tokens of each text that the host knew."""

    def drafts(self, newest: torch.Tensor, before: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(drafts, int64[n, width]; how many of them count, int64[n]) behind the tokens `newest`, int64[n].

        `before`, int64[n]: tokens of each text before its newest.
        """
        behind = before + 1 - self.known
        last = self.ids.shape[1] - 1
        expected = self.ids.gather(1, (behind - 1).clamp(0, last)[:, None])[:, 0]
        fits = (behind == 0) | ((behind > 0) & (behind <= self.lens) & (expected == newest))
        places = behind[:, None] + torch.arange(width, device=behind.device)
        return self.ids.gather(1, places.clamp(0, last)), (self.lens - behind).clamp(0, width) * fits


def columns(guesses: Guesses, known: Ints) -> Sequence[Ints]:
    """`ids`, `lens` and `known` as they travel, flat."""
    return guesses.ids.reshape(-1), guesses.lens, known
