"""A model whose next token is a hash of all that its row's page-table entries lead to, in plain PyTorch operations.

Keys hold token ids, values hold positions. A wrong page, a stale table entry, a token that came too late or from
another request, or a KV slot read before it was written: each gives another token from there on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from core.attention.base import AttentionBackend
from core.batch.forward_batch import ForwardBatch
from core.memory.companion import DeviceCompanion
from core.memory.kv_pool import KVLayerSpec, KVPool
from core.models.base import NO_COMPANIONS, ModelSpec

CPU = torch.device("cpu")
WORD = 2**64


class HashModel:
    """A `core.models.base.Model` with one KV layer."""

    def __init__(self, vocab_size: int, context_length: int) -> None:
        self.spec = ModelSpec("hash", "Hash", vocab_size, context_length, torch.float64, (KVLayerSpec(0, 1, 1, 1),))

    def bind(
        self, kv_pool: KVPool, attention: AttentionBackend, companions: Mapping[str, DeviceCompanion] = NO_COMPANIONS
    ) -> None:
        """The pool comes with every batch."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32[S, vocab_size]: three candidates, so that penalties have something to do."""
        pool = batch.kv_pool
        pool.write(0, batch.out_cache_loc, _column(batch.input_ids, pool.dtype), _column(batch.positions, pool.dtype))
        tables = batch.req_to_token.index_select(0, batch.rows)
        device = batch.rows.device
        hashes = torch.zeros(len(batch.input_ids), dtype=torch.int64, device=device)
        lens = (batch.prefix_lens_host + batch.extend_lens_host).tolist()
        for i, (length, end) in enumerate(zip(lens, np.cumsum(batch.extend_lens_host).tolist(), strict=True)):
            slots = tables[i, :length].to(torch.int64)
            keys, values = (cache.index_select(0, slots).view(-1).to(torch.int64) for cache in (pool.k(0), pool.v(0)))
            terms = (keys * 1_000_003 + values + 1) * _weights(length, device)
            count = int(batch.extend_lens_host[i])
            # Each place sees what stands before it: drafts are verified at several places of a row.
            hashes[end - count : end].copy_(terms.cumsum(0)[length - count :])
        chosen = hashes.index_select(0, batch.last_indices)
        logits = torch.zeros(len(batch.last_indices), self.spec.vocab_size, device=device)
        for rank, shift in enumerate((7, 17, 27)):
            ids = ((chosen >> shift) & 0x7FFFFFFF) % self.spec.vocab_size
            logits.scatter_add_(1, ids[:, None], torch.full((len(ids), 1), 8.0 - 2.0 * rank, device=device))
        return logits


def expected_tokens(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """What a correct engine answers greedily, without penalties."""
    ids = list(prompt)
    for _ in range(count):
        terms = zip(ids, range(len(ids)), _weights(len(ids), CPU).tolist(), strict=True)
        total = sum((token * 1_000_003 + position + 1) * weight for token, position, weight in terms) % WORD
        scores = np.zeros(vocab_size)
        for rank, shift in enumerate((7, 17, 27)):
            scores[((total >> shift) & 0x7FFFFFFF) % vocab_size] += 8.0 - 2.0 * rank
        ids.append(int(scores.argmax()))
    return ids[len(prompt) :]


def _column(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype).view(-1, 1, 1)


def _weights(length: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(length, device=device)
    return places * places * 7919 + places * 104_729 + 12_345
