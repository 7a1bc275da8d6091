"""The places of a step that a draft head runs over, and those of former steps that it has not run over yet.

At each place the head needs the token behind it. That is the next input of its row, the token that was sampled there,
or, at the end of a prompt's middle chunk, the next token of the prompt, which is known from the seed of the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.ragged import starts_of
from core.speculation.drafter import Ran
from core.types.arrays import Bools, Ints

MOST_WAITING: Final = 1024
"""Places that wait at most, since each holds the states of several layers; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class Known:
    """One row that is drafted for."""

    ids: Ints
    """int64[m]: its text when it got the row."""
    origin: int
    """Of its random numbers, see `TextSeed`."""


@dataclass(frozen=True, slots=True)
class HeadPlaces:
    """T places of n rows, row after row, consecutive in each."""

    rows: Ints
    """int64[n]."""
    prefixes: Ints
    """int64[n]: the first place of each row here."""
    counts: Ints
    """int64[n]."""
    ids: torch.Tensor
    """int64[T]: the token behind each place."""
    states: torch.Tensor
    """[T, F]: what the head reads of the target."""
    positions: torch.Tensor
    """int64[T], and `slots`."""
    slots: torch.Tensor

    @classmethod
    def of(cls, ran: Ran, known: Mapping[int, Known]) -> HeadPlaces:
        """All places that count of a step. `known`: by row, what is drafted for."""
        computed = ran.computed
        assert computed is not None, "the drafter runs a model"
        forward, kept = computed.forward, computed.kept
        states = states_of(forward)
        if kept is None and forward.num_extend == 0:
            # One token a row, each of which has sampled: the usual step without drafts.
            counts = np.ones(len(computed.rows), np.int64)
            ids = torch.from_numpy(ran.tokens)
            return cls(computed.rows, ran.lens - 1, counts, ids, states, forward.positions, forward.out_cache_loc)
        if kept is not None:
            index = torch.from_numpy(np.flatnonzero(kept))
            those = (each.index_select(0, index) for each in (states, forward.positions, forward.out_cache_loc))
            return cls(computed.rows, ran.lens - ran.counts, ran.counts, torch.from_numpy(ran.tokens), *those)
        lens = forward.prefix_lens_host, forward.extend_lens_host
        sampled = dict(zip(ran.rows.tolist(), ran.tokens.tolist(), strict=True))
        behind = torch.from_numpy(behind_chunks(forward.input_ids.numpy(), computed.rows, *lens, sampled, known))
        return cls(computed.rows, *lens, behind, states, forward.positions, forward.out_cache_loc)

    def of_rows(self, chosen: Bools) -> HeadPlaces:
        """Those of some of the rows, bool[n]."""
        if chosen.all():
            return self
        index = torch.from_numpy(np.flatnonzero(np.repeat(chosen, self.counts)))
        tensors = (each.index_select(0, index) for each in (self.ids, self.states, self.positions, self.slots))
        return HeadPlaces(self.rows[chosen], self.prefixes[chosen], self.counts[chosen], *tensors)

    @property
    def lasts(self) -> Ints:
        """int64[n]: the index, among the T, of the last place of each row."""
        return starts_of(self.counts) + self.counts - 1


def states_of(forward: ForwardBatch) -> torch.Tensor:
    """[T, F]: what the first head reads of a step, which its model has computed."""
    states = forward.hidden if forward.layer_states is None else forward.layer_states
    assert states is not None, "the model gives the states that it is asked for"
    return states


def behind_chunks(
    ids: Ints, rows: Ints, prefixes: Ints, counts: Ints, sampled: Mapping[int, int], known: Mapping[int, Known]
) -> Ints:
    """int64[T]: the token behind each of the T `ids` of a step with chunks of prompts, which verified no drafts.

    `rows`, `prefixes`, `counts`: int64[n], as in `HeadPlaces`. `sampled`: the new token of each row that has one.
    """
    behind: Ints = np.empty_like(ids)
    behind[:-1] = ids[1:]
    for row, end, place in zip(rows.tolist(), np.cumsum(counts).tolist(), (prefixes + counts).tolist(), strict=True):
        seed = known.get(row)
        if row in sampled:
            behind[end - 1] = sampled[row]
        elif seed is not None and place < len(seed.ids):
            behind[end - 1] = seed.ids[place]
        else:
            # Of a row that is not drafted for, in the middle of its prompt: drafts that read this place are worse.
            behind[end - 1] = ids[end - 1]
    return behind


class Waiting:
    """Places of rows that decoded while no drafts were wanted: the head runs over them when drafts are wanted again."""

    def __init__(self) -> None:
        self._steps: list[HeadPlaces] = []
        self._tokens = 0

    def __bool__(self) -> bool:
        """Whether any wait."""
        return bool(self._steps)

    def add(self, places: HeadPlaces) -> None:
        """They wait from now on."""
        self._steps.append(places)
        self._tokens += len(places.ids)
        while self._tokens > MOST_WAITING:
            self._tokens -= len(self._steps.pop(0).ids)

    def forget(self, rows: Ints) -> None:
        """`rows` have other owners."""
        kept = [step.of_rows(~np.isin(step.rows, rows)) for step in self._steps]
        self._steps = [step for step in kept if len(step.rows)]
        self._tokens = sum(len(step.ids) for step in self._steps)

    def before(self, places: HeadPlaces) -> HeadPlaces:
        """`places`, and before them what waited of the same rows without a gap. Nothing waits afterwards."""
        steps, self._steps, self._tokens = [*self._steps, places], [], 0
        rows = np.concatenate([np.repeat(step.rows, step.counts) for step in steps])
        positions = torch.cat([step.positions for step in steps]).numpy()
        line = np.full(max(int(rows.max()), int(places.rows.max())) + 1, -1, np.int64)
        line[places.rows] = np.arange(len(places.rows))
        lines = line[rows]
        order = np.lexsort((positions, lines))
        order = order[lines[order] >= 0]
        # Behind the last gap of each row, from its newest place backwards, positions fall one by one.
        ends = np.cumsum(np.bincount(lines[order], minlength=len(places.rows))) - 1
        back = ends[lines[order]] - np.arange(len(order))
        off = positions[order] + back != positions[order][ends][lines[order]]
        gaps = np.full(len(places.rows), -1, np.int64)
        np.maximum.at(gaps, lines[order][off], np.flatnonzero(off))
        order = order[np.arange(len(order)) > gaps[lines[order]]]
        counts = np.bincount(lines[order], minlength=len(places.rows))
        index = torch.from_numpy(order)
        ids, states, slots = (
            torch.cat([getattr(step, name) for step in steps]).index_select(0, index)
            for name in ("ids", "states", "slots")
        )
        found = torch.from_numpy(positions[order])
        return HeadPlaces(places.rows, positions[order][starts_of(counts)], counts, ids, states, found, slots)
