"""A guesser that knows what will be sampled, and says it, or something else, of texts that it hears late."""

from __future__ import annotations

import numpy as np

from core.batch.spec_plan import NO_DRAFTS
from core.speculation.drafter import Ran
from core.speculation.guesses import Guesses
from core.types.arrays import Ints
from tests.support.fakes.adversaries import KnowingDrafter


class LateDrafter(KnowingDrafter):
    """A `core.speculation.guesses.Guesser`: `says` is asked of what follows the text that was heard.

    It checks that all it hears of a row belongs to its owner: it is the beginning of a sequence, or runs on behind one.
    """

    def hear(self, ran: Ran) -> None:
        self.draft(ran, NO_DRAFTS)

    def guess(self, rows: Ints, most: int) -> Guesses:
        said = [self._say(self._heard(row), most) if row in self.texts else [] for row in rows.tolist()]
        # What stands behind the end means nothing.
        ids = np.full((len(said), most), 5, np.int64)
        for place, tokens in enumerate(said):
            ids[place, : len(tokens)] = tokens
        return Guesses(ids, np.array([len(tokens) for tokens in said], np.int64))

    def _heard(self, row: int) -> list[int]:
        text = self.texts[row]
        assert any(known[: len(text)] == text[: len(known)] for known in self._sequences), "a text of two owners"
        return text
