"""Encoders that do not use transformers' interface for attention, declared, so that their texts can be packed too.

A declaration names classes of a model's modules with what stands for their `forward` over packed texts, and which
methods of its encoder count tokens, so that they count those of a text and not of a step. Everything else of the model
stays its own. `encoder_proof` compares all of it with the model as it came, over texts of a few tokens and of hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from core.models.encoder_only.own_attention import (
    BiasedAttention,
    ConvolvedAttention,
    DisentangledAttention,
    JoinedAttention,
    PlainAttention,
    RotatedAttention,
    ScaledAttention,
)
from core.models.encoder_only.own_parts import (
    DistancesOnce,
    EachApart,
    ForwardOf,
    NormAtOnce,
    OverLongest,
    PlacesInTexts,
    ScaleAtOnce,
    Unmasked,
)
from core.models.encoder_only.packed_encoder import EncoderContext
from core.models.hf.probe import Unsupported


@dataclass(frozen=True, slots=True)
class Declaration:
    """What of one type is computed otherwise over packed texts."""

    modules: Mapping[str, type[ForwardOf]]
    """Class of modules -> what stands for their `forward`."""
    methods: Mapping[str, type[OverLongest]] = field(default_factory=dict)
    """Path from the model to what counts tokens of a row -> what stands for it."""


_DEBERTA: Final = {"encoder.get_rel_pos": OverLongest, "encoder.get_attention_mask": Unmasked}
DECLARED: Final[Mapping[str, Declaration]] = {
    "convbert": Declaration({"ConvBertSelfAttention": ConvolvedAttention}),
    "deberta": Declaration({"DisentangledSelfAttention": JoinedAttention}, _DEBERTA),
    "deberta-v2": Declaration(
        {"DisentangledSelfAttention": DisentangledAttention}, {**_DEBERTA, "encoder.conv.forward": EachApart}
    ),
    "ibert": Declaration({"IBertSelfAttention": ScaledAttention, "IntLayerNorm": NormAtOnce}),
    "megatron-bert": Declaration({"MegatronBertSelfAttention": PlainAttention}),
    "mobilebert": Declaration({"NoNorm": ScaleAtOnce}, {"embeddings.forward": EachApart}),
    "mpnet": Declaration({"MPNetSelfAttention": BiasedAttention}, {"encoder.compute_position_bias": DistancesOnce}),
    "rembert": Declaration({"RemBertSelfAttention": PlainAttention}),
    "roformer": Declaration(
        {"RoFormerSelfAttention": RotatedAttention}, {"encoder.embed_positions.forward": PlacesInTexts}
    ),
}
"""Model type -> its declaration."""


@torch.inference_mode()
def declare(base: PreTrainedModel, context: EncoderContext) -> Callable[[], None]:
    """Put what is declared for `base` in place. Returns what takes it away again. Raises Unsupported."""
    encoder: Any = base.encoder
    found = DECLARED[base.config.model_type]
    own: list[Any] = [module for module in base.modules() if type(module).__name__ in found.modules]
    if any(getattr(module, "talking_head", False) for module in own):
        raise Unsupported("has heads that see each other's scores")
    if any(getattr(module, "quant_mode", False) for module in own):
        raise Unsupported("computes in integers, whose scales are those of all texts of a call")
    placed: list[ForwardOf | OverLongest] = []
    for module in own:
        module.forward = found.modules[type(module).__name__](module, context, encoder)
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
