"""The hash model by device operations alone: it reads no host lengths but those of chunks, and can be captured."""

from __future__ import annotations

import dataclasses

import torch

from core.batch.forward_batch import ForwardBatch
from tests.proofs.happens_before.hash_model import HashModel, _column, _weights
from tests.support.fakes.grid_attention import rows_of_tokens


class DeviceHashModel(HashModel):
    """The same tokens as `HashModel`, for grids too."""

    def __init__(self, vocab_size: int, context_length: int) -> None:
        super().__init__(vocab_size, context_length)
        self.spec = dataclasses.replace(self.spec, capturable=True)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        pool, device = batch.kv_pool, batch.rows.device
        pool.write(0, batch.out_cache_loc, _column(batch.input_ids, pool.dtype), _column(batch.positions, pool.dtype))
        tables = batch.req_to_token.index_select(0, rows_of_tokens(batch)).to(torch.int64)
        seen = torch.arange(tables.shape[1], device=device) <= batch.positions[:, None]
        slots = torch.where(seen, tables, 0).view(-1)
        keys, values = (
            cache.index_select(0, slots).view(tables.shape).to(torch.int64) for cache in (pool.k(0), pool.v(0))
        )
        terms = (keys * 1_000_003 + values + 1) * _weights(tables.shape[1], device)
        chosen = torch.where(seen, terms, 0).sum(1).index_select(0, batch.last_indices)
        logits = torch.zeros(len(batch.last_indices), self.spec.vocab_size, device=device)
        for rank, shift in enumerate((7, 17, 27)):
            ids = ((chosen >> shift) & 0x7FFFFFFF) % self.spec.vocab_size
            logits.scatter_add_(1, ids[:, None], torch.full((len(ids), 1), 8.0 - 2.0 * rank, device=device))
        return logits
