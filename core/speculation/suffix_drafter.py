"""Drafts from what was said before: by the request itself, by its prompt, and by other requests of its scope."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from core.batch.hidden import NO_HIDDEN
from core.batch.schedule_batch import ScheduleBatch
from core.batch.spec_plan import Aim
from core.relay.payload import Column
from core.speculation.confidence import Confidence
from core.speculation.drafter import Drafts, Ran
from core.speculation.guesses import Guesses
from core.speculation.suffix_index import BLOCK, NOTHING, NOWHERE, ORDERS, Found, SuffixIndex, Text
from core.types.arrays import Ints

MOST_SEEDED: Final = 16_384
"""Last tokens of a prompt that are noted: a step waits 3 ms for them (2.4 GHz, beside other work)."""

MOST_UNHEARD: Final = 1024
"""Tokens that are noted together, when no drafts were wanted behind them: a step waits 5 ms for them."""

FEW: Final = 12
"""Up to so many tokens are noted faster one by one."""


@dataclass(slots=True)
class Follower:
    """One row: its text, and what was found to follow it, whether that was proposed or not."""

    text: Text
    found: Found = NOTHING
    heard: list[int] = field(default_factory=list)
    """The end of the text, which is not noted yet: at once it takes less time than token by token."""


class SuffixDrafter:
    """A `Drafter` and a `Guesser`. Notes all text, and guesses that it goes on as when the same was said last.

    A guess is proposed as far as such guesses were right often enough lately.
    """

    columns: Sequence[Column] = ()
    needs_hidden = NO_HIDDEN
    runs_model = False

    def __init__(self, bytes_limit: int, most: int) -> None:
        """`bytes_limit`: bytes that all noted text and its index may take. `most`: drafts for a row."""
        self._index = SuffixIndex(bytes_limit)
        self._confidence = Confidence(len(ORDERS), most)
        self._followers: dict[int, Follower] = {}
        """By row, for owners that speculate."""
        self._most = most
        self._unheard: list[Ran] = []
        self._unheard_tokens = 0

    def begin(self, batch: ScheduleBatch) -> None:
        """Forget the texts of former owners, and note what is known of new ones."""
        assert batch.spec is not None, "speculation is on"
        if len(batch.fresh_rows) == 0:
            return
        self._catch_up()
        for row in batch.fresh_rows.tolist():
            if row in self._followers:
                self._note(self._followers.pop(row))
        for seed in batch.spec.seeds:
            text = Text(hash(seed.scope))
            self._followers[seed.row] = Follower(text)
            self._index.write(text, seed.ids[-MOST_SEEDED:])

    def hear(self, ran: Ran) -> None:
        """Note the new tokens of each row, at the latest when the row gets another owner."""
        self._unheard.append(ran)
        self._unheard_tokens += len(ran.tokens)
        if self._unheard_tokens >= MOST_UNHEARD:
            self._catch_up()

    def draft(self, ran: Ran, aim: Aim) -> Drafts:
        """Note the new tokens of each row, and draft what followed them before, in any of the rows."""
        self._catch_up()
        followers = [self._followers.get(row) for row in ran.rows.tolist()]
        tokens, at = ran.tokens.tolist(), 0
        for follower, count in zip(followers, ran.counts.tolist(), strict=True):
            if follower is not None:
                self._hear(follower, tokens[at : at + count])
                self._note(follower)
            at += count
        return self._drafts(followers, aim)

    def guess(self, rows: Ints, most: int) -> Guesses:
        """See `Guesser`: all that followed before. A place of a grid costs the same whether a draft is tried in it."""
        self._catch_up()
        ids: Ints = np.full((len(rows), most), NOWHERE, np.int64)
        lens: Ints = np.zeros(len(rows), np.int64)
        for place, row in enumerate(rows.tolist()):
            follower = self._followers.get(row)
            if follower is not None:
                self._note(follower)
                found = self._index.follow(follower.text, most).ids
                ids[place, : len(found)], lens[place] = found, len(found)
        return Guesses(ids, lens)

    def texts(self) -> Iterator[tuple[int, Text]]:
        """The rows whose owners speculate, with all that was heard of them noted."""
        self._catch_up()
        for row, follower in self._followers.items():
            self._note(follower)
            yield row, follower.text

    def _drafts(self, followers: Sequence[Follower | None], aim: Aim) -> Drafts:
        """What is worth a place of what followed the end of each text; all text is noted."""
        most, expected = min(aim.most, self._most), 0.0
        ids: Ints = np.full((len(followers), most), NOWHERE, np.int64)
        lens: Ints = np.zeros(len(followers), np.int64)
        for place, follower in enumerate(followers):
            if follower is None:
                continue
            found = follower.found = self._index.follow(follower.text, most)
            number, right = self._confidence.prospect(found.order, len(found.ids), aim.worth)
            ids[place, :number], lens[place] = found.ids[:number], number
            expected += right
        if expected < aim.least:
            lens[:] = 0
        return Drafts(ids, lens)

    def _catch_up(self) -> None:
        """Hear the steps behind which no drafts were wanted."""
        unheard, self._unheard, self._unheard_tokens = self._unheard, [], 0
        if not unheard:
            return
        rows = np.concatenate([np.repeat(ran.rows, ran.counts) for ran in unheard])
        tokens = np.concatenate([ran.tokens for ran in unheard])
        for row in np.unique(rows).tolist():
            follower = self._followers.get(row)
            if follower is not None:
                self._hear(follower, tokens[rows == row].tolist())

    def _hear(self, follower: Follower, came: list[int]) -> None:
        """Its row goes on with the tokens that `came`."""
        if follower.found.ids:
            self._confidence.judge(follower.found.order, follower.found.ids, came)
            follower.found = NOTHING
        follower.heard += came
        if len(follower.heard) >= BLOCK:
            self._note(follower)

    def _note(self, follower: Follower) -> None:
        """Put what was heard of it into the index."""
        heard, follower.heard = follower.heard, []
        if len(heard) > FEW:
            self._index.write(follower.text, np.array(heard))
            return
        for token in heard:
            self._index.append(follower.text, token)
