"""The production device side of the cross pages, pool and table, around a made-up encoder.

What the encoder says is kept in the bits of keys of one element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from core.batch.forward_batch import ForwardBatch
from core.memory.cross.cross_pool import CrossPool
from core.memory.kv_pool import KVLayerSpec, KVPool
from core.memory.req_to_token_pool import ReqToTokenPool
from tests.proofs.sim.cross import CrossSide
from tests.proofs.sim.kv_memory import UNWRITTEN, KVMemory, Table
from tests.proofs.sim.plain import Plain
from tests.proofs.sim.scenario import Scenario
from tests.proofs.sim.story import Hits, Violation

LAYER = KVLayerSpec(0, 1, 1, 1, v_in_k=True)


class RealCross(CrossSide):
    """`CrossPool` over a `KVPool`, which the production step tells of the writes by itself."""

    def __init__(self, scenario: Scenario, hits: Hits, requests: ReqToTokenPool) -> None:
        super().__init__(scenario, hits)
        assert scenario.cross is not None
        kept = KVPool([LAYER], scenario.cross.pages, scenario.page_size, torch.float64, requests.device)
        self.pool = CrossPool(requests, kept, scenario.cross.longest)
        self.put(range(kept.num_slots), [UNWRITTEN] * kept.num_slots)
        self._batch: ForwardBatch | None = None

    def receive(self, batch: ForwardBatch) -> None:
        """The step whose forward runs next."""
        self._batch = batch

    def held(self, slots: Sequence[int]) -> list[int]:
        """See `CrossSide`."""
        keys = self.pool.pool.k(LAYER.layer_id)[torch.tensor(slots, dtype=torch.int64)]
        return [int(value) for value in keys.view(torch.int64).flatten().tolist()]

    def slots_of(self, row: int, count: int) -> list[int]:
        """See `CrossSide`."""
        return [int(slot) for slot in self.pool.table[row, :count].tolist()]

    def put(self, slots: Sequence[int], said: Sequence[int]) -> None:
        """See `CrossSide`."""
        keys = torch.tensor(said, dtype=torch.int64).view(torch.float64)[:, None, None]
        self.pool.pool.write(LAYER.layer_id, torch.tensor(slots, dtype=torch.int64), keys, keys)

    def forget(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """See `CrossSide`."""
        self.pool.table[list(rows)] = 0
        self.put(slots, [UNWRITTEN] * len(slots))

    def encoder_ids(self, plain: Plain) -> list[int]:
        """See `CrossSide`."""
        assert self._batch is not None, "a forward runs inside a step"
        ids = self._batch.encoder_ids
        return [] if ids is None else [int(token) for token in ids.tolist()]

    def begin(self, writes: Any) -> None:
        """See `CompanionSide`: the pool itself is told, by the step."""

    def run(self, plain: Plain, ids: list[int], tables: list[Table], kv: KVMemory) -> list[int]:
        """See `CompanionSide`. The pool must say of each token's row and last slot what the writes say."""
        said, pool, writes = super().run(plain, ids, tables, kv), self.pool, self._writes
        assert writes is not None, "refused before"
        rows = [plain.rows[place] for place in writes.batch_places.tolist()]
        lasts = [
            self.slots_of(row, last + 1)[last] for row, last in zip(rows, writes.last_places.tolist(), strict=True)
        ]
        if (pool.token_rows.tolist(), pool.last_slots.tolist()) != (rows, lasts):
            text = f"tokens of rows {pool.token_rows.tolist()} end in {pool.last_slots.tolist()}, not {rows} in {lasts}"
            raise Violation("cross_read", text)
        if pool.input_slots.tolist() != writes.slots.tolist():
            raise Violation("cross_read", f"inputs go to {pool.input_slots.tolist()}, not to {writes.slots.tolist()}")
        self._batch = None
        return said
