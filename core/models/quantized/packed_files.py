"""Checkpoints whose linear layers are packed in four bits, read without the library that wrote them.

transformers loads GPTQ and AWQ with packages that bring kernels, or not at all. Here it loads the packed tensors as
they are, into buffers of the layers that they stand for, and a format makes a `GroupedWeight` of each layer's tensors.
A layer is packed if the files say so: lists of layers in the configuration are patterns, which libraries read each in
its way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from core.errors import ModelLoadError
from core.models.config import CheckpointConfig
from core.models.quantized.grouped import GroupedWeight, keep_dense, keep_grouped
from core.models.quantized.registry import DENSE, QuantizedWeights, QuantMethod, Settings
from core.models.weights import check_weight_files

NAME = "slipstream-grouped"
"""The method under which transformers knows `GroupedQuantizer`."""
DTYPES = {"I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
"""By the names in safetensors: of the tensors that formats here have."""

Parts = Mapping[str, torch.Tensor]
"""The tensors of one layer, by the last part of their names."""


class BadPart(Exception):
    """A tensor of a layer is not what the format says: `part` is the last part of its name."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(reason)
        self.part = part


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How a format keeps a layer."""

    name: str
    """As `GetModelInfo` shows it."""
    parts: tuple[str, ...]
    """Tensors that every packed layer has, by the last part of their names; the first marks a layer as packed."""
    read: Callable[[Parts, tuple[int, int], Settings], GroupedWeight]
    """Makes a weight of (outputs, inputs) of them and of `optional` ones. Raises BadPart."""
    optional: tuple[str, ...] = ()


@register_quantization_config(NAME)
class GroupedConfig(QuantizationConfigMixin):
    """What `GroupedQuantizer` is told: (dtype, shape) of every tensor of a packed layer, by layer and last part."""

    def __init__(self, layers: Mapping[str, Mapping[str, tuple[str, list[int]]]], **_: Any) -> None:
        self.quant_method = NAME  # type: ignore[assignment]
        self.layers = layers


@register_quantizer(NAME)
class GroupedQuantizer(HfQuantizer):
    """Makes places for packed tensors, into which they are loaded as any others."""

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        layers = _by_module(self.quantization_config.layers, model)  # type: ignore[attr-defined]
        for name, module in model.named_modules():
            found = layers.get(name) if type(module) is nn.Linear else None
            if found is None:
                continue
            del module._parameters["weight"]
            module.register_parameter("weight", None)
            # Or some models would draw a weight for it, which it has not: by itself, or where they draw all of a block.
            module._is_hf_initialized = True
            if block := name.rpartition(".")[0]:
                model.get_submodule(block)._is_hf_initialized = True
            for part, (dtype, shape) in found.items():
                place = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
                if part != "bias":
                    module.register_buffer(part, place)
                elif module.bias is None:  # some writers give every layer one, of zeros
                    module.bias = nn.Parameter(place.to(model.dtype), requires_grad=False)
        return model

    def is_serializable(self) -> bool:
        """Nothing of it is saved."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Nothing of it is trained."""
        return False


def packed_method(form: PackedFormat, checkpoint: CheckpointConfig, check: Callable[[Settings], None]) -> QuantMethod:
    """How `checkpoint`, whose packed layers are all in `form`, is loaded."""
    settings = checkpoint.quantization or {}

    def load_options() -> Mapping[str, Any]:
        config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False, local_files_only=True)
        config.quantization_config = {"quant_method": NAME, "layers": packed_layers(checkpoint, form)}
        return {"config": config}

    def adopt(model: PreTrainedModel, held: str) -> QuantizedWeights:
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear and form.parts[0] in module._buffers:
                keep_grouped(module, _read(form, name, module, settings))
                if held == DENSE:
                    keep_dense(module, model.dtype)
        quantizer: Any = model.hf_quantizer
        quantizer.remove_quantization_config(model)
        return QuantizedWeights(form.name)

    return QuantMethod(library="", check=check, adopt=adopt, load_options=load_options)


def packed_layers(checkpoint: CheckpointConfig, form: PackedFormat) -> dict[str, dict[str, tuple[str, list[int]]]]:
    """(dtype, shape) of the tensors of every layer that is packed in the files, by layer and last part of their names.

    Reads headers only. Raises ModelLoadError if there is none, or for a tensor of another type than any format has.
    """
    layers: dict[str, dict[str, tuple[str, list[int]]]] = {}
    for shard in check_weight_files(checkpoint.path).shards:
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                layer, _, part = name.rpartition(".")
                if part in (*form.parts, *form.optional, "bias"):
                    found = file.get_slice(name)
                    layers.setdefault(layer, {})[part] = (found.get_dtype(), found.get_shape())
    layers = {layer: parts for layer, parts in layers.items() if form.parts[0] in parts}
    if not layers:
        raise ModelLoadError(f"{checkpoint.path} has no layer packed as {form.name}: no tensor ends in {form.parts[0]}")
    for layer, parts in layers.items():
        for part, (dtype, _) in parts.items():
            if dtype not in DTYPES:
                raise ModelLoadError(f"tensor {layer}.{part} is of {dtype}, which {form.name} does not have")
    return layers


def _by_module(layers: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """What the files have of each module of `model`, as transformers renames what it loads: models that also see have
    had their text in several places."""
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    prefix, known = model.base_model_prefix, model.state_dict()
    found = {}
    for layer, parts in layers.items():
        name, _ = rename_source_key(f"{layer}.weight", renamings, [], prefix, known)
        found[name.removesuffix(".weight")] = parts
    return found


def _read(form: PackedFormat, name: str, module: nn.Linear, settings: Settings) -> GroupedWeight:
    """What the loaded tensors of `module` stand for, which it has no more. Raises ModelLoadError."""
    wanted = (*form.parts, *form.optional)
    parts = {part: module._buffers.pop(part) for part in wanted if part in module._buffers}
    absent = [part for part in form.parts if part not in parts]
    if absent:
        raise ModelLoadError(f"tensor {name}.{absent[0]} is missing, beside {name}.{form.parts[0]}")
    held: Any = parts
    if module.in_features % 2:
        raise ModelLoadError(f"tensor {name}.{form.parts[0]} has an odd number of inputs, which is not supported")
    try:
        if module.bias is not None:
            expect({"bias": module.bias}, "bias", (module.out_features,), None)
        return form.read(held, (module.out_features, module.in_features), settings)
    except BadPart as error:
        raise ModelLoadError(f"tensor {name}.{error.part} {error}") from error


def expect(parts: Parts, part: str, shape: tuple[int, ...], dtype: torch.dtype | None = torch.int32) -> torch.Tensor:
    """The tensor `part`, of that shape, of `dtype` or, without one, of finite floats. Raises BadPart."""
    found = parts[part]
    if tuple(found.shape) != shape:
        raise BadPart(part, f"has shape {list(found.shape)}, not {list(shape)}")
    if dtype is not None and found.dtype != dtype:
        raise BadPart(part, f"is of {found.dtype}, not of {dtype}")
    if dtype is None and not (found.is_floating_point() and bool(found.isfinite().all())):
        raise BadPart(part, "is not of finite floats")
    return found


def word_nibbles(words: torch.Tensor) -> torch.Tensor:
    """uint8[R, 4 C] of nibbles in pairs from int32[R, C], whose lowest bits come first."""
    # One row turned round counts as contiguous whatever its strides are, and stays as it is.
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def nibble_values(words: torch.Tensor) -> torch.Tensor:
    """uint8[R, 8 C] of 0..15 from int32[R, C], whose lowest bits come first."""
    pairs = word_nibbles(words)
    return torch.stack([pairs & 15, pairs >> 4], dim=2).view(len(words), -1)
