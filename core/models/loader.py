"""Loads a checkpoint and proves that it can be served. Errors say in one line what is wrong with the checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from core.config import ModelConfig
from core.errors import ModelLoadError
from core.models.base import LabelHead, Model, Progress
from core.models.config import CheckpointConfig, read_checkpoint_config
from core.models.experts.exchange import Exchange
from core.models.fused.layers import wanted as fuses
from core.models.quantized.at_load import refuse_at_load
from core.models.quantized.registry import quant_method
from core.models.registry import (
    DEFAULT_FAMILY,
    ENCODER_DECODER_TYPES,
    ENCODER_TYPES,
    SPEECH_TYPES,
    family_of,
    model_factory,
)
from core.models.stages.ring import Ring
from core.models.vision.families import VISION_FAMILIES
from core.models.weights import check_weight_files

logger = logging.getLogger(__name__)


def check_checkpoint(directory: str | Path) -> CheckpointConfig:
    """Check configuration, model type and whole files without reading weights, in well under a second.

    Raises ModelLoadError. A checkpoint that passes may still be refused by `load_model`, which runs the model.
    """
    checkpoint = read_checkpoint_config(directory)
    _refuse_by_type(checkpoint)
    quant_method(checkpoint)
    check_weight_files(checkpoint.path)
    return checkpoint


def load_model(
    config: ModelConfig,
    device: torch.device,
    progress: Progress | None = None,
    *,
    keeps_modules: bool = False,
    ring: Ring | None = None,
    exchange: Exchange | None = None,
) -> Model:
    """Check, load and prove the checkpoint at `config.path`; `progress` sees "check", "weights" and "self-check".

    `keeps_modules`: the model must go on through the module tree of transformers: adapters hook it, heads belong to it.
    `ring`: the ranks that have the other layers; None where this process has all of them. `exchange`: the engines that
    have the other experts.
    Call `bind` on the returned model before `forward`. Raises ModelLoadError.
    """
    report = progress or _silent
    report("check", 0.0)
    checkpoint = check_checkpoint(config.path)
    limit, wanted = checkpoint.context_length, config.context_length
    if limit is not None and wanted is not None and wanted > limit:
        raise ModelLoadError(f"context_length {wanted} is more than the {limit} tokens that {checkpoint.path} supports")
    encoder_decoder = _is_encoder_decoder(checkpoint)
    refuse_at_load(checkpoint, config.quantization, encoder_decoder=encoder_decoder)
    report("check", 1.0)
    shared = config.is_shared
    if shared:
        _refuse_to_share(checkpoint, config.shared_by)
    if ring is not None:
        from core.models.stages.staged_model import load_staged

        return load_staged(checkpoint, config, device, report, ring)
    if exchange is not None:
        from core.models.experts.joint_model import load_joint

        return load_joint(checkpoint, config, device, report, exchange)
    kept = shared or (keeps_modules and not encoder_decoder and not is_encoder(checkpoint))
    types = checkpoint.model_type, checkpoint.text_type
    family = family_of(*types, encoder_decoder=encoder_decoder, encoder=is_encoder(checkpoint))
    if fuses(device) and family == DEFAULT_FAMILY:
        logger.info("no fused decoder: no native family is declared for %r", checkpoint.model_type)
    elif fuses(device) and kept and not shared:
        logger.info("no fused decoder: adapters, or heads of the checkpoint, hook the layers of transformers")
    family = DEFAULT_FAMILY if kept else family
    return model_factory(family)(checkpoint, config, device, report)


def check_parts(config: ModelConfig) -> None:
    """Check, before other processes are started, that they can share the checkpoint: by its files, without weights.

    Raises ModelLoadError, as `load_model` would.
    """
    if not config.is_shared:
        return
    from core.models.experts.joint_model import refuse_by_experts
    from core.models.hf.module_tree import read_configuration
    from core.models.hf.shards import check_heads
    from core.models.stages.stage import check_layers

    checkpoint = check_checkpoint(config.path)
    _refuse_to_share(checkpoint, config.shared_by)
    hf_config = read_configuration(checkpoint)
    check_heads(hf_config, config.tensor_parallel)
    check_layers(hf_config, config.pipeline_parallel)
    if config.peers is not None:
        refuse_by_experts(hf_config, config.peers.size)


def _refuse_to_share(checkpoint: CheckpointConfig, shared_by: str) -> None:
    """Raises ModelLoadError for what ranks cannot do yet of what the checkpoint does."""
    why = ""
    if _is_encoder_decoder(checkpoint) or is_encoder(checkpoint):
        why = "encodes"
    elif checkpoint.model_type in VISION_FAMILIES and not _has_text_class(checkpoint):
        why = "reads images"
    elif checkpoint.labels is not None:
        why = "has a head that judges"
    if why:
        raise ModelLoadError(f"{shared_by} is not possible with {checkpoint.model_type!r} yet: it {why}")


def load_head(config: ModelConfig, model: Model, device: torch.device) -> LabelHead | None:
    """What judges texts on top of `model`, which `load_model` has made of `config`; None if its checkpoint has nothing.

    Raises ModelLoadError.
    """
    checkpoint = read_checkpoint_config(config.path)
    if checkpoint.labels is None:
        return None
    own: LabelHead | None = getattr(model, "head", None)
    if own is not None:
        return own
    from core.models.hf import label_head
    from core.models.hf.module_tree import read_configuration

    return label_head.load_head(checkpoint, read_configuration(checkpoint), model.spec, device)


def served_by(model: Model) -> str:
    """What computes the steps of a model that `load_model` has made, in a few words."""
    from core.models.native.family import UpgradingModel

    if isinstance(model, UpgradingModel) and model.native:
        return "compiled code"
    if type(model).__name__ == "FusedDecoder":
        return "a fused decoder"
    if model.spec.whole_prompts:
        return "the modules of transformers, over packed texts"
    if model.spec.encoder is not None:
        return "the modules of transformers, encoder and decoder"
    products = getattr(model, "products", None)
    return "the modules of transformers" + (", with compiled products" if products is not None else "")


def _is_encoder_decoder(checkpoint: CheckpointConfig) -> bool:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    kind = checkpoint.model_type
    only = kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return checkpoint.is_encoder_decoder or only


def _has_text_class(checkpoint: CheckpointConfig) -> bool:
    """Whether transformers has a class for what reads tokens in it, and not for all of it alone."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    whole, text = (
        names.get(checkpoint.model_type)
        for names in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    )
    return text is not None and text != whole


def is_encoder(checkpoint: CheckpointConfig) -> bool:
    """Whether every token sees the whole text: the model embeds and judges, and writes nothing."""
    return checkpoint.sees_both_ways or (checkpoint.model_type in ENCODER_TYPES and not checkpoint.is_decoder)


def _refuse_by_type(checkpoint: CheckpointConfig) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    )

    kind = checkpoint.model_type
    if kind not in CONFIG_MAPPING:
        raise ModelLoadError(f"model type {kind!r} is unknown to transformers, and code from checkpoints is never run")
    if kind in SPEECH_TYPES:
        return
    if kind in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES:
        served = ", ".join(SPEECH_TYPES)
        raise ModelLoadError(f"model type {kind!r} is not supported: its encoder reads audio, as that of {served} does")
    if _is_encoder_decoder(checkpoint):
        if checkpoint.labels is not None:
            raise ModelLoadError(f"model type {kind!r} is not supported with labels: it is an encoder-decoder")
        if kind not in ENCODER_DECODER_TYPES:
            served = ", ".join(ENCODER_DECODER_TYPES)
            raise ModelLoadError(
                f"model type {kind!r} is not supported: it is an encoder-decoder, of which these are served: {served}"
            )
    elif is_encoder(checkpoint):
        return
    elif kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        served = ", ".join(ENCODER_TYPES)
        raise ModelLoadError(f"model type {kind!r} is not supported: it is an encoder, of which these are: {served}")
    elif kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise ModelLoadError(f"model type {kind!r} is not supported: transformers has no causal language model for it")


def _silent(stage: str, fraction: float) -> None:
    """Ignore progress: the caller gave no `progress`."""
