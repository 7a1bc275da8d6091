"""Quantisation methods by the name in config.json. A method is a file of its own and a line here.

The library that owns a format loads it and computes with it, through transformers' integration; four-bit weights in
groups are read here (`packed_files.py`), whichever program wrote them. A format that nothing here computes, or that
would let one request change another's tokens, is refused by name before weights are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from core.errors import ModelLoadError
from core.models.config import CheckpointConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Settings = Mapping[str, Any]
"""`quantization_config` of config.json: untrusted, so every part must be checked before use."""

DENSE = "dense"
"""The value of `quantized_weights` that asks for floats."""
INSTALL = "pip install 'slipstream[quantization]'"


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """The quantisation that `adopt` found in a loaded model."""

    name: str
    """The method and the format within it, as `GetModelInfo` shows it."""
    rounds_activations: bool = False
    """Whether activations are quantised too: a difference in a float's last bit may then change the rounded value."""


PLAIN = QuantizedWeights("")
"""Weights without quantisation."""


@dataclass(frozen=True, slots=True)
class QuantMethod:
    """How checkpoints of one method are loaded."""

    library: str
    """Python package that must be installed; empty if transformers alone is enough."""
    check: Callable[[Settings], None]
    """Raises ModelLoadError for settings that cannot be served; reads no weights."""
    adopt: Callable[[PreTrainedModel, str], QuantizedWeights]
    """Prepares the loaded model for serving; its second argument is `quantized_weights` of the configuration. Raises
    ModelLoadError if it cannot be served."""
    load_options: Callable[[], Mapping[str, Any]] = field(default=dict)
    """Arguments of `from_pretrained` beyond the usual ones."""
    auto_dtype_is_saved: bool = False
    """Whether kernels need activations of the dtype that the weights were quantised from, on every device."""


METHODS: dict[str, str] = {
    "compressed-tensors": "core.models.quantized.compressed:compressed_tensors",
    "torchao": "core.models.quantized.torchao:torchao",
    "gptq": "core.models.quantized.gptq:gptq",
    "awq": "core.models.quantized.awq:awq",
    "mxfp4": "core.models.quantized.mxfp4:mxfp4",
}
"""Name -> `module:function`, which gives a `QuantMethod` for a checkpoint; imported only when one needs it."""


def quant_method(checkpoint: CheckpointConfig) -> QuantMethod | None:
    """The method of `checkpoint`, checked; None for plain weights. Raises ModelLoadError if it cannot be served."""
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
    method: QuantMethod = getattr(import_module(module), attribute)(checkpoint)
    if method.library and find_spec(method.library) is None:
        raise ModelLoadError(f"weights quantised with {name!r} need the package {method.library}: {INSTALL}")
    method.check(settings)
    return method


def method_name(settings: Settings) -> str:
    """The name of the method. Raises ModelLoadError if `settings` give none."""
    name = settings.get("quant_method")
    if isinstance(name, str) and name:
        return name
    # The first bitsandbytes checkpoints name no method.
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return "bitsandbytes"
    raise ModelLoadError("quantization_config names no quant_method, so nobody can tell how to read the weights")
