"""The head as a network to train: EAGLE-3 (Li et al. 2025), one decoder layer that feeds on inner states of the target.

At position p it takes the embedding of token p + 1 and a feature of position p, and says what token p + 2 is. The
feature is fused from the target's residual stream after three of its layers; behind the last position that the target
has computed it is the head's own output one place before. Parameters are named as in published heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

FEATURE_LAYERS = (1, 2, 4)
"""How many layers of the target have run where its stream is read: low, middle and high."""


@dataclass(slots=True)
class Past:
    """Keys and values of what the head has seen, [B, heads, L, D] each."""

    mask: torch.Tensor
    """bool[B, 1, L, L]: which true features each place sees."""
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    own: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """By round behind the first: of features that the head made itself; a place sees only those of its own line."""


class Attention(nn.Module):
    """Over the true features up to a place, and over those that the head itself made behind it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, dim
        self.q_proj = nn.Linear(2 * hidden, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, self.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, self.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=False)
        turns = config.rope_parameters["rope_theta"] ** (-torch.arange(0, dim, 2).float() / dim)
        self.turns: torch.Tensor
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, past: Past) -> torch.Tensor:
        """[B, L, H] of x [B, L, 2 H] at `positions` [L]; `past` grows by the round."""
        batch, length, _ = x.shape
        angles = positions[:, None].float() * self.turns
        q = _rotated(self._split(self.q_proj(x), self.heads), angles)
        k = _rotated(self._split(self.k_proj(x), self.kv_heads), angles)
        k, v = (
            kv.repeat_interleave(self.heads // self.kv_heads, 1)
            for kv in (k, self._split(self.v_proj(x), self.kv_heads))
        )
        if past.keys is None or past.values is None:
            past.keys, past.values = k, v
        else:
            past.own.append((k, v))
        scores = (q @ past.keys.transpose(-1, -2)).masked_fill(~past.mask, float("-inf"))
        lines = [(q * key).sum(-1, keepdim=True) for key, _ in past.own]
        weights = (torch.cat([scores, *lines], -1).float() * self.dim**-0.5).softmax(-1).to(q.dtype)
        out = weights[..., : past.keys.shape[2]] @ past.values
        for place, (_, value) in enumerate(past.own, start=past.keys.shape[2]):
            out = out + weights[..., place : place + 1] * value
        found: torch.Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return found

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.view(*x.shape[:-1], heads, self.dim).transpose(1, 2)


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [B, heads, L, D] turned by `angles` [L, D / 2], halves against each other."""
    first, second = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    found: torch.Tensor = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return found


class Mlp(nn.Module):
    """SwiGLU, as in the target."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] of [..., H]."""
        found: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class MidLayer(nn.Module):
    """The decoder layer: attention over embedding and feature side by side, each normed by itself."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            nn.RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.self_attn, self.mlp = Attention(config), Mlp(config)

    def forward(
        self, embedded: torch.Tensor, feature: torch.Tensor, positions: torch.Tensor, past: Past
    ) -> torch.Tensor:
        """[B, L, H]: the head's own feature of the next place."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], -1)
        x = feature + self.self_attn(both, positions, past)
        found: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return found


class Head(nn.Module):
    """Fuses, runs its layer and says what comes. The embedding is the target's and no part of it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(len(FEATURE_LAYERS) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def logits(self, feature: torch.Tensor) -> torch.Tensor:
        """[..., V] of the head's own features [..., H]."""
        found: torch.Tensor = self.lm_head(self.norm(feature))
        return found


def features(hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
    """[B, L, 3 H] of a target's `hidden_states`, embedding first; the last one is wanted before the final norm."""
    return torch.cat([hidden_states[layers] for layers in FEATURE_LAYERS], -1)
