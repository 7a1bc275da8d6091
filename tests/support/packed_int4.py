"""Tiny checkpoints in the four-bit formats of GPTQ, AWQ and compressed-tensors, packed number by number as the formats
are specified, beside the plain weights that they stand for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import copy
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.quantised import with_tokenizer

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs is where in a word, from the lowest bits on."""


@dataclass(frozen=True)
class Numbers:
    """What a layer was quantised to: weight[n, k] = (q[n, k] - zero[n, group[k]]) scale[n, group[k]]."""

    q: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    group: torch.Tensor

    def weight(self) -> torch.Tensor:
        """float32[N, K]."""
        return (self.q - self.zero[:, self.group]).float() * self.scale.float()[:, self.group]


def numbers(weight: torch.Tensor, size: int, draw: random.Random, symmetric: bool, ordered: bool) -> Numbers:
    """`weight` [N, K] rounded to groups of `size` inputs; not `ordered`: inputs belong to them in a drawn order."""
    inputs = weight.shape[1]
    group = torch.arange(inputs) // size
    if not ordered:
        group = group[torch.tensor(draw.sample(range(inputs), inputs))]
    count = int(group.max()) + 1
    columns = [weight[:, group == each] for each in range(count)]
    low = torch.stack([each.amin(1).clamp(max=0) for each in columns], 1)
    high = torch.stack([each.amax(1).clamp(min=0) for each in columns], 1)
    scale = (torch.maximum(-low, high) / 7 if symmetric else (high - low) / 15).half()
    zero = torch.full_like(low, 8) if symmetric else (-low / scale.float()).round().clamp(0, 15)
    q = (weight / scale.float()[:, group] + zero[:, group]).round().clamp(0, 15)
    return Numbers(q.int(), scale, zero.int(), group)


def words(values: torch.Tensor) -> torch.Tensor:
    """int32[R, C / 8]: eight numbers of 0..15 of [R, C] to a word, the first in the lowest bits; zeros fill up."""
    rows, columns = values.shape
    made = torch.zeros(rows, -(-columns // 8), dtype=torch.int64)
    for column in range(columns):
        made[:, column // 8] |= values[:, column].long() << 4 * (column % 8)
    return made.where(made < 1 << 31, made - (1 << 32)).int()


def gptq_parts(given: Numbers, less: int) -> dict[str, torch.Tensor]:
    """Zeros are kept less `less`."""
    return {
        "qweight": words(given.q).t().contiguous(),
        "qzeros": words((given.zero.t() - less) % 16),
        "scales": given.scale.t().contiguous(),
        "g_idx": given.group.int(),
    }


def awq_parts(given: Numbers) -> dict[str, torch.Tensor]:
    """The layout GEMM."""

    def shuffled(values: torch.Tensor) -> torch.Tensor:
        order = [8 * (n // 8) + AWQ_ORDER[n % 8] for n in range(values.shape[1])]
        return words(values[:, order])

    return {
        "qweight": shuffled(given.q.t()),
        "qzeros": shuffled(given.zero.t()),
        "scales": given.scale.t().contiguous(),
    }


def compressed_parts(given: Numbers, symmetric: bool, ordered: bool) -> dict[str, torch.Tensor]:
    """`pack-quantized`."""
    parts = {
        "weight_packed": words(given.q),
        "weight_scale": given.scale,
        "weight_shape": torch.tensor(given.q.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = words(given.zero.t()).t().contiguous()
    return parts if ordered else {**parts, "weight_g_idx": given.group.int()}


@dataclass(frozen=True)
class Kind:
    """A format and its options."""

    settings: Callable[[int], dict[str, Any]]
    """`quantization_config` for groups of so many inputs."""
    parts: Callable[[Numbers], dict[str, torch.Tensor]]
    symmetric: bool = False
    ordered: bool = True


def _gptq(form: str, **more: Any) -> Callable[[int], dict[str, Any]]:
    return lambda size: {"quant_method": "gptq", "bits": 4, "group_size": size, "checkpoint_format": form, **more}


def _awq(size: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}


def _compressed(symmetric: bool, **more: Any) -> Callable[[int], dict[str, Any]]:
    def settings(size: int) -> dict[str, Any]:
        weights = {
            "num_bits": 4,
            "type": "int",
            "strategy": "group",
            "group_size": size,
            "symmetric": symmetric,
            **more,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }

    return settings


KINDS: dict[str, Kind] = {
    "gptq": Kind(_gptq("gptq", sym=False), lambda given: gptq_parts(given, 1)),
    "gptq-sym": Kind(_gptq("gptq", sym=True), lambda given: gptq_parts(given, 1), symmetric=True),
    "gptq-act-order": Kind(_gptq("gptq", desc_act=True), lambda given: gptq_parts(given, 1), ordered=False),
    "gptq-v2": Kind(_gptq("gptq_v2"), lambda given: gptq_parts(given, 0)),
    "awq": Kind(_awq, awq_parts),
    "ct-sym": Kind(_compressed(True), lambda given: compressed_parts(given, True, True), symmetric=True),
    "ct-asym": Kind(_compressed(False), lambda given: compressed_parts(given, False, True)),
    "ct-act-order": Kind(
        _compressed(False, actorder="group"), lambda given: compressed_parts(given, False, False), ordered=False
    ),
}
"""By name: formats as they are met, symmetric or not, with inputs in order or not."""


TOWERS = ("vision_tower.", "visual.", "audio_tower.", "embed_vision.")
"""In names of what checkpoints have beside their text, which calibrations leave as it is."""


def make_packed(
    base: Path, directory: Path, name: str, size: int = 32, *, head: bool = False, tower: bool = False
) -> tuple[Path, Path]:
    """(packed, plain): `base` with its projections packed as `name` of KINDS, and the float weights they stand for.

    Projections of one input are drawn alike, as a calibration would sort them. `head`: the output matrix too; `tower`:
    projections of what sees and hears too.
    """
    kind, packed, plain = KINDS[name], {}, {}
    for key, tensor in load_file(base / "model.safetensors").items():
        # The pooling head of SigLIP multiplies by a matrix without calling it.
        left = (not tower and any(part in key for part in TOWERS)) or ".head.attention." in key
        below = key.endswith("_proj.weight") and not left
        if not below and not (head and key.endswith("lm_head.weight")):
            packed[key] = plain[key] = tensor
            continue
        layer = key.removesuffix(".weight")
        same_input = layer.partition("layers.")[2].partition(".")[0] + (
            "o" if "o_proj" in layer else "d" if "down" in layer else "x"
        )
        given = numbers(tensor.float(), size, random.Random(same_input), kind.symmetric, kind.ordered)
        plain[key] = given.weight()
        packed |= {f"{layer}.{part}": each.contiguous() for part, each in kind.parts(given).items()}
    settings = {"quantization_config": kind.settings(size) | ({"lm_head": True} if head else {})}
    return _saved(base, directory / name, packed, settings), _saved(base, directory / f"{name}-plain", plain, {})


def _saved(base: Path, directory: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for file in base.glob("*processor*.json"):
        copy(file, directory)
    config = json.loads((base / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **settings}))
    return with_tokenizer(base, directory)
