"""Latent attention as `parts` has it, read off modules of transformers by what they have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from core.memory.kv_pool import KVLayerSpec
from core.models.native.parts import Latents, Rotary
from core.models.native.reading import NotDense, read_norm
from core.models.native.recurrences import Fuse, reordered


def is_latent(attention: Any) -> bool:
    """Whether keys and values of `attention` are made of one latent."""
    return hasattr(attention, "kv_a_proj_with_mqa")


def latent_values(attentions: Sequence[Any], layers: Sequence[KVLayerSpec]) -> int:
    """Elements of a value that a head makes of a latent; 0 for layers without latents. Raises NotDense."""
    if not any(is_latent(attention) for attention in attentions):
        return 0
    if not all(layer.v_in_k for layer in layers):
        raise NotDense("its latents are expanded before they are kept")
    if any(layer.window is not None for layer in layers):
        raise NotDense("its latents are seen through a window")
    return int(attentions[0].v_head_dim)


def read_latents(module: Any, fuse: Fuse, out: str, rotary: Rotary | None) -> Latents:
    """The attention that `module` is, whose last matrix is called `out`; it keeps latents. Raises NotDense."""
    still, turned, rank = module.qk_nope_head_dim, module.qk_rope_head_dim, module.kv_lora_rank
    assert rotary is not None and 2 * rotary.cos.shape[1] == turned, "transformers turns as much"
    both = module.kv_b_proj.weight.detach().view(-1, still + module.v_head_dim, rank)
    compressed = getattr(module, "q_a_proj", None) is not None
    into = fuse(module, ["q_a_proj" if compressed else "q_proj", "kv_a_proj_with_mqa"])
    queries = fuse(module, ["q_b_proj"]) if compressed else None
    if getattr(module.config, "rope_interleave", False):
        # Two neighbours are turned together, and then go apart: so they may do that before, as rows of matrices.
        asked, kept = _apart(len(both), still, turned), _apart(1, rank, turned)
        before = len(into.weight) - len(kept)
        into = reordered(into, torch.cat((torch.arange(before) if compressed else asked, kept + before)))
        queries = None if queries is None else reordered(queries, asked)
    return Latents(
        into=into,
        q_norm=read_norm(module.q_a_layernorm) if compressed else None,
        queries=queries,
        kv_norm=read_norm(module.kv_a_layernorm),
        absorb=both[:, :still].transpose(1, 2),
        expand=both[:, still:],
        out=fuse(module, [out]),
        rotary=rotary,
        scale=float(module.scaling),
    )


def _apart(heads: int, still: int, turned: int) -> torch.Tensor:
    """int64[heads * (still + turned)]: rows of all heads, of those that are turned the even ones first."""
    rows = torch.arange(heads * (still + turned)).view(heads, -1)
    return torch.cat((rows[:, :still], rows[:, still::2], rows[:, still + 1 :: 2]), 1).reshape(-1)
