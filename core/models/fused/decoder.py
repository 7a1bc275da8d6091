"""A dense decoder on a GPU in few kernels: `core.models.base.Model` made from a family's declaration.

What native code is to the CPU. A layer is nine launches: add and norm, queries with keys and values, their norms with
rotation and cache write, attention, its product, add and norm, gate with up, activation, down. Products are those of
PyTorch, unless no bit may depend on how many rows there are. It rounds where the modules of transformers do, and shares
all weights with them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from core.attention.base import AttentionBackend
from core.batch.forward_batch import ForwardBatch
from core.memory.companion import DeviceCompanion
from core.memory.kv_pool import KVPool
from core.memory.window.window_pages import NAME as WINDOW
from core.models.base import NO_COMPANIONS, ModelSpec
from core.models.fused.layer import DenseLayer, LayerStep, Product, device_norm
from core.models.fused.product import FixedProduct
from core.models.fused.reader import check_plain, reader_for
from core.models.fused.residual import add_and_norm
from core.models.hf.self_check import Reference
from core.models.hf.windowed import WindowedLayers, window_layers
from core.models.native.parts import Outside
from core.models.native.reading import NotDense
from core.models.native.weights import check_alone, check_declared, decoder_layers, decoder_weights, family_of

KV_FORMATS = frozenset({"auto", "fp8_e4m3"})
"""Names of the formats in which it writes keys and values (`core.memory.kv_formats`)."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class FusedDecoder:
    """Made from a transformers model that passed its check; the weights of that model become views of its own."""

    def __init__(self, model: PreTrainedModel, spec: ModelSpec, invariant: bool = False) -> None:
        """`invariant`: a token gets the same logits in any step, if attention gives it the same.

        Raises NotDense, before anything has changed, for what it cannot compute; rarely behind that, harmlessly.
        """
        check_fusible(model, spec)
        reader, by_head = reader_for(model.dtype), family_of(model).by_head
        weights = decoder_weights(model, spec, reader)
        self._module, self._spec, self.invariant = model, spec, invariant
        product = FixedProduct if invariant else Product
        self.reference: Reference | None = None
        """The logits that the model it was made from was proved against."""
        self._embedding, self._head = weights.embedding, product.of(weights.head)
        self._final_norm = device_norm(weights.final_norm, model.device)
        self._outside: Outside = weights.outside
        self._layers: list[DenseLayer] = []
        layers = decoder_layers(model, spec, reader)
        for kept, layer in zip(spec.kv_layers, layers, strict=True):
            self._layers.append(DenseLayer(layer, kept.layer_id, by_head, model.device, product))
            # What stood for the parts of a matrix goes back to the device before the next one is made.
            if model.device.type == "cuda":
                torch.cuda.empty_cache()
        self._attention: AttentionBackend | None = None
        self._windowed: WindowedLayers | None = None
        self._pools: dict[int, KVPool] = {}

    @property
    def spec(self) -> ModelSpec:
        """The spec of the model that it was made from."""
        return self._spec

    @property
    def module(self) -> PreTrainedModel:
        """The module tree that it was made from; its weights are this decoder's."""
        return self._module

    def bind(
        self, kv_pool: KVPool, attention: AttentionBackend, companions: Mapping[str, DeviceCompanion] = NO_COMPANIONS
    ) -> None:
        """Set the backends and the pools of ordinary and windowed layers."""
        windowed = window_layers(companions.get(WINDOW), attention)
        pools = [kv_pool] if windowed is None else [kv_pool, windowed.pool.kv]
        held = {layer.layer_id: (layer, pool) for pool in pools for layer in pool.layers}
        assert tuple(held[number][0] for number in sorted(held)) == self._spec.kv_layers, "built for another model"
        assert kv_pool.dtype == self._spec.dtype, (kv_pool.dtype, self._spec.dtype)
        assert all(pool.format.name in KV_FORMATS for pool in pools), "its kernels write no such codes"
        self._attention, self._windowed = attention, windowed
        self._pools = {number: pool for number, (_, pool) in held.items()}

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32[S, vocab_size]: logits at `batch.last_indices`. Sets the hidden states that the batch wants."""
        steps = self._begin(batch)
        states = torch.embedding(self._embedding, batch.input_ids)
        if self._outside.embedding_multiplier != 1.0:
            states = states * self._outside.embedding_multiplier
        kept: dict[int, torch.Tensor] = {}
        added: list[torch.Tensor] = []
        behind, factor = None, 1.0
        for number, (layer, step) in enumerate(zip(self._layers, steps, strict=True)):
            second = layer.before_mlp if layer.parallel else None
            sums = add_and_norm(states, added, behind, factor, layer.before_mixers, second)
            kept[number] = sums.states
            states, added = layer.run(sums, step)
            behind, factor = layer.after_mlp, layer.factor
        last = add_and_norm(states, added, behind, factor, self._final_norm)
        kept[len(self._layers)] = last.states
        if batch.wants_layers:
            batch.layer_states = torch.cat([kept[number] for number in batch.wants_layers], -1)
        if batch.wants_hidden:
            batch.hidden = last.read
        return self._logits(last.read.index_select(0, batch.last_indices))

    def _logits(self, read: torch.Tensor) -> torch.Tensor:
        logits, multiplier, cap = self._head(read), self._outside.logit_multiplier, self._outside.logit_cap
        if multiplier != 1.0:
            logits = logits * multiplier
        if cap:
            logits = torch.tanh(logits / cap) * cap
        return logits.float()

    def _begin(self, batch: ForwardBatch) -> list[LayerStep]:
        attention, windowed = self._attention, self._windowed
        assert attention is not None, "bind() comes first"
        attention.plan(batch)
        if windowed is not None:
            windowed.plan(batch)
        steps = []
        for kept in self._spec.kv_layers:
            pool, number = self._pools[kept.layer_id], kept.layer_id
            inside = windowed is not None and number in windowed.layers
            slots = windowed.slots if inside and windowed is not None else batch.out_cache_loc
            attend = windowed.attention.forward if inside and windowed is not None else attention.forward
            if pool.recorder is not None:
                pool.recorder.wrote(pool.name, slots)
            held = pool.k(number), pool.v(number)
            scales = pool.k_scales(number), pool.v_scales(number)
            steps.append(LayerStep(attend, *held, batch.positions, slots, *scales))
        return steps


def check_fusible(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Raises NotDense, with the reason, for a model that is not made of dense layers with plain weights."""
    if model.dtype not in DTYPES:
        raise NotDense(f"{model.dtype} has no kernels")
    if spec.state_layers:
        raise NotDense("it has recurrent layers")
    check_declared(model, spec)
    check_alone(model, spec)
    if len({(each.num_kv_heads, each.k_dim) for each in spec.kv_layers}) > 1:
        raise NotDense("its heads have more than one size")
    check_plain([module for module in model.modules() if hasattr(module, "in_features")])
