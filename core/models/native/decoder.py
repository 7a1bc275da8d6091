"""A dense decoder computed in one call of compiled code per step: `core.models.base.Model` around `decoder.cpp`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from core.attention.base import AttentionBackend
from core.batch.forward_batch import ForwardBatch
from core.memory.companion import DeviceCompanion
from core.memory.kv_pool import KVPool
from core.models.base import NO_COMPANIONS, ModelSpec
from core.models.native.weights import decoder_layers, decoder_weights


class NativeDecoder:
    """Made from a transformers model that passed its check; shares its embedding and norms, packs all other weights.

    It has its own attention over pages in place, so the backend that `bind` is given is not used. `threads` compute
    together: the calling thread and others that the decoder owns, none of torch's.
    """

    def __init__(self, extension: Any, model: PreTrainedModel, spec: ModelSpec, threads: int) -> None:
        self._spec = spec
        weights = decoder_weights(model, spec.context_length)
        shape = weights.shape
        self._decoder = extension.Decoder(
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.eps,
            shape.scale,
            threads,
            weights.embedding,
            weights.cos,
            weights.sin,
            weights.final_norm,
            weights.head,
        )
        for layer in decoder_layers(model):
            norms = (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
            self._decoder.add_layer(*norms, layer.qkv, layer.out, layer.gate_up, layer.down)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    @property
    def spec(self) -> ModelSpec:
        """The spec of the model that it was made from."""
        return self._spec

    def bind(
        self, kv_pool: KVPool, attention: AttentionBackend, companions: Mapping[str, DeviceCompanion] = NO_COMPANIONS
    ) -> None:
        """Use the keys and values of `kv_pool`; `attention` is not used."""
        assert kv_pool.layers == self._spec.kv_layers, "the pool was built for another model"
        assert kv_pool.dtype == self._spec.dtype, (kv_pool.dtype, self._spec.dtype)
        self._keys = [kv_pool.k(spec.layer_id) for spec in kv_pool.layers]
        self._values = [kv_pool.v(spec.layer_id) for spec in kv_pool.layers]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32[S, vocab_size]: logits at `batch.last_indices`. Sets the hidden states that the batch wants."""
        if batch.kv_pool.recorder is not None:
            batch.kv_pool.recorder.wrote("kv", batch.out_cache_loc)
        logits, *states = self._decoder.forward(
            batch.input_ids,
            batch.positions,
            batch.out_cache_loc,
            batch.rows,
            torch.from_numpy(batch.prefix_lens_host),
            torch.from_numpy(batch.extend_lens_host),
            batch.last_indices,
            batch.req_to_token,
            self._keys,
            self._values,
            batch.wants_hidden,
            batch.wants_layers,
            None,
        )
        batch.layer_states = states.pop() if batch.wants_layers else None
        batch.hidden = states.pop() if batch.wants_hidden else None
        found: torch.Tensor = logits
        return found
