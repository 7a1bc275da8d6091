"""Model families by name, and which family serves a model type. A native family is a new file and two lines here."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

import torch

from core.config import ModelConfig
from core.models.base import Model, Progress
from core.models.config import CheckpointConfig
from core.models.native.families import FAMILIES
from core.models.vision.families import VISION_FAMILIES

ModelFactory = Callable[[CheckpointConfig, ModelConfig, torch.device, Progress], Model]

DEFAULT_FAMILY = "transformers"
ENCODER_DECODER_FAMILY = "encoder-decoder"
ENCODER_FAMILY = "encoder-only"

MODEL_FAMILIES: dict[str, str] = {
    DEFAULT_FAMILY: "core.models.products.family:load_packed",
    "native": "core.models.native.family:load_native",
    ENCODER_FAMILY: "core.models.encoder_only.backend:load_encoder_only",
    ENCODER_DECODER_FAMILY: "core.models.encoder_decoder.backend:load_encoder_decoder",
}
"""Family -> `module:factory`, imported only when a checkpoint needs it."""

NATIVE_FAMILIES: dict[str, str] = dict.fromkeys((*FAMILIES, *VISION_FAMILIES), "native")
"""Model type -> family, for types that a family of its own serves better than the default one."""


ENCODER_DECODER_TYPES = ("bart", "mbart", "t5", "mt5", "pegasus", "marian", "plbart", "blenderbot", "blenderbot-small")
"""Encoder-decoders whose attention the packed decoder knows; `docs/reference/models.md` says how each was checked."""
SPEECH_TYPES = ("whisper",)
"""The same, whose encoders read sound."""


ENCODER_TYPES = (
    *("albert", "bert", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra"),
    *("ernie", "eurobert", "gte", "ibert", "jina_embeddings_v3", "megatron-bert", "mobilebert", "modernbert", "mpnet"),
    *("nomic_bert", "rembert", "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta", "xlm-roberta-xl"),
)
"""Encoders without a decoder, which embed and judge; as above."""


def family_of(model_type: str, text_type: str = "", *, encoder_decoder: bool = False, encoder: bool = False) -> str:
    """The family that serves `model_type`, of which `text_type` reads tokens where that is another.

    Some types come with an encoder and without, or as an encoder alone.
    """
    if encoder_decoder:
        return ENCODER_DECODER_FAMILY
    if encoder:
        return ENCODER_FAMILY
    return NATIVE_FAMILIES.get(model_type) or NATIVE_FAMILIES.get(text_type, DEFAULT_FAMILY)


def model_factory(family: str) -> ModelFactory:
    """The factory of `family`. Raises KeyError for an unregistered family, which is a bug, not a bad checkpoint."""
    module, _, attribute = MODEL_FAMILIES[family].partition(":")
    return cast(ModelFactory, getattr(import_module(module), attribute))
