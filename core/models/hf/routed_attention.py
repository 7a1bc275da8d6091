"""Attention that transformers computes in the module itself, led through its attention interface instead.

Some older classes (BLOOM, Falcon, MPT, GPT-Neo) multiply queries and keys where they stand, and so never reach a
backend over pages. Their attention gets a `forward` that is the same but for that. The class of a module changes, not
the module: its weights and their names stay. `core.models.hf.self_check` compares with the class as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, Final, cast

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from core.attention.relative_bias import RelativeBias
from core.attention.span import AttentionSpan

SLOPES: Final = "slipstream_slopes"
"""Attribute of an attention module that tells places by distance alone (ALiBi): float32[H], by how much less a key
weighs for each token that it is farther behind its query."""

WITHOUT_PLACES: Final = frozenset({"bloom", "mpt"})
"""Model types that take no positions: attention tells them, by distance."""


def route_attention(model: PreTrainedModel, length: int) -> None:
    """Change the modules of `model` that need it; all others stay as they are. `length`: of its longest sequence."""
    text = model.config.get_text_config()
    for module in model.modules():
        kind = type(module).__name__
        if kind in ROUTES:
            prepare, forward = ROUTES[kind]
            module.__class__ = _routed(cast(Any, type(module)), forward)
            module.config = text  # type: ignore[assignment]
            prepare(module, length)


def plain_linears(model: PreTrainedModel) -> None:
    """Make what only multiplies by a matrix, in a class of its own, a linear layer as all others."""
    for module in model.modules():
        if type(module).__name__ == "FalconLinear":
            module.__class__ = nn.Linear


def slopes_of(module: Any) -> torch.Tensor | None:
    """`SLOPES` of an attention module; None for one that tells places otherwise."""
    return getattr(module, SLOPES, None)


@cache
def _routed(kind: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    return type(f"Routed{kind.__name__}", (kind,), {"forward": forward})


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: Any, **more: Any
) -> torch.Tensor:
    """[1, T, H * D], from queries [1, H, T, D] and keys and values of as many or fewer heads."""
    if cache is not None:
        key, value = cache.update(key, value, module.slipstream_layer)
    attend = AttentionInterface()[module.config._attn_implementation]
    found, _ = attend(module, query, key, value, None, scaling=module.scaling, **more)
    attended: torch.Tensor = found.flatten(2)
    return attended


def _heads(states: torch.Tensor, count: int) -> torch.Tensor:
    """[1, count, T, D] of [1, T, count * D]."""
    return states.view(*states.shape[:2], count, -1).transpose(1, 2)


def _by_distance(module: Any, slopes: torch.Tensor, length: int) -> None:
    slopes = slopes.float()
    setattr(module, SLOPES, slopes)
    module.slipstream_bias = _bias(tuple(slopes.tolist()), max(2, length), slopes.device)


@lru_cache(maxsize=4)
def _bias(slopes: tuple[float, ...], length: int, device: torch.device) -> RelativeBias:
    """One for all layers of a model."""
    distances = torch.arange(length, dtype=torch.float32, device=device)
    return RelativeBias((-distances[:, None] * torch.tensor(slopes, device=device)).contiguous())


def _prepare_bloom(module: Any, length: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    module.scaling, module.slipstream_layer = module.inv_norm_factor, module.layer_idx
    both = torch.ones(1, 2, device=module.dense.weight.device)
    # Of two keys the newer one has what a distance of one takes off the other.
    _by_distance(module, build_alibi_tensor(both, module.num_heads, torch.float32)[:, 0, 1], length)


def _bloom(
    self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, layer_past: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    found = _attend(self, query, key, value, layer_past, relative_bias=self.slipstream_bias)
    return self.dense(found) + residual, None


def _prepare_mpt(module: Any, length: int) -> None:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    module.scaling, module.slipstream_layer = module.softmax_scale, module.layer_idx
    slopes = -build_mpt_alibi_tensor(module.n_heads, 2, device=module.out_proj.weight.device)[:, 0, 0]
    _by_distance(module, slopes, length)


def _mpt(self: Any, hidden_states: torch.Tensor, cache: Any = None, **_: Any) -> tuple[torch.Tensor, None]:
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (_heads(part, self.n_heads) for part in mixed.chunk(3, dim=-1))
    return self.out_proj(_attend(self, query, key, value, cache, relative_bias=self.slipstream_bias)), None


def _mpt_model(
    self: Any, input_ids: torch.Tensor | None = None, cache: Any = None, inputs_embeds: Any = None, **_: Any
) -> BaseModelOutputWithPastAndCrossAttentions:
    """Without the mask that the class wants to be one of bools, and without a table of distances at each call."""
    states = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
    for block in self.blocks:
        states, _weights = block(states, position_bias=None, attention_mask=None, layer_past=cache)
    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.norm_f(states))


def _prepare_falcon(module: Any, length: int) -> None:
    module.scaling, module.slipstream_layer = module.inv_norm_factor, module.layer_idx


def _falcon(
    self: Any,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    attention_mask: Any = None,
    layer_past: Any = None,
    position_embeddings: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    assert alibi is None, "its configuration was looked at"
    shared = self.num_heads // self.num_kv_heads
    fused = self.query_key_value(hidden_states).unflatten(-1, (self.num_kv_heads, shared + 2, self.head_dim))
    query = fused[..., :shared, :].flatten(2, 3).transpose(1, 2)
    key, value = (fused[..., place, :].transpose(1, 2) for place in (shared, shared + 1))
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    return self.dense(_attend(self, query, key, value, layer_past)), None


def _prepare_gpt_neo(module: Any, length: int) -> None:
    module.scaling, module.slipstream_layer = 1.0, module.layer_id
    module.slipstream_span = AttentionSpan(module.config.window_size if module.attention_type == "local" else None)


def _gpt_neo(self: Any, hidden_states: torch.Tensor, layer_past: Any = None, **_: Any) -> tuple[torch.Tensor, None]:
    query, key, value = (
        _heads(project(hidden_states), self.num_heads) for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    return self.out_proj(_attend(self, query, key, value, layer_past, span=self.slipstream_span)), None


def unrouted(config: Any) -> str | None:
    """What a configuration has that no route computes, if it has anything."""
    if config.model_type == "falcon" and config.alibi:
        return "weighs keys by distances that are rounded to 16 bits"
    return None


Route = tuple[Callable[[Any, int], None], Callable[..., Any]]

ROUTES: Final[dict[str, Route]] = {
    "BloomAttention": (_prepare_bloom, _bloom),
    "FalconAttention": (_prepare_falcon, _falcon),
    "GPTNeoSelfAttention": (_prepare_gpt_neo, _gpt_neo),
    "MptAttention": (_prepare_mpt, _mpt),
    "MptModel": (lambda module, length: None, _mpt_model),
}
"""Class -> what is set on a module once, and what it computes."""
