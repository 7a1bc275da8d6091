"""Draft heads one behind the other: multi-token prediction with several heads (DeepSeek-V3, 2024).

Head k takes at place p the token p + 1 + k, and what the head before made of place p; the first takes what the target
made of it. It says what token p + 2 + k is. So where token L is the newest one, head k knows its token at the places
up to L - 1 - k. At the k places behind these it takes drafts of the heads before for tokens; it runs over them again,
in the same slots, once their tokens are known. That is what `transformers` does (`MtpModel`, `use_mtp`).

To go on, head k needs one state of the step before: what the head before it made of the place L - k, the last one whose
tokens that head knew. Each head has a column of the FutureMap for it, and two more say which of them hold: how far the
heads have come in a row, and how many places behind that they have run over without a gap. Places before a prefix hit,
and before a gap, are never computed again: their pages may be read by other rows, and their states are not at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from core.batch.ragged import starts_of, walk_runs
from core.models.eagle.head import Head, HeadStep
from core.relay.future_map import FutureMap
from core.relay.payload import Column
from core.speculation.eagle_places import HeadPlaces
from core.types.arrays import Bools, Ints

END: Final = "heads_end"
"""Column: the first place of a row that its heads have not run over."""
REACH: Final = "heads_reach"
"""Column: places before `END` that they have run over without a gap, at most as many as there are heads but one."""
READS: Final = "head_{}_reads"
"""Column of head k, from 1 on: what head k - 1 made of the place k before `END`. Means nothing where `REACH` < k."""


class HeadChain:
    """One head or several. Forward thread only."""

    def __init__(self, heads: Sequence[Head], size: int, dtype: torch.dtype) -> None:
        """What one head gives to the next are `size` numbers of `dtype`."""
        self._heads = tuple(heads)
        self.columns: tuple[Column, ...] = ()
        """Of the FutureMap; none for a head alone, which needs the target's states only."""
        if len(heads) > 1:
            states = (Column(READS.format(k), dtype, (size,)) for k in range(1, len(heads)))
            self.columns = (Column(END, torch.int64), Column(REACH, torch.int64), *states)

    def __len__(self) -> int:
        """Drafts that take a head each."""
        return len(self._heads)

    @property
    def last(self) -> Head:
        """The head that says what is behind the others."""
        return self._heads[-1]

    def over(self, places: HeadPlaces, table: torch.Tensor, relay: FutureMap) -> ChainRun:
        """The way of all heads over `places`, whose slots are in `table`, int32[R, width]. Nothing is run yet."""
        return ChainRun(self._heads, places, table, relay)


@dataclass(frozen=True, slots=True)
class Made:
    """What a head has made of its places, of n rows."""

    states: torch.Tensor
    """[T, H]."""
    starts: Ints
    """int64[n]: where the places of each row begin."""


class ChainRun:
    """Heads over the places of one step, each once. What fails on the way leaves nothing: the next step starts anew."""

    def __init__(self, heads: tuple[Head, ...], places: HeadPlaces, table: torch.Tensor, relay: FutureMap) -> None:
        self._heads = heads
        self._places = places
        self._table = table
        self._relay = relay
        self._done = 0
        """Heads that have run."""
        self._made: Made | None = None
        if len(heads) == 1:
            return
        self._rows = torch.from_numpy(places.rows)
        ends, reach = (self._relay.extra(name, self._rows).numpy() for name in (END, REACH))
        self._back: Ints = np.where(ends == places.prefixes, reach, 0)
        """int64[n]: places before those of this step that heads may run over again."""
        self._drafts: Ints = np.zeros((len(places.rows), len(heads) - 1), np.int64)
        self._left = dict[str, torch.Tensor]()

    def next(self, lines: Ints, tokens: Ints | None) -> tuple[torch.Tensor, torch.Tensor]:
        """What the next head says behind the newest draft of the rows `lines`, int64[m], rising: of the n of `places`.

        `tokens`, int64[m]: these drafts; None before the first head. Returns (float32[m, Vd] logits, [m, H] what it
        made there). Of the other rows it runs over what is known, and no more.
        """
        if tokens is not None:
            self._drafts[lines, self._done - 1] = tokens
        going: Bools = np.zeros(len(self._places.rows), np.bool_)
        going[lines] = True
        return self._run(going)

    def finish(self) -> None:
        """Run the heads that are left over what is known, and leave to the next step what it needs."""
        while self._done < len(self._heads):
            self._run(np.zeros(len(self._places.rows), np.bool_))
        if len(self._heads) == 1:
            return
        places = self._places
        self._left[END] = torch.from_numpy(places.prefixes + places.counts)
        self._left[REACH] = torch.from_numpy(np.minimum(self._back + places.counts, len(self._heads) - 1))
        self._relay.carry(self._rows, self._left)

    def _run(self, going: Bools) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one head: of the rows `going`, bool[n], to their last places, with drafts for tokens."""
        number, places = self._done, self._places
        step = self._first(going) if number == 0 else self._deeper(number, going)
        if len(step.ids):
            logits, states = self._heads[number].run(step)
        else:
            logits = states = step.features
        self._done += 1
        if self._done < len(self._heads):
            counts: Ints = np.zeros(len(places.rows), np.int64)
            counts[self._runs] = step.extends
            self._made = Made(states, starts_of(counts))
            self._left[READS.format(self._done)] = self._reads(self._done)
        return logits, states.index_select(0, step.wanted)

    def _first(self, going: Bools) -> HeadStep:
        places = self._places
        self._runs: Bools = np.ones(len(places.rows), np.bool_)
        return HeadStep(
            *(places.ids, places.states, places.positions, places.slots, torch.from_numpy(places.rows)),
            *(places.prefixes, places.counts, torch.from_numpy(places.lasts[going]), self._table),
        )

    def _deeper(self, number: int, going: Bools) -> HeadStep:
        """The step of head `number`, from 1 on: what waited for its tokens, and what is new."""
        places, again = self._places, np.minimum(number, self._back)
        counts = (places.counts + again - np.where(going, 0, number)).clip(0)
        firsts = places.prefixes - again
        row_of, behind = walk_runs(counts)
        positions = firsts[row_of] + behind
        self._runs = counts > 0
        slots = self._table.numpy()[places.rows[row_of], positions].astype(np.int64)
        ids, at, rows = (
            torch.from_numpy(each) for each in (self._tokens(row_of, positions + number), positions, slots)
        )
        return HeadStep(
            *(ids, self._features(number, row_of, behind), at, rows, torch.from_numpy(places.rows[self._runs])),
            *(firsts[self._runs], counts[self._runs], torch.from_numpy(np.cumsum(counts)[going] - 1), self._table),
        )

    def _tokens(self, row_of: Ints, before: Ints) -> Ints:
        """int64[T]: the tokens of the rows `row_of` behind the places `before`: known ones, and drafts behind these."""
        places = self._places
        at = before - places.prefixes[row_of]
        beyond = at - places.counts[row_of]
        known = places.ids.numpy()[starts_of(places.counts)[row_of] + np.minimum(at, places.counts[row_of] - 1)]
        tokens: Ints = np.where(beyond < 0, known, self._drafts[row_of, beyond.clip(0)])
        return tokens

    def _features(self, number: int, row_of: Ints, behind: Ints) -> torch.Tensor:
        """[T, H]: what head `number` reads: of its first place what was left to it, if that is one before all that is
        new to the head before; and what that has made.
        """
        assert self._made is not None, "the head before has run"
        left = (self._back >= number)[row_of]
        made = len(self._back) + self._made.starts[row_of] + behind - left
        source = torch.from_numpy(np.where(left & (behind == 0), row_of, made))
        carried = self._relay.extra(READS.format(number), self._rows)
        return torch.cat([carried, self._made.states]).index_select(0, source)

    def _reads(self, number: int) -> torch.Tensor:
        """[n, H]: what head `number` will read of its first place in the next step, see `READS`."""
        assert self._made is not None, "the head before has run"
        behind = self._places.counts - number + np.minimum(number - 1, self._back)
        source = torch.from_numpy(np.where(behind < 0, 0, self._made.starts + behind))
        if not len(self._made.states):
            return self._made.states.new_zeros((len(source), self._made.states.shape[1]))
        return self._made.states.index_select(0, source)
