"""Attention of encoders that do not use transformers' interface for it, computed over packed texts."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch

from core.models.encoder_only.own_parts import ForwardOf
from core.models.encoder_only.packed_encoder import ByDistance, EncoderContext, attend_within, slanted

Answer = tuple[torch.Tensor, None]
"""[1, T, H] of an attention module, and no weights."""


class PlainAttention(ForwardOf):
    """That of a module with `query`, `key` and `value`: [1, T, H] to [1, T, H]."""

    names = ("query", "key", "value")

    def __init__(self, module: Any, context: EncoderContext, encoder: Any) -> None:
        super().__init__(module, context, encoder)
        self.heads: int = module.num_attention_heads

    def __call__(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Answer:
        """See the class."""
        return self.attend(*self.projected(hidden_states))

    def projected(self, hidden_states: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values, [1, heads, T, D] each."""
        return [self.by_head(getattr(self.module, name)(hidden_states)) for name in self.names]

    def by_head(self, states: torch.Tensor) -> torch.Tensor:
        """[1, heads, T, D] of `states`, [1, T, heads * D]."""
        apart: torch.Tensor = states.unflatten(-1, (self.heads, -1))
        return apart.transpose(1, 2)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **named: Any) -> Answer:
        """Each text to itself; `named` as `attend_within` has it."""
        return attend_within(self.context, query, key, value, **named).flatten(2), None


class RotatedAttention(PlainAttention):
    """The same, queries and keys rotated first: RoFormer's."""

    def __call__(self, hidden_states: torch.Tensor, *_: Any, sinusoidal_pos: Any = None, **__: Any) -> Answer:
        """`sinusoidal_pos`: sines and cosines, [1, 1, T, D]."""
        query, key, value = self.projected(hidden_states)
        rotated = (query, key, value) if self.module.rotary_value else (query, key)
        rotated = self.module.apply_rotary_position_embeddings(sinusoidal_pos, *rotated)
        return self.attend(*rotated, *(() if self.module.rotary_value else (value,)))


class BiasedAttention(PlainAttention):
    """With a bias for each distance of two tokens, equal in all layers: MPNet's."""

    names = ("q", "k", "v")

    def __call__(self, hidden_states: torch.Tensor, mask: Any, position_bias: ByDistance, **_: Any) -> Answer:
        """See the class; `DistancesOnce` makes `position_bias`."""
        attended, none = self.attend(*self.projected(hidden_states), distances=position_bias)
        return self.module.o(attended), none


class DisentangledAttention(PlainAttention):
    """With biases that queries, and keys, make of each distance of two tokens (DeBERTa, arXiv:2006.03654).

    Distances, not pairs of tokens: what n tokens need is 2n - 1 wide, and each row of it begins one place further.
    Vectors of distances depend on weights alone and are made once; the model makes them anew for each batch.
    """

    names = ("query_proj", "key_proj", "value_proj")

    def __init__(self, module: Any, context: EncoderContext, encoder: Any) -> None:
        super().__init__(module, context, encoder)
        used = [kind for kind in ("c2p", "p2c") if kind in module.pos_att_type and module.relative_attention]
        self.scale = 1 / sqrt(module.attention_head_size * (1 + len(module.pos_att_type)))
        self.used = dict.fromkeys(used, "")
        for kind in used:
            self.used[kind] = f"slipstream_{kind}"
            vectors = self.by_head(self.of_distances(kind, encoder.get_rel_embedding()[None]))[0]
            # A buffer, which copies of the model share as they share weights.
            module.register_buffer(self.used[kind], vectors.contiguous(), persistent=False)

    def take_away(self) -> None:
        """See `ForwardOf`."""
        super().take_away()
        for name in self.used.values():
            delattr(self.module, name)

    def of_distances(self, kind: str, embeddings: torch.Tensor) -> torch.Tensor:
        """[1, 2 * span, heads * D]: what queries ("c2p") or keys ("p2c") are multiplied by."""
        module, owned = self.module, {"c2p": "pos_key_proj", "p2c": "pos_query_proj"}
        shared = {"c2p": "key_proj", "p2c": "query_proj"}
        found: torch.Tensor = getattr(module, (shared if module.share_att_key else owned)[kind])(
            embeddings[:, : 2 * module.pos_ebd_size]
        )
        return found

    def __call__(self, hidden_states: torch.Tensor, *_: Any, relative_pos: Any = None, **__: Any) -> Answer:
        """`relative_pos`: int[1, n, n], distances of the longest text as the model counts them."""
        query, key, value = self.projected(hidden_states)
        if relative_pos is None or not self.used:
            return self.attend(query, key, value, scaling=self.scale)
        rows = relative_pos[0].long()
        places = torch.cat([rows[0].flip(0), rows[1:, 0]])  # a query before its key by n - 1, ..., behind it by n - 1
        longest, vectors = len(rows), {kind: self._at(name, places) for kind, name in self.used.items()}
        if "c2p" in vectors:
            # Query i and key j: rows from their ends, where the query is furthest behind.
            vectors["c2p"] = vectors["c2p"].flip(1)

        def bias(start: int, end: int) -> torch.Tensor:
            near = slice(longest - (end - start), longest + (end - start) - 1)
            made = []
            if "c2p" in vectors:
                made.append(slanted(query[0, :, start:end] @ vectors["c2p"][:, near].transpose(1, 2)))
            if "p2c" in vectors:
                made.append(slanted(key[0, :, start:end] @ vectors["p2c"][:, near].transpose(1, 2)).transpose(1, 2))
            return (sum(made[1:], made[0]) * self.scale)[None]

        return self.attend(query, key, value, scaling=self.scale, bias_of=bias)

    def _at(self, name: str, places: torch.Tensor) -> torch.Tensor:
        """[heads, P, D]: the vectors called `name` of distances `places`, of which the furthest share one."""
        vectors: torch.Tensor = getattr(self.module, name)
        span = vectors.shape[1] // 2
        return vectors.index_select(1, (places + span).clamp(0, 2 * span - 1))


class JoinedAttention(DisentangledAttention):
    """The same with one matrix for queries, keys and values, head by head: the first DeBERTa's."""

    def projected(self, hidden_states: torch.Tensor) -> list[torch.Tensor]:
        """See `PlainAttention`."""
        module = self.module
        query, key, value = self.by_head(module.in_proj(hidden_states)).chunk(3, dim=-1)
        return [query + self.by_head(module.q_bias[None, None]), key, value + self.by_head(module.v_bias[None, None])]

    def of_distances(self, kind: str, embeddings: torch.Tensor) -> torch.Tensor:
        """See `DisentangledAttention`."""
        found: torch.Tensor = getattr(self.module, {"c2p": "pos_proj", "p2c": "pos_q_proj"}[kind])(embeddings)
        return found


class ConvolvedAttention(PlainAttention):
    """With heads that are mixtures of the tokens around each, which the text's own tokens choose: ConvBERT's
    (arXiv:2008.02496). Beyond a text's ends there is nothing, as before the first token of all.
    """

    def __call__(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Answer:
        """See `PlainAttention`."""
        module, width = self.module, self.module.conv_kernel_size
        attended = attend_within(self.context, *self.projected(hidden_states))
        spread, places = self._spread(hidden_states, width)
        keys = module.key_conv_attn_layer(spread.transpose(1, 2)).transpose(1, 2)[:, places]
        shares = module.conv_kernel_layer(keys * module.query(hidden_states))
        shares = shares.unflatten(-1, (self.heads, width)).softmax(-1)
        values, places = self._spread(module.conv_out_layer(hidden_states), width)
        near = places[:, None] + torch.arange(width, device=places.device) - width // 2
        around = values[0][near].unflatten(-1, (self.heads, -1))  # [T, width, heads, D]
        mixed = torch.einsum("tkhd,thk->thd", around, shares[0])
        return torch.cat([attended, mixed[None]], 2).flatten(2), None

    def _spread(self, states: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, S, C]: `states` with zeros around each text, as far as a convolution sees; and places of tokens in it."""
        gap = width // 2
        places = torch.cat(
            [torch.arange(start, end) + gap * (number + 1) for number, (start, end) in enumerate(self.context.texts)]
        ).to(states.device)
        spread = states.new_zeros(1, states.shape[1] + gap * (len(self.context.texts) + 1), states.shape[2])
        spread[:, places] = states
        return spread, places


class ScaledAttention(PlainAttention):
    """That of modules which hand on how their numbers are scaled: I-BERT's, where nothing is."""

    def __call__(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Two tuples, of states and of their scales."""
        attended, none = self.attend(*self.projected(hidden_states))
        return (attended,), (none,)

    def projected(self, hidden_states: torch.Tensor) -> list[torch.Tensor]:
        """See `PlainAttention`."""
        return [self.by_head(getattr(self.module, name)(hidden_states, None)[0]) for name in self.names]
