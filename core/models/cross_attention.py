"""Cross attention over pages of its own: every decoder token sees all encoder tokens of its own request.

To a backend that is a step of single-token rows: a query that stands at the last encoder token sees everything up to
it. So the same backends serve it, without a mask of their own; the keys of that last token, which the contract has them
write first, are the ones that stand there already.
"""

from __future__ import annotations

import numpy as np
import torch

from core.attention.base import AttentionBackend
from core.batch.forward_batch import ForwardBatch
from core.batch.forward_mode import ForwardMode
from core.memory.kv_pool import KVPool
from core.types.arrays import Ints


class CrossAttention:
    """Cross keys and values of all rows: `pool` by slot, `table` int32[R, longest input] from row and place to slot.

    `lengths` int64[R] on the host are encoder tokens by row; 0 marks a row nobody encoded, which must not attend.
    """

    def __init__(self, pool: KVPool, table: torch.Tensor, attention: AttentionBackend) -> None:
        self.pool = pool
        self.table = table
        self.lengths: Ints = np.zeros(table.shape[0], np.int64)
        # A padded row reads one token of padding slot 0.
        self.lengths[0] = 1
        self._attention = attention
        self._last_slots = torch.empty(0, dtype=torch.int64)

    def write(self, row: int, layer_id: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store keys [L, H, D] and values [L, H, Dv] of the L encoder tokens of `row`; the row's length is now L."""
        length = k.shape[0]
        self.pool.write(layer_id, self.table[row, :length].to(torch.int64), k, v)
        self.lengths[row] = length

    def plan(self, batch: ForwardBatch, row_of_each: Ints) -> None:
        """Prepare a step of T decoder tokens; `row_of_each` int64[B] are the batch's rows on the host."""
        token_rows = np.repeat(row_of_each, batch.extend_lens_host)
        prefix = self.lengths[token_rows] - 1
        assert (prefix >= 0).all(), "a row attends to an encoder input that was never encoded"
        rows, places = torch.from_numpy(token_rows).to(self.table.device), torch.from_numpy(prefix)
        places = places.to(self.table.device)
        self._last_slots = self.table[rows, places].to(torch.int64)
        count = len(token_rows)
        self._attention.plan(
            ForwardBatch(
                mode=ForwardMode.DECODE,
                input_ids=batch.input_ids,
                positions=places,
                rows=rows,
                seq_lens=places + 1,
                out_cache_loc=self._last_slots,
                last_indices=batch.last_indices,
                req_to_token=self.table,
                kv_pool=self.pool,
                num_extend=0,
                prefix_lens_host=prefix,
                extend_lens_host=np.ones(count, np.int64),
            )
        )

    def forward(self, layer_id: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """[T, H, Dv] from q [H, T, D]."""
        k = self.pool.k(layer_id).index_select(0, self._last_slots).transpose(0, 1)
        v = self.pool.v(layer_id).index_select(0, self._last_slots).transpose(0, 1)
        return self._attention.forward(layer_id, q, k, v, scale=scale)
