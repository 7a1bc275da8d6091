"""Quantisation methods by the name in config.json. A method is a file of its own and a line here.

The library that owns a format loads it and computes with it, through transformers' integration; what no library here
computes, or what would let one request change another's tokens, is refused by name before weights are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from core.errors import ModelLoadError
from core.models.config import CheckpointConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Settings = Mapping[str, Any]
"""`quantization_config` of config.json: written by strangers, so nothing about it may be taken for granted."""

INSTALL = "pip install 'slipstream[quantization]'"


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """What `adopt` found in a loaded model."""

    name: str
    """The method and the format within it, as `GetModelInfo` shows it."""
    rounds_activations: bool = False
    """Whether activations are quantised too: a float's last bit then decides about a step of the rounded value."""


PLAIN = QuantizedWeights("")
"""Weights that are just that."""


@dataclass(frozen=True, slots=True)
class QuantMethod:
    """How checkpoints of one method are loaded."""

    library: str
    """Python package that has to be installed; empty for none beyond transformers."""
    check: Callable[[Settings], None]
    """Refuses what the settings alone rule out, with ModelLoadError, in no time."""
    adopt: Callable[[PreTrainedModel, str], QuantizedWeights]
    """Makes the loaded model servable; takes `quantized_weights` of the configuration. ModelLoadError for a refusal."""
    load_options: Callable[[], Mapping[str, Any]] = field(default=dict)
    """Arguments of `from_pretrained` beyond the usual ones."""
    auto_dtype_is_saved: bool = False
    """Kernels want activations of the type that the weights were quantised from, on every device."""


METHODS: dict[str, str] = {
    "compressed-tensors": "core.models.quantized.compressed:COMPRESSED_TENSORS",
    "torchao": "core.models.quantized.torchao:TORCHAO",
    "mxfp4": "core.models.quantized.mxfp4:MXFP4",
}
"""Name -> `module:QuantMethod`, imported only when a checkpoint asks for it."""


def quant_method(checkpoint: CheckpointConfig) -> QuantMethod | None:
    """The method of `checkpoint`, checked; None for plain weights. ModelLoadError for one that cannot be served."""
    settings = checkpoint.quantization
    if settings is None:
        return None
    name = method_name(settings)
    if name not in METHODS:
        # transformers skips a method that it does not know, and would serve the packed numbers as if they were weights.
        raise ModelLoadError(
            f"weights quantised with {name!r} are not supported; quantise the original weights with one of "
            f"{', '.join(METHODS)} instead"
        )
    module, _, attribute = METHODS[name].partition(":")
    method = cast(QuantMethod, getattr(import_module(module), attribute))
    if method.library and find_spec(method.library) is None:
        raise ModelLoadError(f"weights quantised with {name!r} need the package {method.library}: {INSTALL}")
    method.check(settings)
    return method


def method_name(settings: Settings) -> str:
    """The name of the method; ModelLoadError where there is none."""
    name = settings.get("quant_method")
    if isinstance(name, str) and name:
        return name
    # The first bitsandbytes checkpoints name no method.
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return "bitsandbytes"
    raise ModelLoadError("quantization_config names no quant_method, so nobody can tell how to read the weights")
