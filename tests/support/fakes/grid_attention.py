"""A backend that reads no host lengths but those of chunks: every token over the whole table, masked by its place.

Slow and simple, so that grids and mixed steps can be tried on the CPU without the Triton interpreter, captured or not.
"""

from __future__ import annotations

import numpy as np
import torch

from core.attention.base import AttentionBackend, RelativeBias
from core.attention.explicit import explicit_attention
from core.attention.span import AttentionSpan
from core.batch.forward_batch import ForwardBatch
from core.device.staging import Staging
from core.memory.kv_format import KVFormat
from tests.support.fakes.pool_numbers import numbers_at


def rows_of_tokens(batch: ForwardBatch) -> torch.Tensor:
    """int64[T]: the pool's row of each token, of chunks, grids and decode rows alike."""
    if batch.grid_width:
        return batch.rows[:, None].expand(-1, batch.grid_width).reshape(-1)
    if batch.num_extend == 0:
        return batch.rows
    if batch.starts is not None:
        return _rows_by_starts(batch, batch.starts)
    chunks, tails = np.arange(batch.num_extend), np.arange(batch.num_extend, len(batch.rows))
    of = np.concatenate([np.repeat(chunks, batch.extend_lens_host[: batch.num_extend]), tails])
    return batch.rows.index_select(0, Staging(batch.rows.device).upload([of])[0])


def _rows_by_starts(batch: ForwardBatch, starts: torch.Tensor) -> torch.Tensor:
    """The same where only the device knows how long chunks are; a place behind the last one is row 0's."""
    count = batch.num_extend
    places = torch.arange(len(batch.input_ids) - (len(batch.rows) - count), device=starts.device)
    chunks = torch.searchsorted(starts, places, right=True) - 1
    of_chunks = batch.rows.index_select(0, chunks.clamp(max=count - 1))
    return torch.cat([torch.where(places < starts[-1], of_chunks, 0), batch.rows[count:]])


class GridAttention(AttentionBackend):
    """By the formula."""

    graph_safe = True
    grid_safe = True

    @classmethod
    def why_not_stored(cls, format: KVFormat, dtype: torch.dtype) -> str | None:
        return None

    def __init__(self) -> None:
        self._batch: ForwardBatch | None = None

    def plan(self, batch: ForwardBatch) -> None:
        self._batch = batch

    def forward(
        self,
        layer_id: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        chunk_size: int | None = None,
        bias: RelativeBias | None = None,
        stored: bool = False,
    ) -> torch.Tensor:
        batch = self._batch
        assert batch is not None and bias is None
        pool = batch.kv_pool
        if not stored:
            pool.write(layer_id, batch.out_cache_loc, k.transpose(0, 1), v.transpose(0, 1))
        table = batch.req_to_token.index_select(0, rows_of_tokens(batch))
        places = torch.arange(table.shape[1], device=table.device)
        seen = AttentionSpan(sliding_window, chunk_size).allows(batch.positions[:, None], places[None, :])
        slots = torch.where(seen, batch.pool_slots(table), 0).view(-1).to(torch.int64)
        keys, values = (
            held.view(*table.shape, *held.shape[1:]).transpose(1, 2) for held in numbers_at(pool, layer_id, slots)
        )
        folded = q.transpose(0, 1).unflatten(1, (keys.shape[1], -1))
        mask = torch.zeros(seen.shape, device=q.device).masked_fill(~seen, -torch.inf)[:, None, None, :]
        sunk = None if sinks is None else sinks.view(1, keys.shape[1], -1, 1)
        attended = explicit_attention(folded, keys, values, mask=mask, scale=scale, softcap=softcap, sinks=sunk)
        return attended.flatten(1, 2).contiguous()


class MixedAttention(GridAttention):
    """The same where steps with chunks may be captured too."""

    mixed_safe = True
