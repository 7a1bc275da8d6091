"""Cross attention over pages of its own: every decoder token sees all encoder tokens of its own request.

To a backend this is a step of single-token rows, each with its query at the last encoder token: a causal query there
sees all encoder tokens. So the same backends serve it without a special mask. Their contract makes them first write the
keys and values of that last token; they are given the ones already in the pool, so the write changes nothing.
"""

from __future__ import annotations

import numpy as np
import torch

from core.attention.base import AttentionBackend
from core.batch.forward_batch import ForwardBatch
from core.batch.schedule_batch import ForwardMode
from core.memory.cross.cross_pool import CrossPool


class CrossAttention:
    """Reads and writes the pages of `cross` through a backend of its own. `cross` learns of every step first."""

    def __init__(self, cross: CrossPool, attention: AttentionBackend) -> None:
        self.cross = cross
        self._attention = attention

    def write(self, layer_id: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store keys [E, H, D] and values [E, H, Dv] of the encoder tokens of this step."""
        self.cross.pool.write(layer_id, self.cross.input_slots, k, v)

    def plan(self, batch: ForwardBatch) -> None:
        """Prepare a step of T decoder tokens, after `CrossPool.begin` or `look_up` for the same step."""
        cross = self.cross
        assert len(cross.token_rows) == batch.positions.shape[0], "begin() was told of another step"
        self._attention.plan(
            ForwardBatch(
                mode=ForwardMode.DECODE,
                input_ids=batch.input_ids,
                positions=cross.last_places,
                rows=cross.token_rows,
                seq_lens=cross.last_places + 1,
                out_cache_loc=cross.last_slots,
                last_indices=batch.last_indices,
                req_to_token=cross.table,
                kv_pool=cross.pool,
                num_extend=0,
                prefix_lens_host=cross.last_places_host,
                extend_lens_host=np.ones_like(cross.last_places_host),
            )
        )

    def forward(self, layer_id: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """[T, H, Dv] from q [H, T, D]."""
        pool, slots = self.cross.pool, self.cross.last_slots
        k = pool.k(layer_id).index_select(0, slots).transpose(0, 1)
        v = pool.v(layer_id).index_select(0, slots).transpose(0, 1)
        return self._attention.forward(layer_id, q, k, v, scale=scale)
