"""The drafter of the simulation: it knows what will be sampled, and says that, or something else, or nothing.

All that it says comes of its seed and of what steps tell it, so both devices hear the same from it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import numpy as np

from core.batch.hidden import NO_HIDDEN
from core.batch.schedule_batch import ScheduleBatch
from core.batch.spec_plan import NO_DRAFTS, Aim
from core.relay.payload import Column
from core.speculation.drafter import Drafts, Ran
from tests.proofs.sim.clients import Client
from tests.proofs.sim.companions import Owner
from tests.proofs.sim.reference import VOCAB

SILENT, SHORT, ILLEGAL = 0.1, 0.3, 0.1
"""How likely it says nothing for a row, fewer than it was asked for, and something that is no token."""
NO_TOKENS = (-1, VOCAB, VOCAB + 7)


Heard = tuple[int, int, list[int]] | Literal["seats"]
"""A row, how many tokens it has, and which a step brought it; or that rows got new owners."""


class Guesser:
    """A `core.speculation.drafter.Drafter`."""

    columns: Sequence[Column] = ()
    needs_hidden = NO_HIDDEN
    runs_model = False

    def __init__(self, seed: int, right: float) -> None:
        """`right`: how likely each draft is."""
        self._rng = random.Random(f"guesses of {seed}")
        self._right = right
        self._coming: dict[Owner, Client] = {}
        self._seated: dict[int, Client] = {}
        self.said: dict[int, list[int]] = {}
        """By row: the drafts for its next step, as far as they count."""
        self.heard: list[Heard] = []
        """What no reader has taken yet, in order."""

    def arrives(self, owner: Owner, client: Client) -> None:
        """The next batch seats `client`. Told by the world, and never by production."""
        self._coming[owner] = client

    def client(self, row: int) -> Client:
        """That the device computes `row` for."""
        return self._seated[row]

    def begin(self, batch: ScheduleBatch) -> None:
        """See `Drafter`."""
        generations = dict(zip(batch.rows.tolist(), batch.generations.tolist(), strict=True))
        for row in batch.fresh_rows.tolist():
            self._seated[row] = self._coming.pop((row, generations[row]))
        if len(batch.fresh_rows):
            self.heard.append("seats")

    def hear(self, ran: Ran) -> None:
        """See `Drafter`."""
        self.draft(ran, NO_DRAFTS)

    def draft(self, ran: Ran, aim: Aim) -> Drafts:
        """See `Drafter`. What stands behind the drafts of a row means nothing, and is right too."""
        most = aim.most
        ids = np.full((len(ran.rows), most), -1, np.int64)
        lens, at = [], 0
        tokens = ran.tokens.tolist()
        for place, (row, length, count) in enumerate(
            zip(ran.rows.tolist(), ran.lens.tolist(), ran.counts.tolist(), strict=True)
        ):
            self.heard.append((row, length, tokens[at : at + count]))
            at += count
            client = self._seated[row]
            truth = client.said[length + 1 - client.req.prompt_len :][:most]
            said = self._guess(truth, most)
            ids[place, : len(truth)] = truth
            ids[place, : len(said)] = said
            lens.append(len(said))
            self.said[row] = said
        return Drafts(ids, np.asarray(lens, np.int64))

    def _guess(self, truth: list[int], most: int) -> list[int]:
        rng, mood = self._rng, self._rng.random()
        if mood < SILENT:
            return []
        count = int(rng.random() * (most + 1)) if mood < SILENT + SHORT else most
        said = [
            truth[place] if place < len(truth) and rng.random() < self._right else int(rng.random() * VOCAB)
            for place in range(count)
        ]
        if said and mood > 1 - ILLEGAL:
            said[int(rng.random() * count)] = NO_TOKENS[int(rng.random() * len(NO_TOKENS))]
        return said
