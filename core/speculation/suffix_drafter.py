"""Drafts from what was said before: by the request itself, by its prompt, and by other requests of its scope."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from core.batch.schedule_batch import ScheduleBatch
from core.relay.payload import Column
from core.speculation.drafter import Drafts, Ran
from core.speculation.suffix_index import NOWHERE, SuffixIndex, Text
from core.types.arrays import Ints

MOST_SEEDED: Final = 16_384
"""Last tokens of a prompt that are noted: a step waits a millisecond for them."""


class SuffixDrafter:
    """A `Drafter`. Notes all text and guesses that it goes on as it did when the same few tokens were last said."""

    columns: Sequence[Column] = ()
    needs_hidden = False

    def __init__(self, bytes_limit: int) -> None:
        """`bytes_limit`: bytes that all noted text and its index may take."""
        self._index = SuffixIndex(bytes_limit)
        self._texts: dict[int, Text] = {}
        """By row, for owners that speculate."""

    def begin(self, batch: ScheduleBatch) -> None:
        """Forget the texts of former owners, and note what is known of new ones."""
        assert batch.spec is not None, "speculation is on"
        for row in batch.fresh_rows.tolist():
            self._texts.pop(row, None)
        for seed in batch.spec.seeds:
            text = self._texts[seed.row] = Text(hash(seed.scope))
            self._index.write(text, seed.ids[-MOST_SEEDED:])

    def draft(self, ran: Ran, most: int) -> Drafts:
        """Note the new tokens of each row, and draft what followed them before."""
        ids: Ints = np.full((len(ran.rows), most), NOWHERE, np.int64)
        lens: Ints = np.zeros(len(ran.rows), np.int64)
        tokens, at = ran.tokens.tolist(), 0
        for place, (row, count) in enumerate(zip(ran.rows.tolist(), ran.counts.tolist(), strict=True)):
            text = self._texts.get(row)
            if text is not None:
                for token in tokens[at : at + count]:
                    self._index.append(text, token)
                if most and (found := self._index.follow(text, most)):
                    ids[place, : len(found)] = found
                    lens[place] = len(found)
            at += count
        return Drafts(ids, lens)
