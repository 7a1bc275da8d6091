"""The table from (request row, position) to KV slot, and the birthplace of every other row-indexed buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from core.device.recorder import Recorder
from core.invariants import check
from core.memory.rows import RowAllocator
from core.types.arrays import Ints

TABLE = "req_to_token"
"""Name of the table for a `Recorder`."""


@dataclass(frozen=True, slots=True)
class TableWrites:
    """Pages that this step must enter in `req_to_token` before it reads: `pages[i]` is page `places[i]` of `rows[i]`.

    int64[n] each, on the host.
    """

    rows: Ints
    places: Ints
    pages: Ints
    page_size: int
    """Tokens of a page."""

    @classmethod
    def empty(cls, page_size: int) -> TableWrites:
        """The writes of a step that takes no new page."""
        none = np.empty(0, np.int64)
        return cls(none, none, none, page_size)

    def tokens(self) -> tuple[Ints, Ints, Ints]:
        """(row, position and slot of every token of the pages), int64[n * page_size] each."""
        within, size = np.arange(self.page_size), self.page_size
        positions, slots = ((each[:, None] * size + within).ravel() for each in (self.places, self.pages))
        return np.repeat(self.rows, size), positions, slots


class ReqToTokenPool:
    """`size` request rows plus padding row 0 over a table int32[size + 1, max_context_len].

    Two owners share this object and never each other's part (law 2): `rows` is host state of the scheduler, `table` is
    device state that only the forward thread writes. Row 0 of the table stays zero for ever, so a padded row reads KV
    slot 0. From SGLang's ReqToTokenPool; slot 0 as padding is SGLang #24243.
    """

    def __init__(self, size: int, max_context_len: int, device: torch.device) -> None:
        self.rows = RowAllocator(size)
        self.max_context_len = max_context_len
        self.device = device
        self.recorder: Recorder | None = None
        self.table = self.new_row_buffer((max_context_len,), torch.int32)
        # Its entries in one row: a look-up by one index takes less than one by two.
        self._entries = self.table.view(-1)
        self._within = torch.arange(max_context_len, device=device)

    @property
    def size(self) -> int:
        """Rows that requests can own."""
        return self.rows.size

    @property
    def num_rows(self) -> int:
        """Rows of the table, padding included: the length of every row-indexed buffer."""
        return self.rows.size + 1

    def new_row_buffer(self, tail: tuple[int, ...], dtype: torch.dtype, fill: int | float = 0) -> torch.Tensor:
        """A device tensor [num_rows, *tail] filled with `fill`.

        The only way to make a buffer indexed by request row (law 6): one sized from another pool's capacity reads or
        writes out of bounds as soon as the two sizes differ, which is how SGLang #24243 got its review finding.
        """
        return torch.full((self.num_rows, *tail), fill, dtype=dtype, device=self.device)

    def write(self, rows: torch.Tensor, places: torch.Tensor, pages: torch.Tensor, page_size: int) -> None:
        """Enter the slots of whole pages: `pages[i]` is page `places[i]` of `rows[i]`; int64[n] each.

        The table is a whole number of pages wide. Pages, not slots, come from the host: a long prompt takes thousands
        of slots. Forward stream only.
        """
        if self.recorder is not None:
            self.recorder.wrote(TABLE, rows)
        slots = torch.add(self._within[:page_size], pages[:, None], alpha=page_size)
        self.table.view(self.num_rows, -1, page_size)[rows, places] = slots.to(torch.int32)

    def slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64[n]: the KV slot of the token at positions[i] of rows[i]; int64[n] each. Forward stream only."""
        if self.recorder is not None:
            self.recorder.read(TABLE, rows)
        places = torch.add(positions, rows, alpha=self.max_context_len)
        return self._entries.index_select(0, places).to(torch.int64)

    def slots_on_host(self, rows: Ints, positions: Ints) -> Ints:
        """As `slots`, int64[n], of a pool on the CPU. Operations on tensors would let go of the interpreter."""
        if self.recorder is not None:
            self.recorder.read(TABLE, rows)
        found: Ints = self.table.numpy()[rows, positions].astype(np.int64)
        return found

    def check_padding(self) -> None:
        """Raise InvariantViolation if row 0 is not all zero. Waits for the device: for tests and idle checks only."""
        dirty: Any = int(torch.count_nonzero(self.table[0]).item())
        check("row_padding_reserved", dirty == 0, dirty_entries=dirty)
