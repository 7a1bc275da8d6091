"""Which tokens a draft model has yet to compute: of each row those behind its own keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from core.batch.ragged import starts_of, walk_runs
from core.speculation.calibration import Calibration
from core.speculation.drafter import Ran
from core.types.arrays import Ints

NONE: Final[Ints] = np.empty(0, np.int64)


class Guess(NamedTuple):
    """Drafts of one row, whether they were worth proposing or not."""

    kind: int
    probabilities: list[float]
    ids: list[int]


@dataclass(slots=True)
class Follower:
    """One row that is drafted for."""

    origin: int
    """Of its random numbers."""
    done: int = 0
    """Tokens, from the first on, whose keys and values the draft model has computed, as far as it ever will."""
    waiting: list[int] = field(default_factory=list)
    """The tokens behind these, up to the newest one; none before the row has sampled."""
    guess: Guess | None = None


class Piece(NamedTuple):
    """Tokens of one row that the draft model is to run over."""

    row: int
    start: int
    """Position of the first."""
    ids: Ints
    """int64[n]."""


class DraftText:
    """Follows rows from their prompts on. Forward thread only."""

    def __init__(self, limit: int) -> None:
        """`limit`: tokens of the longest sequence that the draft model can hold; rows that are longer are let go."""
        self._limit = limit
        self._followers: dict[int, Follower] = {}

    def begin(self, rows: Ints, seeds: Sequence[tuple[int, int]]) -> None:
        """`rows`, int64[k], have new owners. `seeds`: (row, origin) of those to draft for."""
        for row in rows.tolist():
            self._followers.pop(row, None)
        for row, origin in seeds:
            self._followers[row] = Follower(origin)

    def of(self, row: int) -> Follower | None:
        """The follower of `row`; None for a row that is not drafted for."""
        return self._followers.get(row)

    def chunks(self, ran: Ran) -> list[Piece]:
        """The prompt chunks of a step, of rows that are drafted for. They count as computed from now on."""
        assert ran.computed is not None, "the drafter runs a model"
        forward = ran.computed.forward
        # A step that verifies drafts has no prompts, though all its rows are segments to the model.
        if ran.computed.kept is not None or forward.num_extend == 0:
            return []
        counts, prefixes = forward.extend_lens_host, forward.prefix_lens_host
        ids, starts, found = forward.input_ids.numpy(), starts_of(counts), list[Piece]()
        for place, row in enumerate(ran.computed.rows[: forward.num_extend].tolist()):
            follower = self._followers.get(row)
            if follower is None:
                continue
            first, start, count = int(starts[place]), int(prefixes[place]), int(counts[place])
            follower.done = start + count
            if follower.done >= self._limit:
                del self._followers[row]
                continue
            found.append(Piece(row, start, ids[first : first + count]))
        return found

    def note(self, ran: Ran, calibration: Calibration) -> None:
        """Take the tokens that the rows of a step got, and judge by them what was guessed."""
        tokens, at = ran.tokens.tolist(), 0
        for row, length, count in zip(ran.rows.tolist(), ran.lens.tolist(), ran.counts.tolist(), strict=True):
            came, at = tokens[at : at + count], at + count
            follower = self._followers.get(row)
            if follower is None:
                continue
            if length >= self._limit:
                del self._followers[row]
                continue
            if follower.guess is not None:
                calibration.judge(*follower.guess, came)
                follower.guess = None
            follower.waiting += came

    def caught_up(self, row: int) -> None:
        """The draft model has computed all of `row` but the newest token, which has no slot yet."""
        follower = self._followers[row]
        follower.done += len(follower.waiting) - 1
        del follower.waiting[:-1]


@dataclass(frozen=True, slots=True)
class Run:
    """What the draft model runs over: n rows, T tokens; int64 arrays on the host."""

    rows: Ints
    """[n]."""
    starts: Ints
    """[n]: tokens of each row before."""
    counts: Ints
    """[n]."""
    ids: Ints
    """[T]."""
    positions: Ints
    """[T]."""
    row_of: Ints
    """[T]: the place, among the n rows, of each token's row."""

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> Run:
        """The tokens of `pieces`, one or more, in order."""
        rows, starts, counts = (
            np.array(each, np.int64)
            for each in zip(*((piece.row, piece.start, len(piece.ids)) for piece in pieces), strict=True)
        )
        row_of, behind = walk_runs(counts)
        ids = np.concatenate([piece.ids for piece in pieces])
        return cls(rows, starts, counts, ids, starts[row_of] + behind, row_of)
