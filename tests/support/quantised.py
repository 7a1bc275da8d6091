"""Tiny checkpoints quantised as a user would: by the library that owns the format, saved with `save_pretrained`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.checkpoints import make_checkpoint

GROUP = 32
INPUT_SCALE = 0.05
"""Static scale of activations: about the largest one of these models over 127."""


def int_weights(bits: int, strategy: str) -> dict[str, Any]:
    """Arguments of a weight scheme in compressed-tensors."""
    group = {"group_size": GROUP} if strategy == "group" else {}
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, **group}


def activations(kind: str, strategy: str, dynamic: bool) -> dict[str, Any]:
    """Arguments of an eight-bit activation scheme in compressed-tensors."""
    return {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": dynamic}


FP8 = {"num_bits": 8, "type": "float", "symmetric": True}

COMPRESSED: dict[str, dict[str, Any]] = {
    "ct-w4a16": {"weights": int_weights(4, "group")},
    "ct-w8a16": {"weights": int_weights(8, "group")},
    "ct-naive": {"weights": int_weights(8, "channel"), "format": "naive-quantized"},
    "ct-w8a8": {
        "weights": int_weights(8, "channel"),
        "input_activations": activations("int", "token", True),
        "format": "int-quantized",
    },
    "ct-fp8-static": {
        "weights": {**FP8, "strategy": "tensor"},
        "input_activations": activations("float", "tensor", False),
    },
    "ct-fp8-dynamic": {
        "weights": {**FP8, "strategy": "channel"},
        "input_activations": activations("float", "token", True),
    },
}
"""Schemes of compressed-tensors, as arguments of its `QuantizationScheme`."""


def make_compressed(base: Path, directory: Path, scheme: dict[str, Any]) -> Path:
    """`base` quantised with `scheme` by compressed-tensors: all linear layers but the output matrix."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    group = QuantizationScheme(targets=["Linear"], **scheme)
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
    apply_quantization_config(model, config, show_progress=False)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            _observe(module)
    compressor = ModelCompressor.from_pretrained_model(model, scheme.get("format"))
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(str(directory))
    return with_tokenizer(base, directory)


def _observe(module: Any) -> None:
    """What a calibration would find out: scales from the largest weights, and a fixed one for activations."""
    from compressed_tensors.quantization import QuantizationStatus
    from compressed_tensors.quantization.utils import calculate_qparams

    args, weight = module.quantization_scheme.weights, module.weight.data
    if args.strategy == "group":
        grouped = weight.reshape(weight.shape[0], -1, args.group_size)
        low, high = grouped.amin(2), grouped.amax(2)
    elif args.strategy == "channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    else:
        low, high = weight.min().reshape(1), weight.max().reshape(1)
    scale, zero = calculate_qparams(low, high, args)
    module.weight_scale.data = scale.to(module.weight_scale.dtype)
    module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype)
    if hasattr(module, "input_scale"):
        module.input_scale.data.fill_(INPUT_SCALE)
    module.quantization_status = QuantizationStatus.FROZEN


def compress_experts(directory: Path, scheme: dict[str, Any]) -> Path:
    """Pack the experts of a checkpoint too, tensor by tensor, as llm-compressor leaves them: one matrix per expert."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    group = QuantizationScheme(targets=["Linear"], **scheme)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name]:
        weight = tensors.pop(name)
        grouped = weight.reshape(weight.shape[0], -1, group.weights.group_size)
        scale, zero = calculate_qparams(grouped.amin(2), grouped.amax(2), group.weights)
        packed = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, group)
        tensors |= {f"{name.removesuffix('weight')}{part}": tensor.contiguous() for part, tensor in packed.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def _torchao() -> dict[str, Callable[[], Any]]:
    from torchao import quantization as ao

    return {
        "ao-int8": ao.Int8WeightOnlyConfig,
        "ao-int8-group": lambda: ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(GROUP)),
        "ao-int8-dynamic": ao.Int8DynamicActivationInt8WeightConfig,
        "ao-fp8": ao.Float8WeightOnlyConfig,
        "ao-int4": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(GROUP)),
    }


TORCHAO = ("ao-int8", "ao-int8-group", "ao-int8-dynamic", "ao-fp8", "ao-int4")


def make_torchao(base: Path, directory: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """`base` in `dtype`, quantised with the torchao configuration `name` of `TORCHAO`."""
    from transformers import TorchAoConfig

    config = TorchAoConfig(_torchao()[name]())
    AutoModelForCausalLM.from_pretrained(base, dtype=dtype, quantization_config=config).save_pretrained(directory)
    return with_tokenizer(base, directory)


def make_torchao_from(base: Path, directory: Path, pack: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """`base` with what `pack` makes of every linear layer's weight, saved as torchao's own safetensors.

    For kinds that the library serves but refuses to quantise on the machine at hand; the settings are of another kind,
    which does not matter: what a tensor is stands beside it.
    """
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    make_torchao(base, directory, "ao-int8")
    tensors = load_file(base / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = pack(tensors[name])
    flat, metadata = flatten_tensor_state_dict(tensors)
    save_file(flat, directory / "model.safetensors", metadata={**metadata, "format": "pt"})
    return directory


def make_mxfp4(base: Path, directory: Path) -> Path:
    """`base`, a gpt_oss checkpoint, with experts in MXFP4 of random bits: no library packs them without a GPU."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(base / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, height = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, height, width // 32, 16), generator=generator)
        scales = torch.randint(122, 125, (experts, height, width // 32), generator=generator)
        tensors |= {f"{name}_blocks": blocks.to(torch.uint8), f"{name}_scales": scales.to(torch.uint8)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    return with_tokenizer(base, directory)


def make_quantised(name: str, directory: Path) -> Path:
    """A checkpoint in the format `name`, below `directory`: of `COMPRESSED`, `TORCHAO`, `ct-moe` or `mxfp4`."""
    kind = {"ct-moe": "mixtral", "mxfp4": "gpt_oss"}.get(name, "llama")
    base, made = make_checkpoint(kind, directory / "base"), directory / name
    if name == "mxfp4":
        return make_mxfp4(base, made)
    if name == "ct-moe":
        return compress_experts(make_compressed(base, made, COMPRESSED["ct-w4a16"]), COMPRESSED["ct-w4a16"])
    return make_compressed(base, made, COMPRESSED[name]) if name in COMPRESSED else make_torchao(base, made, name)


def with_tokenizer(base: Path, directory: Path) -> Path:
    """`directory`, with the tokenizer of `base` beside the weights."""
    for file in (*base.glob("tokenizer*"), *base.glob("chat_template*"), *base.glob("special_tokens*")):
        (directory / file.name).write_bytes(file.read_bytes())
    return directory
