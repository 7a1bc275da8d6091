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
from core.memory.recurrent.row_to_slot import HybridReqToTokenPool
from core.memory.recurrent.state_slots import NAME as STATES
from core.memory.window.window_pages import NAME as WINDOW
from core.memory.window.window_pool import SlidingWindowPool
from core.models.base import NO_COMPANIONS, ModelSpec
from core.models.native.images import ImageSteps
from core.models.native.states import StateTable
from core.models.native.weights import decoder_layers, decoder_weights

STORED = frozenset({"auto", "int8"})
"""Names of the formats in which it reads and writes keys and values (`core.memory.kv_formats`)."""


class NativeDecoder:
    """Made from a transformers model that passed its check; shares its embedding and norms, packs all other weights.

    It has its own attention over pages in place, so the backend that `bind` is given is not used. `threads` compute
    together: the calling thread and others that the decoder owns, none of torch's. `invariant`: a token gets the same
    logits in any step.
    """

    def __init__(
        self,
        extension: Any,
        model: PreTrainedModel,
        spec: ModelSpec,
        threads: int,
        invariant: bool = False,
        images: ImageSteps | None = None,
    ) -> None:
        self._spec, self.invariant, self._images = spec, invariant, images
        weights = decoder_weights(model, spec)
        self._decoder = extension.Decoder(
            threads, invariant, weights.embedding, weights.final_norm, weights.head, weights.outside
        )
        for layer in decoder_layers(model, spec):
            self._decoder.add_layer(layer)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._key_scales: list[torch.Tensor | None] = []
        self._value_scales: list[torch.Tensor | None] = []
        self._windows: SlidingWindowPool | None = None
        self._states: StateTable | None = None

    @property
    def spec(self) -> ModelSpec:
        """The spec of the model that it was made from."""
        return self._spec

    def bind(
        self, kv_pool: KVPool, attention: AttentionBackend, companions: Mapping[str, DeviceCompanion] = NO_COMPANIONS
    ) -> None:
        """Use the keys and values of `kv_pool` and of the pool of windowed layers, and the states; not `attention`."""
        windows = companions.get(WINDOW)
        assert windows is None or isinstance(windows, SlidingWindowPool), type(windows)
        pools = [kv_pool] if windows is None else [kv_pool, windows.kv]
        held = {layer.layer_id: (layer, pool) for pool in pools for layer in pool.layers}
        assert tuple(held[number][0] for number in sorted(held)) == self._spec.kv_layers, "built for another model"
        assert kv_pool.dtype == self._spec.dtype, (kv_pool.dtype, self._spec.dtype)
        assert all(pool.format.name in STORED for pool in pools), "compiled code reads no such codes"
        self._windows = windows
        self._keys = [held[number][1].k(number) for number in sorted(held)]
        self._values = [held[number][1].v(number) for number in sorted(held)]
        coded = [number for number in sorted(held) if held[number][1].format.codes is not None]
        self._key_scales = [held[number][1].k_scales(number) for number in coded]
        self._value_scales = [held[number][1].v_scales(number) for number in coded]
        if self._spec.state_layers:
            states = companions[STATES]
            assert isinstance(states, HybridReqToTokenPool), type(states)
            assert states.states.layers == self._spec.state_layers, "the states were built for another model"
            self._states = StateTable(states)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32[S, vocab_size]: logits at `batch.last_indices`. Sets the hidden states that the batch wants."""
        if batch.kv_pool.recorder is not None:
            batch.kv_pool.recorder.wrote("kv", batch.out_cache_loc)
        ids, positions, images = (
            (batch.input_ids, batch.positions, None) if self._images is None else self._images.of(batch)
        )
        logits, *states = self._decoder.forward(
            ids,
            positions,
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
            None if self._windows is None else self._windows.table,
            batch.kv_pool.page_size,
            None if self._states is None else self._states.of(batch),
            self._key_scales,
            self._value_scales,
            images,
        )
        batch.layer_states = states.pop() if batch.wants_layers else None
        batch.hidden = states.pop() if batch.wants_hidden else None
        found: torch.Tensor = logits
        return found
