"""Attention of encoders that do not use transformers' interface for it, declared, so that texts can be packed too.

A declaration names the class of a model's attention modules, what stands for its `forward` over packed texts, and which
methods of its encoder count tokens, so that they count those of a text and not of a step. Everything else of the model
stays its own. `encoder_proof` compares all of it with the model as it came, over texts of a few tokens and of hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from operator import attrgetter
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from core.models.encoder_only.packed_encoder import EncoderContext, attend_within
from core.models.hf.probe import Unsupported

Answer = tuple[torch.Tensor, None]
"""[1, T, H] of an attention module, and no weights."""


class PlainAttention:
    """`forward` of a module with `query`, `key` and `value`, over packed texts: [1, T, H] to [1, T, H]."""

    names = ("query", "key", "value")

    def __init__(self, module: Any, context: EncoderContext, encoder: Any) -> None:
        """`encoder`: the modules of all layers, of which `module` is one's attention."""
        self.module, self.context = module, context
        self.heads: int = module.num_attention_heads

    def __call__(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Answer:
        """See the class."""
        return self.attend(*self.projected(hidden_states))

    def take_away(self) -> None:
        """Let the module be as it came."""
        del self.module.forward

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

    def __call__(self, hidden_states: torch.Tensor, mask: Any, position_bias: torch.Tensor, **_: Any) -> Answer:
        """`position_bias`: [1, heads, n, n] of the longest text."""

        def bias(start: int, end: int) -> torch.Tensor:
            return position_bias[:, :, : end - start, : end - start].to(hidden_states.dtype)

        attended, none = self.attend(*self.projected(hidden_states), bias_of=bias)
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
        """See `PlainAttention`."""
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
                made.append(_slanted(query[0, :, start:end] @ vectors["c2p"][:, near].transpose(1, 2)))
            if "p2c" in vectors:
                made.append(_slanted(key[0, :, start:end] @ vectors["p2c"][:, near].transpose(1, 2)).transpose(1, 2))
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


def _slanted(made: torch.Tensor) -> torch.Tensor:
    """[heads, n, n] of `made`, [heads, n, 2n - 1]: of row i its places n - 1 - i to 2n - 2 - i. A view."""
    made = made.contiguous()
    heads, length, width = made.shape
    return made.as_strided((heads, length, length), (length * width, width - 1, 1), length - 1)


class OverLongest:
    """A method of an encoder that makes something for all pairs of tokens: for those of the longest text."""

    def __init__(self, owner: Any, name: str, context: EncoderContext) -> None:
        self.owner, self.name, self.context = owner, name, context
        self.method: Callable[..., Any] = getattr(owner, name)

    def take_away(self) -> None:
        """Let it be as it came."""
        delattr(self.owner, self.name)

    def __call__(self, given: Any, *_: Any, **__: Any) -> Any:
        """What it makes of as many tokens."""
        return self.method(given[:, : max(end - start for start, end in self.context.texts)])


class Unmasked(OverLongest):
    """One that makes a mask of all pairs, which is not needed."""

    def __call__(self, given: Any, *_: Any, **__: Any) -> Any:
        """Give back the mask of tokens."""
        return given


class EachApart(OverLongest):
    """One in which tokens see the ones beside them: text by text."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        """[1, T, H]; every tensor among the arguments has T tokens, or those of one text."""

        def of(each: Any, start: int, end: int) -> Any:
            return each[:, start:end] if isinstance(each, torch.Tensor) else each

        return torch.cat(
            [
                self.method(
                    *(of(each, *text) for each in given), **{name: of(each, *text) for name, each in named.items()}
                )
                for text in self.context.texts
            ],
            dim=1,
        )


class PlacesInTexts(OverLongest):
    """One that looks up the places of a row's tokens: each text begins at 0."""

    def __call__(self, given: Any, *_: Any, **__: Any) -> Any:
        """[T, D]."""
        texts = self.context.texts
        found = self.method((1, max(end - start for start, end in texts)))
        return torch.cat([found[: end - start] for start, end in texts])


@dataclass(frozen=True, slots=True)
class Declaration:
    """How one type's own attention is computed over packed texts."""

    attention: str
    """Class of its modules; none if they go through transformers' interface."""
    forward: type[PlainAttention]
    """What stands for their `forward`."""
    methods: Mapping[str, type[OverLongest]] = field(default_factory=dict)
    """Path from the model to what counts tokens of a row -> what stands for it."""


_DEBERTA: Final = {"encoder.get_rel_pos": OverLongest, "encoder.get_attention_mask": Unmasked}
DECLARED: Final[Mapping[str, Declaration]] = {
    "convbert": Declaration("ConvBertSelfAttention", ConvolvedAttention),
    "deberta": Declaration("DisentangledSelfAttention", JoinedAttention, _DEBERTA),
    "deberta-v2": Declaration(
        "DisentangledSelfAttention", DisentangledAttention, {**_DEBERTA, "encoder.conv.forward": EachApart}
    ),
    "ibert": Declaration("IBertSelfAttention", ScaledAttention),
    "megatron-bert": Declaration("MegatronBertSelfAttention", PlainAttention),
    "mobilebert": Declaration("", PlainAttention, {"embeddings.forward": EachApart}),
    "mpnet": Declaration("MPNetSelfAttention", BiasedAttention, {"encoder.compute_position_bias": OverLongest}),
    "rembert": Declaration("RemBertSelfAttention", PlainAttention),
    "roformer": Declaration(
        "RoFormerSelfAttention", RotatedAttention, {"encoder.embed_positions.forward": PlacesInTexts}
    ),
}
"""Model type -> its declaration."""


@torch.inference_mode()
def declare(base: PreTrainedModel, context: EncoderContext) -> Callable[[], None]:
    """Put what is declared for `base` in place. Returns what takes it away again. Raises Unsupported."""
    encoder: Any = base.encoder
    found = DECLARED[base.config.model_type]
    own = [module for module in encoder.modules() if type(module).__name__ == found.attention]
    if any(getattr(module, "talking_head", False) for module in own):
        raise Unsupported("has heads that see each other's scores")
    if any(getattr(module, "quant_mode", False) for module in own):
        raise Unsupported("computes in integers, whose scales are those of all texts of a call")
    placed: list[PlainAttention | OverLongest] = []
    for module in own:
        module.forward = found.forward(module, context, encoder)
        placed.append(module.forward)
    for path, kind in found.methods.items():
        owner, _, name = path.rpartition(".")
        at = attrgetter(owner)(base)
        if at is None:  # a part that some have
            continue
        made = kind(at, name, context)
        setattr(at, name, made)
        placed.append(made)

    def take_away() -> None:
        for each in placed:
            each.take_away()

    return take_away
