"""Attention by Triton kernels for deterministic engines: one kernel, one tile, keys split at places of their own."""

from __future__ import annotations

from typing import Final

import torch
import triton

from core.attention.relative_bias import RelativeBias
from core.attention.triton.backend import Paged, TritonAttention
from core.attention.triton.codes import codes_of
from core.attention.triton.fixed import FixedTile, fixed_attention
from core.attention.triton.tiles import PROGRAMS_PER_SM, Tiles
from core.batch.forward_batch import ForwardBatch

PART_BLOCKS: Final = 8
"""Blocks of keys to a part. Parts end at multiples of their keys, which no device may choose by its size alone: they
decide about bits."""
LEFT_BYTES: Final = 64 << 20
"""What parts of a launch may leave for the kernel that joins them; beyond, a program takes all parts."""


class FixedTritonAttention(TritonAttention):
    """As its base, with the same bits for a query in any step. One launch for prefill segments, one for the rest, and
    one to join where parts have programs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self._singles: tuple[torch.Tensor, torch.Tensor] | None = None

    def plan(self, batch: ForwardBatch) -> None:
        """See `AttentionBackend`."""
        super().plan(batch)
        self._singles = None

    def _launch(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        paged: Paged,
        scales: tuple[torch.Tensor | None, torch.Tensor | None],
        sinks: torch.Tensor | None,
        spans: tuple[float, float, int, int, int],
        bias: RelativeBias | None,
    ) -> None:
        batch = self._batch
        assert batch is not None, "plan() comes first"
        assert bias is None, "an encoder-decoder is not deterministic"
        tiles, heads, kv_heads = self._tiles_for(q, codes_of(paged[0])), q.shape[0], paged[0].shape[1]
        width, v_dim, count, tokens = batch.req_to_token.shape[1], out.shape[2], batch.num_extend, 0
        if self._segments is not None:
            parts, tokens = self._segments, self._segments.tokens
            where = (batch.rows[:count], batch.seq_lens[:count], parts.starts, parts.prefixes, parts.longest)
            tile = fixed_tile(tiles, parts.longest, 0 if parts.shared else count, heads, kv_heads, width, v_dim)
            fixed_attention(out[:tokens], q[:, :tokens], *paged, *where, sinks, *spans, *tile, parts.shared, *scales)
        if tokens < q.shape[1]:
            rows, lens = batch.rows[count:], batch.seq_lens[count:]
            if self._singles is None:
                self._singles = torch.arange(len(rows), device=rows.device), lens - 1
            tile = fixed_tile(tiles, 1, len(rows), heads, kv_heads, width, v_dim)
            where = (rows, lens, *self._singles, 1)
            fixed_attention(out[tokens:], q[:, tokens:], *paged, *where, sinks, *spans, *tile, False, *scales)


def fixed_tile(
    tiles: Tiles, longest: int, segments: int, heads: int, kv_heads: int, width: int, v_dim: int
) -> FixedTile:
    """The tile for `segments` of at most `longest` queries, over rows of at most `width` keys; 0: they share places.

    Only how many programs share its keys depends on `longest` and `segments`, which is what no bit depends on. One
    takes all keys of long segments, which rehearsals have too: both kernels are compiled before a step.
    """
    group, part = heads // kv_heads, PART_BLOCKS * tiles.block_n
    parts = triton.cdiv(width, part)
    # Half as many lines where two tiles of sums would not fit into registers.
    block_m = tiles.packed if v_dim <= 128 else max(16, tiles.packed // 2)
    programs = segments * triton.cdiv(longest * group, block_m) * kv_heads
    left = segments * longest * heads * parts * v_dim * 4
    crowded = programs >= PROGRAMS_PER_SM * tiles.multiprocessors or left > LEFT_BYTES
    alone = segments == 0 or longest > tiles.packed or crowded
    return FixedTile(group, block_m, tiles.block_n, part, 1 if alone else parts)
