"""MXFP4, in which GPT-OSS is published: experts of four-bit floats, which transformers widens as it reads them.

Its kernels for packed experts are fetched from the network and route tokens by themselves, so none is used: weights in
memory are as large as if the checkpoint had never been quantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.utils.quantization_config import Mxfp4Config

from core.models.config import CheckpointConfig
from core.models.quantized.registry import QuantizedWeights, QuantMethod, Settings


def _check(settings: Settings) -> None:
    """Accept any settings: they only name the layers that are not packed."""


def _load_options() -> Mapping[str, Any]:
    return {"quantization_config": Mxfp4Config(dequantize=True)}


def _adopt(model: PreTrainedModel, held: str) -> QuantizedWeights:
    return QuantizedWeights("mxfp4, widened at load")


def mxfp4(checkpoint: CheckpointConfig) -> QuantMethod:
    """The same for all checkpoints."""
    return QuantMethod(library="", check=_check, adopt=_adopt, load_options=_load_options)
