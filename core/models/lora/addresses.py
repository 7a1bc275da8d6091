"""Where the matrices of loaded adapters lie, in device memory of a fixed address: captured steps find them there.

An adapter has a buffer of its own, taken when it is loaded and given back when it goes. So what stays where it is can
only say where the rest is. Slots are never used twice, and their numbers grow; a place here is used again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch

from core.device.staging import Staging
from core.models.lora.packed import ALIGN_BYTES, Delta
from core.types.arrays import Ints

PLACES: Final = 255
"""Adapters that captured steps can find; steps with others run eagerly. With 256 modules the table takes 1.5 MiB."""
FIELDS: Final = 3
"""Offset of A, offset of B, rank."""
NOWHERE: Final = 0
"""The place of rows without an adapter: its ranks stay 0."""


class Addresses:
    """By module and place. Forward stream only (law 2): an entry changes after all steps that name the old adapter."""

    def __init__(self, modules: Sequence[str], dtype: torch.dtype, device: torch.device) -> None:
        """`modules`: those that adapters may change; `dtype`: of their matrices."""
        self.origin = torch.zeros(ALIGN_BYTES // dtype.itemsize, dtype=dtype, device=device)
        """What offsets are counted from, in elements: any address of the device will do."""
        self._index = {name: number for number, name in enumerate(modules)}
        self._table = torch.zeros(len(modules), PLACES + 1, FIELDS, dtype=torch.int64, device=device)
        self._free = list(range(PLACES, NOWHERE, -1))
        self._place_of: dict[int, int] = {}

    def of(self, module: str) -> torch.Tensor:
        """int64[PLACES + 1, FIELDS] of one module: a view, whose contents change."""
        return self._table[self._index[module]]

    def place(self, slot: int) -> int:
        """The place of the adapter in `slot`; NOWHERE without one."""
        return self._place_of.get(slot, NOWHERE)

    def fill(self, slot: int, deltas: Mapping[str, Delta], staging: Staging) -> None:
        """The adapter in `slot` is `deltas`. It gets no place where all are taken, or a module is unknown."""
        self.empty(slot)
        if not self._free or not deltas.keys() <= self._index.keys():
            return
        place = self._place_of[slot] = self._free.pop()
        entries: Ints = np.zeros((len(self._index), FIELDS), np.int64)
        for name, delta in deltas.items():
            entries[self._index[name]] = (self._offset(delta.a), self._offset(delta.b), delta.a.shape[0])
        self._table[:, place] = staging.upload([entries])[0]

    def empty(self, slot: int) -> None:
        """No step names `slot` from now on."""
        place = self._place_of.pop(slot, NOWHERE)
        if place != NOWHERE:
            self._free.append(place)
            self._table[:, place] = 0

    def _offset(self, matrix: torch.Tensor) -> int:
        apart = matrix.data_ptr() - self.origin.data_ptr()
        assert apart % ALIGN_BYTES == 0 and matrix.is_contiguous(), "matrices are packed, and aligned"
        return apart // matrix.element_size()
