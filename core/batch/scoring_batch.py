"""Which prompt tokens of one step have their log probabilities told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.types.arrays import Ints


@dataclass(frozen=True, slots=True)
class ScoringBatch:
    """P prompt tokens, segment after segment; G segments. The logits before a token say how likely it was."""

    places: Ints
    """int64[P]: places in the step's T tokens of those before them."""
    targets: Ints
    """int64[P]: their ids."""
    rows: Ints
    """int64[G]."""
    generations: Ints
    """int64[G]: the owners that they are of."""
    starts: Ints
    """int64[G]: the position in its prompt of the first token of each segment."""
    counts: Ints
    """int64[G]: tokens of each segment; they add up to P."""
    top: int
    """The most alternatives that any of them wants."""

    def beside(self, sampled: Ints) -> Ints:
        """int64[S + P]: `places` and those of rows that sample, int64[S], ascending as models take them. No place is
        both: behind the last token of a prompt an output is sampled."""
        return np.sort(np.concatenate([sampled, self.places]))


@dataclass(frozen=True, slots=True)
class ScoredSegment:
    """Tokens `place:place + len(targets)` of a step, and the tokens behind each of them, in one prompt."""

    row: int
    place: int
    start: int
    """The position in its prompt of the first of `targets`."""
    targets: Ints


def scoring(segments: Sequence[ScoredSegment], generations: Ints, top: int) -> ScoringBatch | None:
    """The batch of `segments`; None without any. `generations`: int64 by row."""
    if not segments:
        return None
    rows = np.array([each.row for each in segments], np.int64)
    counts = np.array([len(each.targets) for each in segments], np.int64)
    return ScoringBatch(
        places=np.concatenate([np.arange(each.place, each.place + len(each.targets)) for each in segments]),
        targets=np.concatenate([each.targets for each in segments]),
        rows=rows,
        generations=generations[rows],
        starts=np.array([each.start for each in segments], np.int64),
        counts=counts,
        top=top,
    )
