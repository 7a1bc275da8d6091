"""Keys and values of sliding-window layers in pages of their own, and the device table that finds them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from core.device.recorder import Recorder
from core.device.staging import Staging
from core.memory.kv_pool import KVPool
from core.memory.window.window_pages import WindowWrites

TABLE = "swa_table"
"""Name of the device table for a `Recorder`."""


class SlidingWindowPool:
    """Device side of the "swa_page" companion; `Carried`. `kv` holds the windowed layers only, in as many pages as
    windows need.

    `table` int32[KV pages + 1] gives the page of `kv` that stands for a page of the ordinary pool; 0 where none does,
    and always for padding page 0. So a KV page without a window page reads and writes padding, never another row's
    keys. From SGLang's SWAKVPool, whose table is by token slot.
    """

    def __init__(self, kv: KVPool, num_kv_pages: int) -> None:
        self.kv = kv
        self.table = torch.zeros(num_kv_pages + 1, dtype=torch.int32, device=kv.device)

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of `kv`."""
        return self.kv.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self.kv.recorder = recorder

    @property
    def storage(self) -> Sequence[torch.Tensor]:
        """See `DeviceCompanion`."""
        return self.kv.storage

    def carried(self, writes: object | None, replayed: bool) -> Sequence[np.ndarray]:
        """See `Carried`."""
        return (writes.pages, writes.windows) if isinstance(writes, WindowWrites) else ()

    def begin(self, rows: torch.Tensor, writes: object | None, staging: Staging) -> None:
        """Write the changed table entries. Earlier steps have read the old entries; this step reads the new ones."""
        assert writes is None or isinstance(writes, WindowWrites), type(writes)
        if writes is None:
            return
        pages, windows = staging.upload([writes.pages, writes.windows])
        self.table[pages] = windows.to(torch.int32)
        if self.recorder is not None:
            self.recorder.wrote(TABLE, writes.pages)
