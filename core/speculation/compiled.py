"""Drafts from what was said before in compiled code: what `SuffixDrafter` does, for all rows of a step in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from core.batch.hidden import NO_HIDDEN
from core.batch.schedule_batch import ScheduleBatch
from core.batch.spec_plan import Aim
from core.native.host import HostCode
from core.relay.payload import Column
from core.speculation.drafter import Drafts, Ran
from core.speculation.guesses import Guesses
from core.speculation.suffix_drafter import MOST_SEEDED, SuffixDrafter
from core.types.arrays import Ints


class CompiledSuffixDrafter:
    """A `Drafter` and a `Guesser`: makes the drafts that a `SuffixDrafter` would, at a fraction of what they cost."""

    columns: Sequence[Column] = ()
    needs_hidden = NO_HIDDEN
    runs_model = False

    def __init__(self, module: Any, bytes_limit: int, most: int) -> None:
        """`module`: see `core.native.host`; the others as of `SuffixDrafter`."""
        self._drafter = module.SuffixDrafter(bytes_limit, most)
        self._most = most

    @property
    def nbytes(self) -> int:
        """Bytes of its index, whatever it holds."""
        size: int = self._drafter.nbytes
        return size

    def begin(self, batch: ScheduleBatch) -> None:
        """See `SuffixDrafter`."""
        assert batch.spec is not None, "speculation is on"
        if len(batch.fresh_rows) == 0:
            return
        self._drafter.forget(batch.fresh_rows)
        for seed in batch.spec.seeds:
            self._drafter.seed(seed.row, hash(seed.scope), seed.ids[-MOST_SEEDED:])

    def hear(self, ran: Ran) -> None:
        """See `SuffixDrafter`."""
        self._drafter.hear(ran.rows, ran.counts, ran.tokens)

    def draft(self, ran: Ran, aim: Aim) -> Drafts:
        """See `SuffixDrafter`."""
        most = min(aim.most, self._most)
        return Drafts(*self._drafter.draft(ran.rows, ran.counts, ran.tokens, most, aim.worth, aim.least))

    def guess(self, rows: Ints, most: int) -> Guesses:
        """See `Guesser`."""
        return Guesses(*self._drafter.guess(rows, most))

    def go_on(self, former: SuffixDrafter) -> None:
        """Draft for the rows of `former` from now on. Of their texts only the ends are known here."""
        for row, text in former.texts():
            self._drafter.seed(row, text.scope, np.array(text.tail, np.int64))


class UpgradingDrafter:
    """A `Drafter` and a `Guesser`: in Python until there is compiled code, which takes over between two steps.

    What was noted by then is forgotten but for the ends of running texts. Nothing was said for long: compiling takes
    seconds, and begins with the engine.
    """

    columns: Sequence[Column] = ()
    needs_hidden = NO_HIDDEN
    runs_model = False

    def __init__(self, code: HostCode, bytes_limit: int, most: int) -> None:
        """`code`: looked at before each step; the others as of `SuffixDrafter`."""
        self._code = code
        self._sizes = bytes_limit, most
        self._python: SuffixDrafter | None = SuffixDrafter(*self._sizes)
        self._drafter: SuffixDrafter | CompiledSuffixDrafter = self._python

    def begin(self, batch: ScheduleBatch) -> None:
        """See `SuffixDrafter`."""
        if self._python is not None and self._code.module is not None:
            self._drafter = compiled = CompiledSuffixDrafter(self._code.module, *self._sizes)
            compiled.go_on(self._python)
            self._python = None
        self._drafter.begin(batch)

    def hear(self, ran: Ran) -> None:
        """See `SuffixDrafter`."""
        self._drafter.hear(ran)

    def draft(self, ran: Ran, aim: Aim) -> Drafts:
        """See `SuffixDrafter`."""
        return self._drafter.draft(ran, aim)

    def guess(self, rows: Ints, most: int) -> Guesses:
        """See `Guesser`."""
        return self._drafter.guess(rows, most)
