"""Keys and values of encoder outputs on the device, and the table from (request row, encoder token) to their slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from core.device.recorder import Recorder
from core.device.staging import Staging
from core.memory.cross.cross_pages import CROSS, NO_PAGES, CrossWrites
from core.memory.kv_pool import KVPool
from core.memory.req_to_token_pool import ReqToTokenPool
from core.types.arrays import Ints


class CrossPool:
    """Device side of the "cross_page" companion; `Captured` and `Carried`. Row 0 of the table stays zero, so
    padded rows read slot 0.

    `begin` replaces the tensors of the current step by new ones and never changes old ones, so two steps in flight
    cannot mix (law 3).
    """

    def __init__(self, requests: ReqToTokenPool, pool: KVPool, max_input: int) -> None:
        """`pool`: KV of the encoder's tokens; `max_input`: most encoder tokens of one row."""
        self.pool = pool
        self.recorder: Recorder | None = None
        self.table = requests.new_row_buffer((max_input,), torch.int32)
        """int32[rows, max_input]: the slot in `pool` of each encoder token of each request row."""
        self.lens = requests.new_row_buffer((), torch.int64)
        """int64[rows]: tokens of the encoder's input of each request row; a padded row reads one."""
        self.lens[0] = 1
        none = torch.zeros(0, dtype=torch.int64, device=requests.device)
        self.input_slots = none
        """int64[E]: slots for the keys and values of the inputs that this step encodes, in the order of their ids."""
        self.token_rows = self.last_places = self.last_slots = none
        """int64[T] each, by decoder token: its row, the last encoder token it sees, and the slot of that one."""
        self._arranged: CrossWrites | None = None
        self._arrays: Sequence[Ints] = ()
        """Those of `_arranged`, kept for the `begin` that asks for these very objects."""
        self.last_places_host: Ints = np.empty(0, np.int64)
        """int64[T]: `last_places` on the host; empty in captured work, whose replays have others."""

    @property
    def storage(self) -> Sequence[torch.Tensor]:
        """See `DeviceCompanion`."""
        return self.pool.storage

    def carried(self, writes: object | None, replayed: bool) -> Sequence[np.ndarray]:
        """See `Carried`: a replay reads nothing that comes with the step."""
        if replayed or not isinstance(writes, CrossWrites):
            return ()
        self._arranged, self._arrays = writes, _arrays(writes)
        return self._arrays

    def begin(self, rows: torch.Tensor, writes: object | None, staging: Staging) -> None:
        """Write the table entries of new inputs and set the step's tensors. `writes` is never None for this pool."""
        assert isinstance(writes, CrossWrites), "the host side answers every step"
        arrays = self._arrays if self._arranged is writes else _arrays(writes)
        written, places, self.input_slots, fresh, counts, batch_places, self.last_places = staging.upload(arrays)
        if len(writes.rows):
            self.table[written, places] = self.input_slots.to(torch.int32)
            self.lens[fresh] = counts
            if self.recorder is not None:
                self.recorder.wrote(CROSS, self.input_slots)
        self.token_rows = rows[batch_places]
        # After the writes: a decoder token may see an input that this very step encodes.
        self.last_slots = self.table[self.token_rows, self.last_places].to(torch.int64)
        self.last_places_host = writes.last_places
        if self.recorder is not None:
            self.recorder.read(CROSS, self.last_slots)

    def padding(self, extend_lens: Ints, encoder_tokens: int) -> CrossWrites:
        """See `Rehearsed`: an input in slot 0 that no row owns, and decoder tokens that see one token of it."""
        batch_places = np.repeat(np.arange(len(extend_lens)), extend_lens)
        slots = np.zeros(encoder_tokens, np.int64)
        return CrossWrites(NO_PAGES, NO_PAGES, slots, batch_places, np.zeros_like(batch_places))

    def apply(self, rows: torch.Tensor, writes: object | None, staging: Staging) -> None:
        """See `Captured`: nothing, since a new input comes with a prompt chunk."""
        assert isinstance(writes, CrossWrites) and not len(writes.rows), "decode rows have no new input"

    def look_up(self, rows: torch.Tensor) -> None:
        """See `Captured`: each row sees its input to the end."""
        self.token_rows, self.last_places = rows, self.lens[rows] - 1
        self.last_slots = self.table[rows, self.last_places].to(torch.int64)
        self.last_places_host = NO_PAGES

    def replayed(self) -> None:
        """See `Captured`: nothing is left to do."""


def _arrays(writes: CrossWrites) -> list[Ints]:
    """What of `writes` the device reads, and between that the row and the length of each new input."""
    ends = np.flatnonzero(np.diff(writes.rows, append=0))
    inputs = writes.rows[ends], writes.places[ends] + 1
    return [writes.rows, writes.places, writes.slots, *inputs, writes.batch_places, writes.last_places]
