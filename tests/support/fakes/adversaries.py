"""Drafters that know what will be sampled, and say it, or something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from core.batch.hidden import NO_HIDDEN
from core.batch.schedule_batch import ScheduleBatch
from core.batch.spec_plan import NO_DRAFTS, Aim
from core.relay.payload import Column
from core.speculation.drafter import Drafts, Ran

Says = Callable[[list[int], int, int], list[int]]
"""(the tokens that will follow, how many drafts are wanted, size of the vocabulary) -> drafts."""


def always_right(truth: list[int], most: int, vocab: int) -> list[int]:
    return truth[:most]


def always_wrong(truth: list[int], most: int, vocab: int) -> list[int]:
    return [(token + 1) % vocab for token in truth[:most]]


def right_then_wrong(truth: list[int], most: int, vocab: int) -> list[int]:
    half = most // 2
    return [*truth[:half], *always_wrong(truth[half:], most - half, vocab)]


def unwritten(truth: list[int], most: int, vocab: int) -> list[int]:
    return [-1] * most


def right_then_beyond_the_vocabulary(truth: list[int], most: int, vocab: int) -> list[int]:
    return [*truth[:1], *[vocab] * (most - 1)]


def nothing(truth: list[int], most: int, vocab: int) -> list[int]:
    return []


def like_a_coin(seed: int) -> Says:
    """Right seven times in ten, and as many as it likes."""
    rng = np.random.default_rng(seed)

    def say(truth: list[int], most: int, vocab: int) -> list[int]:
        said = truth[: rng.integers(most + 1)]
        return [token if rng.random() < 0.7 else int(rng.integers(vocab)) for token in said]

    return say


ADVERSARIES = (always_right, always_wrong, right_then_wrong, unwritten, right_then_beyond_the_vocabulary, nothing)


class KnowingDrafter:
    """A `core.speculation.drafter.Drafter` that was told whole sequences, prompt and outputs, and follows `says`.

    `texts` checks what the step tells it: the text of each row, from its seed on.
    """

    columns: Sequence[Column] = ()
    needs_hidden = NO_HIDDEN
    runs_model = False

    def __init__(self, sequences: Sequence[Sequence[int]], says: Says, vocab_size: int) -> None:
        self._sequences = [list(sequence) for sequence in sequences]
        self._says = says
        self._vocab_size = vocab_size
        self.texts: dict[int, list[int]] = {}
        self.accepted = 0

    def begin(self, batch: ScheduleBatch) -> None:
        for row in batch.fresh_rows.tolist():
            self.texts.pop(row, None)
        assert batch.spec is not None
        for seed in batch.spec.seeds:
            self.texts[seed.row] = seed.ids.tolist()

    def hear(self, ran: Ran) -> None:
        self.draft(ran, NO_DRAFTS)

    def draft(self, ran: Ran, aim: Aim) -> Drafts:
        said, tokens, most = [], ran.tokens.tolist(), aim.most
        for row, length, count in zip(ran.rows.tolist(), ran.lens.tolist(), ran.counts.tolist(), strict=True):
            got, tokens = tokens[:count], tokens[count:]
            self.accepted += count - 1
            if row not in self.texts:
                said.append(list[int]())
                continue
            text = self.texts[row]
            text += got
            assert len(text) == length + 1, "the newest token is not in the pools, and all others are"
            said.append(self._say(text, most))
        ids = np.full((len(said), most), -1, np.int64)
        for place, drafts in enumerate(said):
            ids[place, : len(drafts)] = drafts
        return Drafts(ids, np.array([len(drafts) for drafts in said], np.int64))

    def _say(self, text: list[int], most: int) -> list[int]:
        follows = next((each for each in self._sequences if each[: len(text)] == text), text)
        truth = follows[len(text) :]
        # Behind the end of what is known, any token: the device must not verify it.
        return self._says([*truth, *[0] * most], most, self._vocab_size)[:most]
