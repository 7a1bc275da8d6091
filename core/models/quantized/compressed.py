"""compressed-tensors: int and float weights with scales beside them, as llm-compressor writes them.

Since its version 0.15 the library decompresses the whole model in its first forward pass, which gives back all the
memory that the checkpoint saved. Here a linear layer keeps its packed tensors and calls the library's decompressor each
time it runs, unless dense weights are asked for: the numbers are the same, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from transformers import PreTrainedModel

from core.errors import ModelLoadError
from core.models.config import CheckpointConfig
from core.models.quantized.compressed_int4 import COMPRESSED_INT4, has_experts, is_int4
from core.models.quantized.packed_files import packed_method
from core.models.quantized.registry import DENSE, QuantizedWeights, QuantMethod, Settings

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
)
UNSERVED = {
    "kv_cache_scheme": "a quantised KV cache",
    "transform_config": "rotated weights (transforms)",
    "sparsity_config": "sparse weights",
}
"""What a configuration may ask for beside quantised linear layers. transformers 5.23 drops the last two in silence."""
PER_TOKEN = ("token", "group", "tensor_group")
"""Ways to scale activations in which no other token of the batch has a part."""


class PackedLinear:
    """Replaces `forward` of one linear layer, and keeps its weight packed."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        scheme: Any = linear.quantization_scheme
        self._linear = linear
        self._scheme = scheme
        self._decompress = _compressor(linear).decompress
        self._quantize: Any = import_module("compressed_tensors.quantization.lifecycle.forward").forward_quantize
        shape = getattr(linear, "weight_shape", None)
        # Kept on the host, where reading it does not wait for a device.
        self._host = {} if shape is None else {"weight_shape": shape.detach().to("cpu", torch.int64)}

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """[..., out] from [..., in]."""
        linear, scheme = self._linear, self._scheme
        held = {**linear._parameters, **linear._buffers, **self._host}
        weight = self._decompress(held, scheme)["weight"]
        if scheme.input_activations is not None:
            input = self._quantize(linear, input, "input", scheme.input_activations)
        output = torch.nn.functional.linear(input, weight, linear.bias)
        if scheme.output_activations is not None:
            output = self._quantize(linear, output, "output", scheme.output_activations)
        return output


def _check(settings: Settings) -> None:
    for key, noun in UNSERVED.items():
        if settings.get(key):
            raise ModelLoadError(f"compressed-tensors checkpoints with {noun} ({key}) are not supported")
    for kind in (settings.get("format"), *(group.get("format") for group in _groups(settings))):
        if kind is not None and kind not in FORMATS:
            raise ModelLoadError(
                f"compressed-tensors format {kind!r} is not supported; supported are {', '.join(FORMATS)}"
            )
    for group in _groups(settings):
        for part in ("input_activations", "output_activations"):
            _check_activations(group.get(part))
        if not is_int4(settings):
            _check_weights(group.get("weights"), group.get("format") or settings.get("format"))


def _check_weights(scheme: Any, kind: Any) -> None:
    if isinstance(scheme, Mapping) and scheme.get("symmetric") is False and kind == "pack-quantized":
        # The zero points are packed in the file, and the place that the library 0.20 makes for them is not.
        raise ModelLoadError(
            "compressed-tensors format 'pack-quantized' with zero points (asymmetric) is supported with 4 bits and no "
            "quantised activations only"
        )


def _check_activations(scheme: Any) -> None:
    if isinstance(scheme, Mapping) and scheme.get("dynamic") and scheme.get("strategy") not in PER_TOKEN:
        raise ModelLoadError(
            f"activations quantised with one dynamic scale per {scheme.get('strategy')} are not supported: requests "
            f"that share a step would change each other's tokens; scales per token or static ones are"
        )


def _groups(settings: Settings) -> Iterator[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            yield group


def _adopt(model: PreTrainedModel, held: str) -> QuantizedWeights:
    compressors: Any = import_module("compressed_tensors.compressors")
    quantizer: Any = model.hf_quantizer
    quantizer.compressor.remove_decompression_hook(model)
    formats, rounds = set(), False
    for module in model.modules():
        scheme: Any = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        rounds = rounds or scheme.input_activations is not None or scheme.output_activations is not None
        if module.quantization_status != "compressed" or scheme.weights is None:
            continue
        formats.add(str(scheme.format.value))
        if type(module) is torch.nn.Linear and held != DENSE:
            module.forward = PackedLinear(module)  # type: ignore[method-assign]
        else:
            compressors.decompress_module(module)
    return QuantizedWeights(" ".join(["compressed-tensors", *sorted(formats)]), rounds)


def _compressor(module: torch.nn.Module) -> Any:
    scheme: Any = module.quantization_scheme
    return import_module("compressed_tensors.compressors").BaseCompressor.get_value_from_registry(scheme.format.value)


def compressed_tensors(checkpoint: CheckpointConfig) -> QuantMethod:
    """Four-bit weights of linear layers are read here; all else, experts among it, is the library's."""
    if is_int4(checkpoint.quantization or {}) and not has_experts(checkpoint):
        return packed_method(COMPRESSED_INT4, checkpoint, _check)
    return QuantMethod(library="compressed_tensors", check=_check, adopt=_adopt)
