"""Lets an unmodified transformers model attend through our backend: one attention function, one stand-in for its cache.

transformers calls the registered function with the attention module as first argument; `bind_context` has put this
model's own `PackedContext` on every module, so two engines in one process share the function and nothing else. No mask
function is registered under the same name, which tells transformers to build no masks: the backend knows which keys
each query may see.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from core.attention.base import AttentionBackend
from core.attention.relative_bias import RelativeBias
from core.attention.span import AttentionSpan
from core.batch.forward_batch import ForwardBatch
from core.batch.vision_batch import StepImage
from core.models.hf.cache_argument import cache_argument
from core.models.hf.layer_states import LayerStates
from core.models.hf.mla import latent_of
from core.models.hf.windowed import WindowedLayers
from core.models.vision.both_ways import attend_both_ways

IMPLEMENTATION = "slipstream"
"""Name under which transformers finds `packed_attention`."""

NOTHING: Mapping[str, torch.Tensor] = {}

CONTEXT = "slipstream_context"
"""Attribute of every module of a bound model."""


class KVFacade:
    """Passed as the cache. Stores no keys; it only notes at `update` which layer the keys belong to.

    A layer id taken from the module would be wrong where one module serves several layers (Zamba 2), and where a layer
    attends to the keys of another one (Gemma 3n). Any other attribute that a model reads from its cache raises
    AttributeError with the name of the attribute.
    """

    is_compileable = False
    is_initialized = True

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.is_sliding = [False]
        self._positions: torch.Tensor | None = None
        self._latest: tuple[torch.Tensor, int] | None = None
        self._earlier: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def begin(self, positions: torch.Tensor) -> None:
        """Forget the last step; `positions` are those of this one, int64[T]."""
        self._positions = positions
        self._latest = None
        self._earlier.clear()

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note the layer of `key`. Returns keys and values unchanged: the backend adds those of earlier tokens."""
        self._latest = (key, layer_idx)
        self._earlier[id(key)] = (weakref.ref(key), layer_idx)
        return key, value

    def layer_of(self, key: torch.Tensor) -> int:
        """The layer that the `key` of an attention call belongs to, right after its `update` or later in the step."""
        latest = self._latest
        if latest is not None and latest[0] is key:
            return latest[1]
        found = self._earlier.get(id(key))
        if found is not None and found[0]() is key:
            return found[1]
        # Keys changed between cache and attention (heads repeated, say): they belong to the update just before.
        if latest is None:
            raise RuntimeError("attention was called with keys that never went through the cache")
        return latest[1]

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """0, as positions are given explicitly. For a named layer the past length of every token, int64[T].

        Llama 4 adds `arange(T)` to that, to scale queries by position, and so gets a packed row's positions right.
        """
        if layer_idx is None or self._positions is None:
            return 0
        return self._positions - torch.arange(self._positions.shape[0], device=self._positions.device)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(keys, first key) of a mask, for models that ask although no mask is built."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0, for models that ask although no mask is built."""
        return 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """-1: no limit."""
        return -1

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"it needs a cache with {name!r}, which paged keys and values do not have")


@dataclass(slots=True)
class PackedContext:
    """The facts about the current step that the attention function of one model needs. One per model, on one thread."""

    dtype: torch.dtype
    """Dtype of the KV pool. Queries, keys and values of models that rotate in float32 are cast back to it."""
    spans: dict[int, AttentionSpan] = field(default_factory=dict)
    """Layer id -> visible keys, as in the model's own masks; found at load."""
    attention: AttentionBackend | None = None
    windowed: WindowedLayers | None = None
    """Layers with sliding windows that have a KV pool of their own; None if there are none."""
    cache: KVFacade = field(default_factory=KVFacade)
    batch: ForwardBatch | None = None
    """The step that is computed."""
    both_ways: tuple[StepImage, ...] = ()
    """Its images whose tokens see each other in both directions."""
    in_windows: bool = False
    """Whether they do that in layers with windows alone."""

    def begin(self, batch: ForwardBatch, both_ways: tuple[StepImage, ...] = (), in_windows: bool = False) -> None:
        """Start a step."""
        assert self.attention is not None, "bind() comes first"
        self.batch, self.both_ways, self.in_windows = batch, both_ways, in_windows
        self.cache.begin(batch.positions)
        self.attention.plan(batch)
        if self.windowed is not None:
            self.windowed.plan(batch)

    def attention_of(self, layer_id: int) -> AttentionBackend:
        """The backend that reads and writes the pool of `layer_id`."""
        assert self.attention is not None, "bind() comes first"
        windowed = self.windowed
        return windowed.attention if windowed is not None and layer_id in windowed.layers else self.attention

    def batch_of(self, layer_id: int) -> ForwardBatch:
        """The step as a batch over the pool of `layer_id`."""
        windowed = self.windowed
        found = windowed.view if windowed is not None and layer_id in windowed.layers else self.batch
        assert found is not None, "begin() comes first"
        return found


def bind_context(model: torch.nn.Module, context: Any) -> None:
    """Put `context` where the attention function looks for it. The last one bound wins."""
    for module in model.modules():
        setattr(module, CONTEXT, context)


class PackedCall:
    """The one way in which a transformers model is called here, with its signature looked up once."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        names = inspect.signature(model.forward).parameters
        self._keeps = "logits_to_keep" in names
        # Purely recurrent models take no positions.
        self._places = "position_ids" in names
        self._cache_argument = cache_argument(model.forward)
        self._wants_hidden = False
        self.hidden: torch.Tensor | None = None
        self._layers = LayerStates(model)
        base = getattr(model, "base_model", model)
        if base is not model:
            # Logits are made from a slice of this module's output, so its hook sees the states of all tokens for free.
            base.register_forward_hook(self._keep_hidden)

    def begin(self, batch: ForwardBatch) -> None:
        """Call before `logits`; `batch` says which hidden states are wanted."""
        self._wants_hidden = batch.wants_hidden
        self.hidden = None
        self._layers.begin(batch.wants_layers)

    def give(self, batch: ForwardBatch) -> None:
        """Set what `batch` wanted of the hidden states. Call after `logits`."""
        batch.hidden, self.hidden = self.hidden, None
        batch.layer_states = self._layers.take()

    def _keep_hidden(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self._wants_hidden:
            self.hidden = output[0][0]

    def logits(
        self,
        cache: KVFacade,
        ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor,
        given: Mapping[str, torch.Tensor] = NOTHING,
    ) -> torch.Tensor:
        """[S, vocab] at the places `wanted`, int64[S], of the packed tokens `ids` at `positions`, int64[T] each.

        `positions` may be int64[3, T]. `given`: arguments that the model gets in the place of ids.
        """
        # Without it the output matrix would multiply all T tokens, of which a prefill needs one in hundreds. It must be
        # a tensor: given an int, Gemma 4 drops the other tokens halfway through, and the token counts of attention
        # would be wrong.
        some: dict[str, Any] = {"logits_to_keep": wanted} if self._keeps else {}
        if self._places:
            some["position_ids"] = positions[None] if positions.dim() == 1 else positions[:, None]
        some[self._cache_argument] = cache
        some |= given or {"input_ids": ids[None]}
        output: Any = self._model(use_cache=False, **some)
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps else logits.index_select(0, wanted)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    relative_bias: RelativeBias | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention call for a packed row: query [1, H, T, D], key and value [1, Hkv, T, D or Dv].

    Returns [1, T, H, Dv] and no weights. Windows and chunks come from the context, not from the arguments, because not
    every model passes them.
    """
    context: PackedContext = getattr(module, CONTEXT)
    layer_id = context.cache.layer_of(key)
    span = context.spans[layer_id]
    if key.dtype != context.dtype or value.dtype != context.dtype or query.dtype != context.dtype:
        query, key, value = (tensor.to(context.dtype) for tensor in (query, key, value))
    latent = latent_of(module)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = context.attention_of(layer_id).forward(
        layer_id,
        query[0] if latent is None else latent.absorb(query[0]),
        key[0],
        value[0],
        scale=scale,
        sliding_window=span.window,
        softcap=softcap or None,
        sinks=s_aux,
        chunk_size=span.chunk,
        bias=relative_bias,
    )
    if context.both_ways and (span.window is not None or not context.in_windows):
        attend_both_ways(
            *(attended, context.both_ways, context.batch_of(layer_id), layer_id, query[0]),
            scale=scale,
            window=span.window,
            softcap=softcap or None,
            sinks=s_aux,
        )
    return (attended if latent is None else latent.expand(attended))[None], None


AttentionInterface.register(IMPLEMENTATION, packed_attention)
