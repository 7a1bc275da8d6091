"""An unmodified transformers encoder-decoder (BART, T5) with a packed decoder.

The encoder runs as it is, once per admission, and leaves keys and values in cross pages. The decoder then sees one
packed row like any other model here.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, EncoderDecoderCache, PreTrainedModel

from core.attention.base import AttentionBackend
from core.attention.relative_bias import RelativeBias
from core.batch.forward_batch import ForwardBatch
from core.memory.kv_pool import KVLayerSpec
from core.models.encoder_decoder.cross_attention import CrossAttention
from core.models.encoder_decoder.encoder_batches import encode_inputs, encode_sounds
from core.models.hf.cache_argument import cache_argument
from core.models.hf.packed_attention import KVFacade

IMPLEMENTATION = "slipstream-decoder"
OWNER = "slipstream_decoder"
"""Attribute of every decoder module: the `EncoderDecoder` that it belongs to."""

_BART, _T5 = ("k_proj", "v_proj"), ("k", "v")
PROJECTIONS = {
    "BartAttention": _BART,
    "WhisperAttention": _BART,
    "BlenderbotAttention": _BART,
    "BlenderbotSmallAttention": _BART,
    "MBartAttention": _BART,
    "MarianAttention": _BART,
    "PLBartAttention": _BART,
    "PegasusAttention": _BART,
    "MT5Attention": _T5,
    "T5Attention": _T5,
}
"""Class of a cross-attention module -> its key and value projections. What is not listed is refused by name."""


class _CrossLayer:
    """Looks like a filled cache to transformers. Its one key tells a cross-attention call from self attention."""

    def __init__(self, key: torch.Tensor) -> None:
        self.keys = self.values = key


class _CrossCache:
    def __init__(self, layers: list[_CrossLayer]) -> None:
        self.layers = layers


class DecoderFacade(EncoderDecoderCache):
    """Passed as the cache: a `KVFacade` for self attention, cross keys that are there already."""

    def __init__(self, layers: int, heads: int, head_dim: int, like: torch.Tensor) -> None:
        # Stand-ins, not caches: `EncoderDecoderCache.__init__` would insist on real ones, and models ask for its type.
        self.self_attention_cache: Any = KVFacade()
        self.cross_key = like.new_zeros(1, heads, 1, head_dim)
        self.cross_attention_cache: Any = _CrossCache([_CrossLayer(self.cross_key) for _ in range(layers)])
        self.is_updated = dict.fromkeys(range(layers), True)

    is_linear = is_dummy = (False,)
    """By layer, for masks that are not built."""

    def __len__(self) -> int:
        return len(self.is_updated)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are given explicitly."""
        return 0


class EncoderDecoder:
    """`model` with its decoder switched over to packed attention; the encoder keeps what it was loaded with."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        decoder: Any = model.get_decoder()
        self._cross = [m for m in decoder.modules() if type(m).__name__ in PROJECTIONS and not _is_self(decoder, m)]
        assert self._cross, f"{type(model).__name__}: no cross attention that we know the projections of"
        first = self._cross[0]
        self._heads = int(getattr(first, "num_heads", None) or first.n_heads)
        self._head_dim = int(getattr(first, "head_dim", None) or first.key_value_proj_dim)
        self._bias = _relative_bias(decoder)
        config = copy.deepcopy(decoder.config)
        config._attn_implementation = IMPLEMENTATION
        for module in decoder.modules():
            setattr(module, OWNER, self)
            if hasattr(module, "config"):
                module.config = config
        table = getattr(decoder, "embed_positions", None)
        if table is not None:
            table.register_forward_pre_hook(self._packed_positions, with_kwargs=True)
        model.get_output_embeddings().register_forward_pre_hook(self._wanted_only)
        like = next(decoder.parameters())
        self._cache_argument = cache_argument(model.forward)
        self._cache = DecoderFacade(len(self._cross), self._heads, self._head_dim, like)
        self._hidden = like.new_zeros(1, 1, model.config.d_model)
        # Whisper's layers see a cache only if it is to be used.
        self._hears = "input_features" in inspect.signature(model.forward).parameters
        self._attention: AttentionBackend | None = None
        self._pages: CrossAttention | None = None
        self._positions = self._wanted = torch.empty(0, dtype=torch.int64)
        self._layer = 0

    @property
    def kv_layers(self) -> tuple[KVLayerSpec, ...]:
        """What the decoder caches per token, of itself and equally of the encoder's output."""
        return tuple(KVLayerSpec(i, self._heads, self._head_dim, self._head_dim) for i in range(len(self._cross)))

    def bind(self, attention: AttentionBackend, pages: CrossAttention) -> None:
        """Give it the backend of its self attention and the cross pages."""
        self._attention, self._pages = attention, pages

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32[S, vocab] of the decoder tokens in `batch`, after its encoder inputs went into cross pages."""
        assert self._attention is not None and self._pages is not None, "bind() comes first"
        if batch.encoder_ids is not None:
            assert batch.encoder_lens_host is not None
            ids, lens = batch.encoder_ids, batch.encoder_lens_host
            sounds = batch.encoder_features
            encoder = self._model.get_encoder()
            self._keep(encode_sounds(encoder, sounds, self._hidden) if sounds else encode_inputs(encoder, ids, lens))
        self._positions, self._wanted = batch.positions, batch.last_indices
        self._cache.self_attention_cache.begin(batch.positions)
        self._attention.plan(batch)
        self._pages.plan(batch)
        output = self._model(
            encoder_outputs=(self._hidden,),
            decoder_input_ids=batch.input_ids[None],
            use_cache=self._hears,
            **{self._cache_argument: self._cache},
        )
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    def _keep(self, hidden: torch.Tensor) -> None:
        """Project keys and values of all encoder tokens, [E, H], into cross pages."""
        assert self._pages is not None, "bind() comes first"
        for layer_id, module in enumerate(self._cross):
            names = PROJECTIONS[type(module).__name__]
            k, v = (getattr(module, name)(hidden).view(-1, self._heads, self._head_dim) for name in names)
            self._pages.write(layer_id, k, v)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """[T, H, Dv] of one attention call of the decoder, self or cross."""
        assert self._attention is not None and self._pages is not None, "bind() comes first"
        if k is self._cache.cross_key:
            return self._pages.forward(self._layer, q[0], scale)
        self._layer = self._cache.self_attention_cache.layer_of(k)
        return self._attention.forward(self._layer, q[0], k[0], v[0], scale=scale, bias=self._bias)

    def _wanted_only(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Reduce the input of the output matrix to tokens that need logits; these models have no argument for that."""
        return (args[0].index_select(1, self._wanted), *args[1:])

    def _packed_positions(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "position_ids": self._positions}


def _is_self(decoder: nn.Module, module: nn.Module) -> bool:
    name = next(name for name, found in decoder.named_modules() if found is module)
    return name.rsplit(".", 1)[-1] in ("self_attn", "SelfAttention")


@torch.inference_mode()
def _relative_bias(decoder: nn.Module) -> RelativeBias | None:
    """T5's bias by distance, out of its first layer; None for models that have none."""
    found: Any = next((m for m in decoder.modules() if getattr(m, "has_relative_attention_bias", False)), None)
    if found is None:
        return None
    distances = torch.arange(
        found.relative_attention_max_distance + 1, device=found.relative_attention_bias.weight.device
    )
    bucket = found._relative_position_bucket(
        -distances,
        bidirectional=False,
        num_buckets=found.relative_attention_num_buckets,
        max_distance=found.relative_attention_max_distance,
    )
    return RelativeBias(found.relative_attention_bias(bucket).float().contiguous())


def _decoder_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """transformers' attention call for a packed decoder row."""
    owner: EncoderDecoder = getattr(module, OWNER)
    scaling = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return owner.attend(query, key, value, scale)[None], None


AttentionInterface.register(IMPLEMENTATION, _decoder_attention)
