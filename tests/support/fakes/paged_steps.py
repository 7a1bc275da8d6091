"""Steps over a paged KV pool, built by hand: rows get shuffled pages, batches exact lengths, nothing is scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.schedule_batch import ForwardMode
from core.memory.kv_format import PLAIN, KVFormat
from core.memory.kv_pool import KVLayerSpec, KVPool


@dataclass(frozen=True, slots=True)
class Part:
    """`extend` tokens of `row` on top of `prefix` that are already in the pool. Row 0 makes a padded row."""

    row: int
    prefix: int
    extend: int


class PagedRows:
    """`num_rows` rows of up to `max_len` tokens with all their pages given out at once, in shuffled order.

    Whatever a test did not write reads as `poison`, so a read through a wrong slot shows.
    """

    def __init__(
        self,
        layers: Sequence[KVLayerSpec],
        num_rows: int,
        max_len: int,
        *,
        page_size: int = 1,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        poison: float = 50.0,
        device: str = "cpu",
        format: KVFormat = PLAIN,
    ) -> None:
        pages_per_row = -(-max_len // page_size)
        num_pages = num_rows * pages_per_row
        self.pool = KVPool(layers, num_pages, page_size, dtype, torch.device(device), format=format)
        everywhere = torch.arange(page_size, self.pool.num_slots, device=device)
        for spec in layers:
            poisoned = torch.full((len(everywhere), spec.num_kv_heads, spec.k_dim), poison, dtype=dtype, device=device)
            self.pool.write(spec.layer_id, everywhere, poisoned, poisoned[..., : spec.v_dim])
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)) + 1
        slots = order.view(num_rows, pages_per_row, 1) * page_size + torch.arange(page_size)
        self.table = torch.zeros(num_rows + 1, pages_per_row * page_size, dtype=torch.int32)
        self.table[1:] = slots.view(num_rows, -1)
        self.table = self.table.to(device)

    def batch(
        self,
        parts: Sequence[Part],
        num_extend: int,
        ids: Sequence[int] | None = None,
        sample: Sequence[int] | None = None,
    ) -> ForwardBatch:
        """One step of `parts`, the first `num_extend` of them prefill segments.

        `ids`: the packed token ids (zeros if a test needs none). `sample`: indices into `parts` whose last token's
        logits are wanted; all of them if None.
        """
        device = self.pool.device
        positions = torch.cat([torch.arange(p.prefix, p.prefix + p.extend) for p in parts])
        rows_of_tokens = torch.cat([torch.full((p.extend,), p.row) for p in parts])
        input_ids = torch.zeros_like(positions) if ids is None else torch.tensor(list(ids))
        prefix = np.array([p.prefix for p in parts], np.int64)
        extend = np.array([p.extend for p in parts], np.int64)
        wanted = list(range(len(parts)) if sample is None else sample)
        return ForwardBatch(
            mode=ForwardMode.of(num_extend, len(parts) - num_extend),
            input_ids=input_ids.to(device),
            positions=positions.to(device),
            rows=torch.tensor([p.row for p in parts], device=device),
            seq_lens=torch.from_numpy(prefix + extend).to(device),
            out_cache_loc=self.table[rows_of_tokens.to(device), positions.to(device)].to(torch.int64),
            last_indices=torch.from_numpy(np.cumsum(extend) - 1)[wanted].to(device),
            req_to_token=self.table,
            kv_pool=self.pool,
            num_extend=num_extend,
            prefix_lens_host=prefix,
            extend_lens_host=extend,
        )
