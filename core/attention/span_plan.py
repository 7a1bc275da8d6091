"""The plan that all layers of a step share in `TorchNativeAttention`: token ranges, KV slots to gather, additive masks.

Built from host lengths once per step and per `AttentionSpan`: a model that mixes full and windowed layers needs two
plans, not one per layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from core.attention.span import AttentionSpan
from core.batch.forward_batch import ForwardBatch
from core.batch.ragged import starts_of
from core.types.arrays import Ints

CHUNK_ROWS = 8
"""Decode rows per kernel call: enough to share the cost of a call, few enough for little padding and workspace."""


@dataclass(slots=True)
class PrefillPiece:
    """One segment of several tokens: places `start:end` of the packed row, at positions prefix, prefix + 1, …"""

    start: int
    end: int
    prefix: int
    span: AttentionSpan
    slots: torch.Tensor | None
    """int32[L]: KV slots of the visible prefix and of the segment itself; None without a prefix, when the step's own k
    and v are all that is read."""
    mask: torch.Tensor | None
    """[end - start, L], 0 or -inf; None when a plain causal mask from the first key is right."""

    def dense_mask(self, like: torch.Tensor) -> torch.Tensor:
        """`mask`, or a causal one made at the first call, for kernels without `is_causal`."""
        if self.mask is None:
            self.mask = additive_mask(self.span, self.prefix, self.end - self.start, 0, like.dtype, like.device)
        return self.mask


@dataclass(frozen=True, slots=True)
class DecodeChunk:
    """Up to `CHUNK_ROWS` rows of one token each, all padded to `length` keys."""

    tokens: torch.Tensor
    """int64[rows]: places of their tokens in the packed row."""
    rows: int
    length: int
    slots: torch.Tensor
    """int32[rows * length]; padding is slot 0, never a slot of another row."""
    mask: torch.Tensor | None
    """[rows, 1, 1, length], 0 or -inf; None when no row is padded."""


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """The plan of one step for one span. `in_order`: the step is a single decode chunk, in the order of the batch."""

    prefills: list[PrefillPiece]
    decodes: list[DecodeChunk]
    in_order: bool


def build_span_plan(batch: ForwardBatch, span: AttentionSpan, dtype: torch.dtype) -> SpanPlan:
    """Plan `batch` for layers with `span`; masks come in `dtype`. A prefill segment of one token counts as decode."""
    prefix, extend = batch.prefix_lens_host, batch.extend_lens_host
    starts = starts_of(extend)
    prefills = [
        _prefill_piece(batch, i, int(starts[i]), int(prefix[i]), int(extend[i]), span, dtype)
        for i in range(batch.num_extend)
        if extend[i] > 1
    ]
    singles = np.flatnonzero(extend == 1)
    in_order = len(singles) == len(extend) and len(singles) <= CHUNK_ROWS
    if not in_order:
        # Neighbours of equal length share a chunk, so little is padded. Stable, so equal steps make equal plans.
        singles = singles[np.argsort(prefix[singles], kind="stable")]
    decodes = [
        _decode_chunk(batch, singles[i : i + CHUNK_ROWS], starts, span, dtype)
        for i in range(0, len(singles), CHUNK_ROWS)
    ]
    return SpanPlan(prefills, decodes, in_order)


def additive_mask(
    span: AttentionSpan, prefix: int, length: int, first_key: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[length, prefix + length - first_key]: 0 where query prefix + i may see key first_key + j, else -inf."""
    queries = torch.arange(prefix, prefix + length, device=device)[:, None]
    keys = torch.arange(first_key, prefix + length, device=device)[None, :]
    mask = torch.zeros(length, prefix + length - first_key, dtype=dtype, device=device)
    return mask.masked_fill_(~span.allows(queries, keys), -torch.inf)


def _prefill_piece(
    batch: ForwardBatch, index: int, start: int, prefix: int, length: int, span: AttentionSpan, dtype: torch.dtype
) -> PrefillPiece:
    if prefix == 0:
        plain = span.is_plain(length)
        mask = None if plain else additive_mask(span, 0, length, 0, dtype, batch.rows.device)
        return PrefillPiece(start, start + length, 0, span, None, mask)
    # Keys older than what the segment's first query sees are never read.
    first = span.first_key(prefix)
    table = batch.req_to_token[:, first : prefix + length]
    slots = batch.pool_slots(table.index_select(0, batch.rows[index : index + 1]).view(-1))
    mask = additive_mask(span, prefix, length, first, dtype, slots.device)
    return PrefillPiece(start, start + length, prefix, span, slots, mask)


def _decode_chunk(
    batch: ForwardBatch, members: Ints, starts: Ints, span: AttentionSpan, dtype: torch.dtype
) -> DecodeChunk:
    """`members` are indices into the B requests."""
    device = batch.rows.device
    queries = batch.prefix_lens_host[members]
    firsts = np.fromiter((span.first_key(int(q)) for q in queries), np.int64, len(queries))
    counts = queries + 1 - firsts
    rows, length = len(members), int(counts.max())
    request_rows = batch.rows.index_select(0, torch.from_numpy(members).to(device))
    if firsts.any():
        # A short row that starts late would index past the table; what it reads there is masked below.
        places = (firsts[:, None] + np.arange(length)).clip(max=batch.req_to_token.shape[1] - 1)
        slots = batch.req_to_token[request_rows[:, None], torch.from_numpy(places).to(device)]
    else:
        slots = batch.req_to_token[:, :length].index_select(0, request_rows)
    mask = None
    if int(counts.min()) < length:
        hidden = torch.from_numpy(np.arange(length) >= counts[:, None]).to(device)
        slots.masked_fill_(hidden, 0)
        mask = torch.zeros(rows, 1, 1, length, dtype=dtype, device=device)
        mask.masked_fill_(hidden[:, None, None, :], -torch.inf)
    tokens = torch.from_numpy(starts[members]).to(device)
    return DecodeChunk(tokens, rows, length, batch.pool_slots(slots).view(-1), mask)
