"""Encoders of transformers, unmodified, over whole texts: for embeddings and labels, with no pool of keys.

What a text becomes depends on all of it, so it comes in one step, and nothing of it is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
)

from core.attention.base import AttentionBackend
from core.batch.forward_batch import ForwardBatch
from core.config import ModelConfig
from core.errors import ModelLoadError
from core.memory.companion import DeviceCompanion
from core.memory.kv_pool import KVPool
from core.models.base import NO_COMPANIONS, ModelSpec, Progress
from core.models.config import CheckpointConfig
from core.models.encoder_only.encoder_head import EncoderHead
from core.models.encoder_only.encoder_proof import compared, proved_head, proved_way
from core.models.encoder_only.reference import EncoderReference, plain_run
from core.models.encoder_only.ways import Way
from core.models.hf.label_head import modules_beside
from core.models.hf.module_tree import load_module, one_line, read_configuration
from core.models.hf.probe import Unsupported
from core.models.hf.products import Attend, Products
from core.models.hf.self_check import CheckResult
from core.models.mapped import own
from core.models.products.family import with_products

POOLER = "pooler."
"""Weights that checkpoints of encoders may lack: hidden states are made without them."""


class EncoderOnlyModel:
    """A `core.models.base.Model` that gives hidden states alone."""

    def __init__(self, whole: PreTrainedModel, spec: ModelSpec, way: Way, reference: EncoderReference) -> None:
        """`whole`: the encoder, with its head if it has one. `reference`: what it was proved by."""
        self._whole, self._spec, self._way, self._reference = whole, spec, way, reference
        self.head: EncoderHead | None = None
        """What judges texts; None for a checkpoint without labels."""
        self.products: Products | None = None

    @property
    def spec(self) -> ModelSpec:
        """Measures of the model."""
        return self._spec

    @property
    def module(self) -> PreTrainedModel:
        """The module tree."""
        return self._whole

    @property
    def way(self) -> Way:
        """How it runs over the texts of a step."""
        return self._way

    def bind(
        self, kv_pool: KVPool, attention: AttentionBackend, companions: Mapping[str, DeviceCompanion] = NO_COMPANIONS
    ) -> None:
        """Nothing is kept in any pool."""
        assert not kv_pool.layers, "the pool was built for another model"

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32[S, vocab_size] of zeros, since nothing is sampled. Sets the hidden states, if they are wanted.

        A token of type t stands in the batch as id + t * vocab_size.
        """
        assert not batch.prefix_lens_host.any() and batch.num_extend == len(batch.rows), "texts come whole"
        ids, types = batch.input_ids, None
        if self._spec.token_types > 1:
            ids, types = ids % self._spec.vocab_size, ids // self._spec.vocab_size
        lens = batch.extend_lens_host.tolist()
        if self.products is not None:
            self.products.begin(len(ids), self._way.longest_by_torch(lens))
        hidden = self._way.states(ids, batch.positions, types, lens)
        if self.products is not None:
            self.products.end()
        if batch.wants_hidden:
            batch.hidden = hidden
        return hidden.new_zeros(len(batch.last_indices), self._spec.vocab_size, dtype=torch.float32)

    def twin(self) -> EncoderOnlyModel:
        """The same over a copy of the module tree that shares all its tensors; it may run on a thread of its own."""
        tensors: Any = chain(self._whole.parameters(), self._whole.buffers())
        whole = copy.deepcopy(self._whole, {id(tensor): tensor for tensor in tensors})
        base: Any = whole.base_model
        return EncoderOnlyModel(whole, self._spec, self._way.over(base), self._reference)

    def attend_by(self, attend: Attend) -> None:
        """See `core.models.products.family.Proved`."""
        self._way.attend_by(attend)

    def check(self) -> CheckResult:
        """Run over the texts that it was proved by, and compare."""
        return compared(self._way, self._reference, self._spec.dtype)


def load_encoder_only(
    checkpoint: CheckpointConfig, config: ModelConfig, device: torch.device, progress: Progress
) -> EncoderOnlyModel:
    """Load and prove. Raises ModelLoadError, which names the model type and what is wrong, in one line."""
    kind = checkpoint.model_type
    if checkpoint.quantization is not None or config.quantization != "none":
        raise ModelLoadError(f"model type {kind!r} with quantised weights is not supported: it is an encoder")
    judges = checkpoint.labels is not None
    auto = AutoModelForSequenceClassification if judges else AutoModel
    beside = () if judges else _beside_the_encoder(checkpoint)
    whole = load_module(checkpoint, config, device, progress, auto, beside=beside)
    progress("self-check", 0.0)
    try:
        loaded = _prove(whole, checkpoint, config)
    except ModelLoadError:
        raise
    except Unsupported as error:
        raise ModelLoadError(f"model type {kind!r} is not supported: it {error}") from error
    except Exception as error:
        raise ModelLoadError(f"model type {kind!r} is not supported: {one_line(error)}") from error
    own(whole, checkpoint.path)
    progress("self-check", 1.0)
    with_products(loaded, config, progress, joins=True)
    return loaded


def _beside_the_encoder(checkpoint: CheckpointConfig) -> tuple[str, ...]:
    """What names of weights begin with that embeddings do without: the head that it was trained with, and a pooler."""
    config = read_configuration(checkpoint)
    found: Any = MODEL_FOR_MASKED_LM_MAPPING.get(type(config), None)
    return (POOLER,) if found is None else (POOLER, *modules_beside(found, config))


def _prove(whole: PreTrainedModel, checkpoint: CheckpointConfig, config: ModelConfig) -> EncoderOnlyModel:
    base: Any = whole.base_model
    table: Any = base.get_input_embeddings()
    vocab_size = min(checkpoint.vocab_size, int(table.weight.shape[0]))
    limit = checkpoint.context_length or config.context_length
    if limit is None:
        raise ModelLoadError(f"{checkpoint.path / 'config.json'} gives no context length; configure context_length")
    reference = plain_run(whole, vocab_size, labels=checkpoint.labels is not None)
    head = proved_head(whole, reference)
    way = proved_way(base, reference, limit)
    spec = _spec(checkpoint, base, reference, vocab_size, limit - way.offset)
    loaded = EncoderOnlyModel(whole, spec, way, reference)
    loaded.head = head
    return loaded


def _spec(
    checkpoint: CheckpointConfig, base: PreTrainedModel, reference: EncoderReference, vocab_size: int, length: int
) -> ModelSpec:
    return ModelSpec(
        name=checkpoint.path.resolve().name,
        architecture=checkpoint.architecture,
        vocab_size=vocab_size,
        context_length=length,
        dtype=base.dtype,
        kv_layers=(),
        hidden_size=int(reference.states[0].shape[1]),
        whole_prompts=True,
        multiplied=reference.multiplied,
        token_types=reference.token_types,
    )
