"""What a pool holds, as numbers, by operations that a graph can record: for attention that stands in."""

from __future__ import annotations

import torch

from core.memory.kv_pool import KVPool


def numbers_at(pool: KVPool, layer_id: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [n, Hkv, D] and values [n, Hkv, Dv] of the tokens at `slots`, int64[n], in the pool's dtype."""
    keys = _decoded(pool, pool.k(layer_id), pool.k_scales(layer_id), slots)
    return keys, _decoded(pool, pool.v(layer_id), pool.v_scales(layer_id), slots)


def _decoded(pool: KVPool, held: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
    found, codes = held.index_select(0, slots), pool.format.codes
    if codes is None:
        return found
    assert scales is not None, "codes have scales"
    return codes.decode(found, scales.index_select(0, slots), pool.dtype)
