"""The four-bit weights of compressed-tensors' format `pack-quantized`.

`weight_packed` int32[N, K / 8] has eight inputs to a word, `weight_scale` is [N, groups], and zeros, of asymmetric
weights, are packed along N: `weight_zero_point` int32[N / 8, groups]. Both hold numbers of -8..7 with 8 added. With
`actorder: group` inputs belong to groups in any order: `weight_g_idx` [K].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open

from core.models.config import CheckpointConfig
from core.models.quantized.grouped import GroupedWeight, contiguous_groups
from core.models.quantized.packed_files import BadPart, PackedFormat, Parts, expect, nibble_values, word_nibbles
from core.models.quantized.registry import Settings
from core.models.weights import check_weight_files

EXPERTS = ".experts."
"""In names of tensors that transformers gathers into one parameter, which no layer here keeps."""

SORTED = ("group", "dynamic", True)
"""Values of `actorder` with which inputs belong to groups in any order; with the others they are as they come."""


def is_int4(settings: Settings) -> bool:
    """Whether all that is quantised are weights of four bits, in groups or whole outputs, packed."""
    groups = settings.get("config_groups")
    return isinstance(groups, Mapping) and len(groups) > 0 and all(_is_int4(g, settings) for g in groups.values())


def _is_int4(group: Any, settings: Settings) -> bool:
    if not isinstance(group, Mapping) or group.get("input_activations") or group.get("output_activations"):
        return False
    weights, form = group.get("weights"), group.get("format") or settings.get("format")
    if not isinstance(weights, Mapping) or form != "pack-quantized":
        return False
    return (weights.get("num_bits"), weights.get("type")) == (4, "int") and weights.get("strategy") in (
        "group",
        "channel",
    )


def has_experts(checkpoint: CheckpointConfig) -> bool:
    """Whether experts are packed too. Reads headers only."""
    for shard in check_weight_files(checkpoint.path).shards:
        with safe_open(shard, "pt") as file:
            if any(EXPERTS in name and name.endswith(".weight_packed") for name in file.keys()):  # noqa: SIM118
                return True
    return False


def _read(parts: Parts, shape: tuple[int, int], settings: Settings) -> GroupedWeight:
    outputs, inputs = shape
    if parts["weight_shape"].tolist() != [outputs, inputs]:
        raise BadPart("weight_shape", f"is {parts['weight_shape'].tolist()}, and the layer is {[outputs, inputs]}")
    words = expect(parts, "weight_packed", (outputs, -(-inputs // 8)))
    size, scheme = _scheme(parts["weight_scale"], inputs, settings)
    groups = -(-inputs // size)
    scale = expect(parts, "weight_scale", (outputs, groups), None)
    _check_optional(parts, scheme, groups)
    zero = None
    if "weight_zero_point" in parts:
        packed = expect(parts, "weight_zero_point", (-(-outputs // 8), groups))
        zero = nibble_values(packed.t())[:, :outputs].t().contiguous().to(torch.int8)
    weight = GroupedWeight(word_nibbles(words)[:, : inputs // 2].contiguous(), scale, zero, size)
    if "weight_g_idx" not in parts:
        return weight
    group_of = expect(parts, "weight_g_idx", (inputs,), parts["weight_g_idx"].dtype)
    try:
        return contiguous_groups(weight, group_of)
    except ValueError as error:
        raise BadPart("weight_g_idx", f"cannot be served: {error}") from error


def _check_optional(parts: Parts, scheme: Mapping[str, Any], groups: int) -> None:
    """Raise BadPart for a tensor that only some schemes have, and `scheme` does: there is no number to put for it."""
    if scheme.get("symmetric") is False and "weight_zero_point" not in parts:
        raise BadPart("weight_zero_point", "is missing, and the configuration has symmetric: false")
    if scheme.get("actorder") in SORTED and groups > 1 and "weight_g_idx" not in parts:
        raise BadPart("weight_g_idx", f"is missing, and the configuration has actorder {scheme['actorder']!r}")


def _scheme(scale: torch.Tensor, inputs: int, settings: Settings) -> tuple[int, Mapping[str, Any]]:
    """Inputs of a group, and `weights`, of the first `config_groups` entry that fits the number of scales."""
    for group in settings["config_groups"].values():
        weights: Mapping[str, Any] = group["weights"]
        size = weights.get("group_size")
        size = inputs if not isinstance(size, int) or size <= 0 else size
        if scale.dim() == 2 and scale.shape[1] == -(-inputs // size):
            return size, weights
    raise BadPart("weight_scale", f"has shape {list(scale.shape)}, which fits no group_size of the configuration")


COMPRESSED_INT4 = PackedFormat(
    name="compressed-tensors pack-quantized",
    parts=("weight_packed", "weight_scale", "weight_shape"),
    optional=("weight_zero_point", "weight_g_idx"),
    read=_read,
)
