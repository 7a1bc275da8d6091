"""Any transformers causal language model, unmodified, over our pools: the default model family.

The model sees one packed row of all the step's tokens with their positions; only attention knows where one request
ends and the next begins. A model that cannot work that way is refused at load, by name, with the reason.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForImageTextToText,
)

from core.attention.base import AttentionBackend
from core.batch.forward_batch import ForwardBatch
from core.config import ModelConfig
from core.errors import ModelLoadError
from core.memory.companion import DeviceCompanion
from core.memory.kv_pool import KVPool
from core.memory.recurrent.row_to_slot import HybridReqToTokenPool
from core.memory.recurrent.state_slots import NAME as STATES
from core.memory.window.window_pages import NAME as WINDOW
from core.models.base import NO_COMPANIONS, ModelSpec, Progress
from core.models.config import CheckpointConfig, own_ids
from core.models.fused.layers import fuse_layers, unfuse_layers, wanted
from core.models.hf.label_head import head_names
from core.models.hf.layer_states import hidden_size_of, layers_of
from core.models.hf.mla import absorb_latents, expand_latents
from core.models.hf.module_tree import load_module, one_line, read_configuration
from core.models.hf.packed_attention import IMPLEMENTATION, PackedCall, PackedContext, bind_context
from core.models.hf.part import Part
from core.models.hf.probe import ModelProbe, Unsupported, probe_model
from core.models.hf.products import Attend, Products
from core.models.hf.recurrent import StateContext
from core.models.hf.recurrent_probe import unwrap_mixers, wrap_mixers
from core.models.hf.routed_attention import WITHOUT_PLACES, plain_linears, route_attention, unrouted
from core.models.hf.self_check import CheckResult, Reference, plain_reference, run_self_check
from core.models.hf.windowed import window_layers
from core.models.lora.slots import LORA
from core.models.quantized.at_load import quantize_at_load
from core.models.quantized.registry import QuantizedWeights, quant_method
from core.models.vision.families import TOWERS, VISION_FAMILIES
from core.models.vision.tower import VisionTower, vision_spec, vision_tower

logger = logging.getLogger(__name__)


class TransformersModel:
    """A `core.models.base.Model` around a transformers module tree."""

    def __init__(
        self, model: PreTrainedModel, spec: ModelSpec, context: PackedContext, states: StateContext | None
    ) -> None:
        self._call = PackedCall(model)
        self._module = model
        self._spec = spec
        self._context = context
        self._states = states
        self.reference: Reference | None = None
        """The logits that it was proved against; a native decoder proves itself against them too."""
        self.products: Products | None = None
        self._vision = vision_tower(model)

    @property
    def spec(self) -> ModelSpec:
        """Measures of the model."""
        return self._spec

    @property
    def module(self) -> PreTrainedModel:
        """The module tree; adapters hook its linear layers."""
        return self._module

    @property
    def tower(self) -> VisionTower | None:
        """What sees images in it; None if nothing does."""
        return self._vision

    def bind(
        self, kv_pool: KVPool, attention: AttentionBackend, companions: Mapping[str, DeviceCompanion] = NO_COMPANIONS
    ) -> None:
        """Set the attention backends of ordinary and windowed layers, and the pool of recurrent states."""
        windowed = window_layers(companions.get(WINDOW), attention)
        layers = (*kv_pool.layers, *(() if windowed is None else windowed.pool.kv.layers))
        held = tuple(sorted(layers, key=lambda spec: spec.layer_id))
        assert held == self._spec.kv_layers, "the pool was built for another model"
        assert kv_pool.dtype == self._spec.dtype, (kv_pool.dtype, self._spec.dtype)
        self._context.attention, self._context.windowed = attention, windowed
        if self._states is not None:
            pool = companions[STATES]
            assert isinstance(pool, HybridReqToTokenPool), type(pool)
            assert pool.states.layers == self._spec.state_layers, "the states were built for another model"
            self._states.pool, self._states.in_order = pool, LORA in companions

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32[S, vocab_size]: logits at `batch.last_indices`. Sets the hidden states that the batch wants."""
        if self.products is not None:
            self.products.begin(batch.input_ids.shape[0])
        vision, positions, given = self._vision, batch.positions, dict[str, torch.Tensor]()
        self.enter(batch)
        if vision is not None:
            positions, embeddings = vision.positions(batch), vision.embeddings(batch)
            if embeddings is not None:
                given = {"inputs_embeds": embeddings[None], **vision.beside(batch)}
        cache = self._context.cache
        logits = self._call.logits(cache, batch.input_ids, positions, batch.last_indices, given).float()
        self._call.give(batch)
        if self.products is not None:
            self.products.end()
        return logits

    def enter(self, batch: ForwardBatch) -> None:
        """Tell all that the module tree calls, or that watches it, which step it is going to compute."""
        vision = self._vision
        if vision is None:
            self._context.begin(batch)
        else:
            self._context.begin(batch, vision.both_ways(batch), vision.in_windows)
        if self._states is not None:
            self._states.begin(batch)
        self._call.begin(batch)

    def attend_by(self, attend: Attend) -> None:
        """Nothing: attention of a decoder reads pages."""

    def twin(self) -> TransformersModel:
        """The same over a copy of the module tree that shares all its tensors; it may run on a thread of its own.

        Call it before the first step: what serving has bound and hooked by then would be copied too.
        """
        context = PackedContext(dtype=self._context.dtype, spans=self._context.spans)
        tensors: Any = chain(self._module.parameters(), self._module.buffers())
        shared: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
        shared[id(self._context)] = context
        states = None if self._states is None else StateContext()
        if self._states is not None:
            shared[id(self._states)] = states
        twin = TransformersModel(copy.deepcopy(self._module, shared), self._spec, context, states)
        twin.reference = self.reference
        return twin

    def check(self) -> CheckResult:
        """Run over small pools of its own, as when it was proved, and compare. Leaves those bound."""
        assert self.reference is not None, "it was proved"
        return run_self_check(self, self.reference)


def load_transformers(
    checkpoint: CheckpointConfig, config: ModelConfig, device: torch.device, progress: Progress
) -> TransformersModel:
    """Load, probe and check. Raises ModelLoadError, which names the model type and what is wrong, in one line."""
    kind = checkpoint.model_type
    hf_config = read_configuration(checkpoint)
    refuse_by_class(hf_config, kind)
    options: dict[str, Any] = {}
    if checkpoint.labels is not None:
        # The head of a judge stands beside the model, and has no part in its logits: these are made of what is there.
        options = {"beside": head_names(hf_config), "tie_word_embeddings": True}
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    sees = kind in VISION_FAMILIES and not config.is_shared
    if causal is None or (sees and checkpoint.architecture != causal.__name__):
        options["auto"] = AutoModelForImageTextToText
    elif hf_config.get_text_config() is not hf_config:
        # Of a checkpoint that sees, or hears, the text alone.
        options["beside"] = (*options.get("beside", ()), *TOWERS)
    model = load_module(checkpoint, config, device, progress, **options)
    if hf_config.get_text_config() is not hf_config and vision_spec(model.config) is None:
        logger.info("its text is served: images of %r are not taken", kind)
    return prove_module(model, checkpoint, config, progress)


def prove_module(
    model: PreTrainedModel,
    checkpoint: CheckpointConfig,
    config: ModelConfig,
    progress: Progress,
    part: Part | None = None,
) -> TransformersModel:
    """Probe and check a module tree that has its weights. Raises ModelLoadError, as `load_transformers` does.

    `part`: what this process has of it; None for all.
    """
    kind = checkpoint.model_type
    text: Any = model.config.get_text_config()
    if vision_spec(model.config) is None and getattr(text, "use_bidirectional_attention", None) == "vision":
        # Without images no token sees another in both directions, and a mask for them is of one length.
        text.use_bidirectional_attention = None
    plain_linears(model)
    method = quant_method(checkpoint)
    if method is None:
        weights = quantize_at_load(model, config.quantization)
    else:
        weights = method.adopt(model, config.quantized_weights)
    what = f"model type {kind!r}" + (f" with weights in {weights.name} on {model.device.type}" if weights.name else "")
    what += "" if part is None else part.told
    progress("self-check", 0.0)
    try:
        loaded, result = _prove(model, weights, checkpoint, config, part)
    except ModelLoadError:
        raise
    except Unsupported as error:
        raise ModelLoadError(f"{what} is not supported: it {error}") from error
    except Exception as error:
        raise ModelLoadError(f"{what} is not supported: {one_line(error)}") from error
    if not result.passed:
        lead = "is not supported" if math.isfinite(result.error) else "cannot be served with these weights"
        raise ModelLoadError(f"{what} {lead}: {result.told}")
    progress("self-check", 1.0)
    return loaded


def _prove(
    model: PreTrainedModel,
    weights: QuantizedWeights,
    checkpoint: CheckpointConfig,
    config: ModelConfig,
    part: Part | None,
) -> tuple[TransformersModel, CheckResult]:
    """Run `model` plain, probed, and packed: with fused layers, else with latents, else as it is, until one passes.

    An exception that this raises makes the model unsupported.
    """
    table: Any = model.get_input_embeddings()
    width = min(checkpoint.vocab_size, int(table.weight.shape[0]))
    reference = plain_reference(model, width, weights.rounds_activations)
    route_attention(model, checkpoint.context_length or config.context_length or 1)
    # Fused layers compute parts of the next layer, which another process may have.
    if part is None and wanted(model.device) and fuse_layers(model):
        try:
            loaded, result = _prove_as_is(model, weights, reference, checkpoint, config)
            if result.passed:
                return loaded, result
            reason = f"its logits differ by {result.error:.2g}"
        except Exception as error:
            # Whatever it is: Triton's errors, of a kernel that does not fit the device, are no RuntimeErrors.
            reason = str(error).partition("\n")[0]
        logger.warning("no fused layers, the model's own go on: %s", reason)
        unfuse_layers(model)
    if absorb_latents(model):
        try:
            loaded, result = _prove_as_is(model, weights, reference, checkpoint, config, part)
            if result.passed:
                return loaded, result
        except (Unsupported, RuntimeError, AssertionError):
            if part is not None:  # other processes would go on with what this one gave up
                raise
            # Not the pattern it was taken for: it is served with expanded keys and values, if those are right.
        expand_latents(model)
        unwrap_mixers(model)
    return _prove_as_is(model, weights, reference, checkpoint, config, part)


def _prove_as_is(
    model: PreTrainedModel,
    weights: QuantizedWeights,
    reference: Reference,
    checkpoint: CheckpointConfig,
    config: ModelConfig,
    part: Part | None = None,
) -> tuple[TransformersModel, CheckResult]:
    probe = probe_model(model, checkpoint.context_length)
    loaded = _assemble(model, probe, weights, checkpoint, config, reference.vocab_size, reference.calls_base, part)
    loaded.reference = reference
    result = run_self_check(loaded, reference)
    return loaded, result if part is None else part.judged(result)


def refuse_by_class(hf_config: PreTrainedConfig, kind: str) -> None:
    """Refuse what the class alone rules out, before weights are read. Raises ModelLoadError."""
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    if found is None:
        found = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(hf_config), None)
    if found is None:
        raise ModelLoadError(f"model type {kind!r} is not supported: transformers has no causal language model for it")
    model_class = found[0] if isinstance(found, tuple | list) else found
    if (lacking := unrouted(hf_config)) is not None:
        raise ModelLoadError(f"model type {kind!r} is not supported: it {lacking}")
    stateful = getattr(model_class, "_is_stateful", False)
    # A purely recurrent model needs no positions; whether it is one, the probe finds out.
    if (
        not stateful
        and kind not in WITHOUT_PLACES
        and "position_ids" not in inspect.signature(model_class.forward).parameters
    ):
        raise ModelLoadError(
            f"model type {kind!r} is not supported: it takes no positions, so sequences cannot be packed"
        )


def _assemble(
    model: PreTrainedModel,
    probe: ModelProbe,
    weights: QuantizedWeights,
    checkpoint: CheckpointConfig,
    config: ModelConfig,
    vocab_size: int,
    gives_hidden: bool,
    part: Part | None,
) -> TransformersModel:
    context_length = checkpoint.context_length or config.context_length
    if context_length is None:
        raise ModelLoadError(f"{checkpoint.path / 'config.json'} gives no context length; configure context_length")
    spec = ModelSpec(
        name=checkpoint.path.resolve().name,
        architecture=checkpoint.architecture,
        vocab_size=vocab_size,
        context_length=context_length,
        dtype=model.dtype,
        kv_layers=tuple(probe.layers.values()),
        state_layers=probe.cache.specs(),
        **own_ids(checkpoint, vocab_size),
        sampling_defaults=checkpoint.sampling_defaults,
        hidden_size=hidden_size_of(model) if gives_hidden else 0,
        quantization=weights.name,
        capturable=True,
        state_of_layers=len(layers_of(model)),
        vision=vision_spec(model.config),
    )
    model.config._attn_implementation = IMPLEMENTATION
    context = PackedContext(dtype=model.dtype, spans=probe.spans)
    bind_context(model, context)
    states = wrap_mixers(probe.cache.recurrent_layers) if spec.state_layers else None
    if part is None:
        return TransformersModel(model, spec, context, states)
    made: TransformersModel = part.model(model, spec, context, states)
    return made
