"""The keys and values of what drafts: layers of its own in the pages of the model that it drafts for.

A token has one slot in both pools, so what the table, the prefix cache and law 4 say of a page holds for both. Wherever
a page is found again, what the drafter wrote beside it is found as well, as long as the drafter ran over every token
that the model ran over. Where it did not, its keys there mean nothing: its guesses are worse, and nothing else is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.memory.kv_pool import KVLayerSpec, KVPool


@dataclass(frozen=True, slots=True)
class DraftLayers:
    """What a drafter keeps of each token."""

    layers: tuple[KVLayerSpec, ...]
    dtype: torch.dtype
    spare: int
    """Slots that each row needs beside its pages, for tokens that are guessed and not the row's yet."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers together."""
        return KVPool.bytes_per_token_for(self.layers, self.dtype)

    def spare_pages(self, rows: int, page_size: int) -> int:
        """Whole pages for the spare slots of `rows` rows."""
        return -(-rows * self.spare // page_size)


class DraftPool:
    """A `KVPool` with as many pages as the model's, numbered as there, and behind them the spare slots."""

    def __init__(self, layers: DraftLayers, pages: int, page_size: int, rows: int, device: torch.device) -> None:
        """`pages`: of the model's own pool. `rows`: that may draft in one step."""
        count = layers.spare_pages(rows, page_size)
        self.kv = KVPool(layers.layers, pages + count, page_size, layers.dtype, device, "drafts")
        first = (pages + 1) * page_size
        self.spare = torch.arange(first, first + rows * layers.spare, device=device).view(rows, layers.spare)
        """int64[rows, spare]: slots of no page, whose keys and values last for one step."""

    def clear(self, slots: torch.Tensor) -> None:
        """Forget what is kept at `slots`, int64[n]: it reads as zeros, like a slot that was never written."""
        for spec in self.kv.layers:
            self.kv.k(spec.layer_id).index_fill_(0, slots, 0)
            if not spec.v_in_k:
                self.kv.v(spec.layer_id).index_fill_(0, slots, 0)
