"""A backend whose decode reads device tensors and shapes only: every row over the whole table, masked by its length.

Slow and simple, so that captured decode steps can be tried on the CPU without the Triton interpreter.
"""

from __future__ import annotations

import torch

from core.attention.explicit import explicit_attention
from core.attention.relative_bias import RelativeBias
from core.attention.span import AttentionSpan
from core.attention.torch_native import TorchNativeAttention
from core.batch.forward_batch import ForwardBatch
from core.batch.schedule_batch import ForwardMode
from tests.support.fakes.pool_numbers import numbers_at


class MaskedAttention(TorchNativeAttention):
    """Decode steps by the formula; everything else as the native backend does it."""

    graph_safe = True

    def __init__(self) -> None:
        super().__init__()
        self._decode_batch: ForwardBatch | None = None

    def plan(self, batch: ForwardBatch) -> None:
        self._decode_batch = batch if batch.mode is ForwardMode.DECODE else None
        if self._decode_batch is None:
            super().plan(batch)

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
        batch = self._decode_batch
        if batch is None:
            limits = {"sliding_window": sliding_window, "chunk_size": chunk_size, "bias": bias, "stored": stored}
            return super().forward(layer_id, q, k, v, scale=scale, softcap=softcap, sinks=sinks, **limits)
        pool = batch.kv_pool
        if not stored:
            pool.write(layer_id, batch.out_cache_loc, k.transpose(0, 1), v.transpose(0, 1))
        table = batch.req_to_token.index_select(0, batch.rows)
        places = torch.arange(table.shape[1], device=table.device)
        seen = AttentionSpan(sliding_window, chunk_size).allows((batch.seq_lens - 1)[:, None], places[None, :])
        slots = torch.where(seen, batch.pool_slots(table), 0).view(-1).to(torch.int64)
        keys, values = (
            held.view(*table.shape, *held.shape[1:]).transpose(1, 2) for held in numbers_at(pool, layer_id, slots)
        )
        folded = q.transpose(0, 1).unflatten(1, (keys.shape[1], -1))
        mask = torch.zeros(seen.shape, device=q.device).masked_fill(~seen, -torch.inf)[:, None, None, :]
        if bias is not None:
            mask = mask + bias((batch.seq_lens - 1)[:, None], places[None, :]).permute(0, 2, 1)[:, :, None]
        sunk = None if sinks is None else sinks.view(1, keys.shape[1], -1, 1)
        attended = explicit_attention(folded, keys, values, mask=mask, scale=scale, softcap=softcap, sinks=sunk)
        return attended.flatten(1, 2).contiguous()
