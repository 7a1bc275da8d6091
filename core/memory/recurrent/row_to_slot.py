"""Request rows and recurrent states side by side: the device table from request row to state slot.

Has a `ReqToTokenPool` and a `MambaPool`, and is neither: SGLang's HybridReqToTokenPool without its inheritance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from core.device.recorder import Recorder
from core.device.staging import Staging
from core.invariants import check
from core.memory.recurrent.state_pool import MambaPool
from core.memory.recurrent.state_slots import NAME, StateWrites, Tracked
from core.memory.req_to_token_pool import ReqToTokenPool
from core.types.arrays import Bools, Ints


@dataclass(frozen=True, slots=True)
class PlaceStates:
    """Where the state behind each of the T places of a step goes that verifies drafts."""

    counts: Ints
    """int64[B] on the host: tokens of each row, its newest one and its drafts."""
    starts: Ints
    """int64[B] on the host: the place of each row's newest token."""
    slots: torch.Tensor
    """int64[T]: the slot of the row behind its newest token, which counts whatever becomes of the drafts; draft slots
    behind these."""


class HybridReqToTokenPool:
    """Device side of the "mamba" companion; `LateBound`, `Judged`, `Captured` and `Carried`. Row 0 maps to slot 0 for
    ever, so padded rows land in padding.

    A step that verifies drafts leaves one state behind each place. Once it is known how many places of a row count,
    the state behind the last of them is copied into the slot of the row.
    """

    def __init__(self, requests: ReqToTokenPool, states: MambaPool) -> None:
        self.states = states
        self.recorder: Recorder | None = None
        # Exactly as long as the request table, whatever the number of slots (review of SGLang #24243).
        self.mapping = requests.new_row_buffer((), torch.int64)
        self.step_slots = torch.zeros(0, dtype=torch.int64, device=requests.device)
        """int64[B]: slots of the current step's rows, in batch order."""
        self.tracked = Tracked()
        self.tracked_slots = self.step_slots
        """int64[n] on the device: `tracked.slots`."""
        self.tracked_from = self.step_slots
        """int64[n]: the slots of the tracked rows, from which their states are copied into `tracked_slots`."""
        self._prefix_lens: Ints = np.empty(0, np.int64)
        """int64[B]: tokens of each row before the step, as `measured` was told."""
        self._places: PlaceStates | None = None

    @property
    def storage(self) -> Sequence[torch.Tensor]:
        """See `DeviceCompanion`."""
        return self.states.storage

    def begin(self, rows: torch.Tensor, writes: object | None, staging: Staging) -> None:
        """Map new rows to their slots and set those slots' first states, then look up the slots of this step's rows.

        The one FIFO puts this after the last write of a slot's former owner (law 4).
        """
        self.apply(rows, writes, staging)
        self.look_up(rows)
        if self.recorder is not None:
            self.recorder.wrote(NAME, self.step_slots)
            self.recorder.wrote(NAME, self.tracked_slots)

    def apply(self, rows: torch.Tensor, writes: object | None, staging: Staging) -> None:
        """See `Captured`: new rows, and where the snapshots of this step come from and go to."""
        assert writes is None or isinstance(writes, StateWrites), type(writes)
        self.tracked, self._places = Tracked(), None
        self.tracked_slots = self.tracked_from = rows[:0]
        if writes is None:
            return
        self.tracked = writes.tracked
        fresh, slots, sources, places, self.tracked_slots = staging.upload(_arrays(writes))
        if len(writes.rows):
            self.mapping[fresh] = slots
            self.states.start(slots, sources)
            if self.recorder is not None:
                self.recorder.read(NAME, sources)
        self.tracked_from = self.mapping[rows[places]]

    def padding(self, extend_lens: Ints, encoder_tokens: int) -> None:
        """See `Rehearsed`: row 0 has slot 0, and begins nowhere."""

    def carried(self, writes: object | None, replayed: bool) -> Sequence[np.ndarray]:
        """See `Carried`."""
        return _arrays(writes) if isinstance(writes, StateWrites) else ()

    def look_up(self, rows: torch.Tensor) -> None:
        """See `Captured`: padded rows have slot 0."""
        self.step_slots = self.mapping[rows]

    def replayed(self) -> None:
        """See `Captured`: take the snapshots, of states that nothing changes before the next step."""
        if len(self.tracked.places):
            self.states.copy_all(self.tracked_from, self.tracked_slots)

    def measured(self, prefix_lens: Ints, extend_lens: Ints, staging: Staging) -> None:
        """See `LateBound`: of the snapshots, keep those whose tokens the step computes."""
        self._prefix_lens = prefix_lens
        before, places = prefix_lens[self.tracked.places], self.tracked.places
        self._narrow((before < self.tracked.ends) & (self.tracked.ends <= before + extend_lens[places]), staging)

    def verify(self, counts: Ints, staging: Staging) -> PlaceStates:
        """Slots for the states of a step that computes `counts[i]` tokens of row i, int64[B]: drafts behind the first.

        Which snapshots it takes is decided once `judged` knows how many count.
        """
        starts: Ints = np.cumsum(counts) - counts
        row = np.repeat(np.arange(len(counts)), counts)
        drafts = np.arange(len(row)) > starts[row]
        number = len(row) - len(counts)
        check("state_draft_room", number <= self.states.drafts, drafts=number, room=self.states.drafts)
        spare = np.where(drafts, self.states.size + drafts.cumsum(), 0)
        rows, spare_slots, is_draft = staging.upload([row, spare, drafts])
        slots = torch.where(is_draft, spare_slots, self.step_slots[rows])
        if self.recorder is not None:
            self.recorder.wrote(NAME, slots)
        self._places = PlaceStates(counts, starts, slots)
        return self._places

    def judged(self, counts: Ints, staging: Staging) -> None:
        """See `Judged`: keep the snapshots that no wrong draft went into, and set each row to its last right place."""
        places = self._places
        assert places is not None, "the step verified drafts"
        tracked, self._places = self.tracked, None
        into = tracked.ends - self._prefix_lens[tracked.places]
        # Snapshots behind a wrong draft are not taken: the row will pass that page's end in a later step.
        self._narrow(into <= counts[tracked.places], staging)
        tracked, moved = self.tracked, np.flatnonzero(counts > 1)
        into = tracked.ends - self._prefix_lens[tracked.places]
        last = np.concatenate([places.starts[tracked.places] + into, places.starts[moved] + counts[moved]]) - 1
        if len(last) == 0:
            return
        found, rows = staging.upload([last, moved])
        sources, slots = places.slots[found], torch.cat([self.tracked_slots, self.step_slots[rows]])
        if self.recorder is not None:
            self.recorder.read(NAME, sources)
            self.recorder.wrote(NAME, slots)
        self.states.copy_all(sources, slots)

    def _narrow(self, kept: Bools, staging: Staging) -> None:
        """Take the snapshots that are set in `kept`, bool[n], and no others."""
        if kept.all():
            return
        places, ends, slots = (column[kept] for column in (self.tracked.places, self.tracked.ends, self.tracked.slots))
        self.tracked = Tracked(places, ends, slots)
        rows, self.tracked_slots = staging.upload([places, slots])
        self.tracked_from = self.step_slots[rows]


def _arrays(writes: StateWrites) -> list[Ints]:
    """What of `writes` the device reads."""
    return [writes.rows, writes.slots, writes.sources, writes.tracked.places, writes.tracked.slots]
