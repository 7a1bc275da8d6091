"""Attention among the tokens of one image, which see each other in both directions: Gemma 3.

The backend attends causally, and so writes what the tokens of the step leave in the pool. Then rows of images are
computed again: with the keys before them, as far as a window reaches, and all keys of their image.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.attention.explicit import explicit_attention
from core.batch.forward_batch import ForwardBatch
from core.batch.vision_batch import StepImage


def attend_both_ways(
    attended: torch.Tensor,
    images: Sequence[StepImage],
    batch: ForwardBatch,
    layer_id: int,
    query: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """Overwrite in `attended`, [T, H, Dv], the rows of `images`. `query`: [H, T, D]. `batch`: over the layer's pool."""
    for each in images:
        length = each.image.length
        low = 0 if window is None else max(0, each.first - window + 1)
        slots = batch.req_to_token[each.row, low : each.first + length].to(torch.int64)
        keys, values = batch.kv_pool.read(layer_id, batch.pool_slots(slots))
        heads = keys.shape[1]
        folded = query[:, each.place : each.end].unflatten(0, (heads, -1))
        found = explicit_attention(
            folded,
            keys.transpose(0, 1)[:, None],
            values.transpose(0, 1)[:, None],
            mask=_mask(each.first, length, low, window, query.device),
            scale=scale,
            softcap=softcap,
            sinks=None if sinks is None else sinks.view(heads, -1, 1, 1),
        )
        attended[each.place : each.end] = found.flatten(0, 1).transpose(0, 1)


def _mask(first: int, length: int, low: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[length, keys]: 0 where a key is seen, else -inf."""
    queries = torch.arange(first, first + length, device=device)[:, None]
    keys = torch.arange(low, first + length, device=device)
    seen = (keys <= queries) | (keys >= first)
    if window is not None:
        # An image longer than the window does not see its own beginning from its end.
        seen = seen & (queries - keys < window)
    return torch.zeros(seen.shape, device=device).masked_fill(~seen, -torch.inf)
