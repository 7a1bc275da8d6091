"""What a PEFT adapter says of itself: adapter_config.json, validated; what we cannot compute is refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import ModelLoadError
from core.models.config import read_json
from core.models.lora.patterns import compiled, ends_with, pattern_value

CONFIG_FILE = "adapter_config.json"
ALL_LINEAR = "all-linear"
MAX_ALPHA = 1 << 20
MAX_CONFIG_BYTES = 1 << 20
MAX_NAMES = 4096
MAX_PATTERNS = 1024
"""Each is tried on every module of the base while other requests stream."""

REFUSED: dict[str, str] = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules saved beside the adapter",
    "trainable_token_indices": "trained token embeddings",
    "target_parameters": "adapters over parameters that are no linear layer",
    "layer_replication": "replicated layers",
    "lora_bias": "a bias in the adapter",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "megatron_config": "Megatron layers",
    "fan_in_fan_out": "transposed weights",
}
"""Fields that change the computation. An adapter that sets any of them is refused."""

_LAYER = re.compile(r"^[^.]*(?:\.[^.]*)*?\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The parts of adapter_config.json that the computation depends on."""

    r: int
    alpha: int
    rslora: bool
    targets: tuple[str, ...] | re.Pattern[str] | None
    """Suffixes of module names, an expression for whole names, or None for every linear layer but the output."""
    excluded: tuple[str, ...]
    layers: frozenset[int] | None
    rank_pattern: Mapping[re.Pattern[str], int]
    alpha_pattern: Mapping[re.Pattern[str], int]

    def targets_module(self, name: str) -> bool:
        """Whether the adapter names module `name`; `all-linear` names all, and the caller knows which are linear."""
        if ends_with(name, self.excluded):
            return False
        if self.targets is None:
            return True
        if isinstance(self.targets, re.Pattern):
            return self.targets.fullmatch(name) is not None
        if name in self.targets:
            return True
        return ends_with(name, self.targets) and self._in_layers(name)

    def _in_layers(self, name: str) -> bool:
        if self.layers is None:
            return True
        found = _LAYER.match(name)
        return found is not None and int(found[1]) in self.layers

    def rank(self, name: str) -> int:
        """Rank of the adapter at module `name`."""
        return pattern_value(self.rank_pattern, name, self.r)

    def scaling(self, name: str) -> float:
        """Factor of the delta at module `name`: alpha / r, or alpha / sqrt(r) with rank-stabilised LoRA."""
        rank, alpha = self.rank(name), pattern_value(self.alpha_pattern, name, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def read_adapter_config(directory: Path, max_rank: int) -> AdapterConfig:
    """Read and validate. Raises ModelLoadError, which says in one line, without a path, what is wrong."""
    file = directory / CONFIG_FILE
    if not file.is_file():
        raise ModelLoadError(f"it has no {CONFIG_FILE}, so it is no PEFT adapter")
    found = _read(file)
    if found.get("peft_type") != "LORA":
        raise ModelLoadError(f"peft_type {found.get('peft_type')!r} is not supported; only LORA is")
    for field, what in REFUSED.items():
        if found.get(field):
            raise ModelLoadError(f"{field} is not supported: {what}")
    if found.get("bias", "none") != "none":
        raise ModelLoadError(f"bias {found['bias']!r} is not supported; only 'none' is")
    if found.get("layers_pattern"):
        raise ModelLoadError("layers_pattern is not supported")
    config = AdapterConfig(
        r=_whole(found.get("r", 8), "r", max_rank),
        alpha=_whole(found.get("lora_alpha", 8), "lora_alpha", MAX_ALPHA),
        rslora=found.get("use_rslora") is True,
        targets=_targets(found.get("target_modules")),
        excluded=_names(found.get("exclude_modules") or [], "exclude_modules"),
        layers=_layers(found.get("layers_to_transform")),
        rank_pattern=_patterns(found.get("rank_pattern"), "rank_pattern", max_rank),
        alpha_pattern=_patterns(found.get("alpha_pattern"), "alpha_pattern", MAX_ALPHA),
    )
    if config.layers is not None and not isinstance(config.targets, tuple):
        raise ModelLoadError("layers_to_transform needs target_modules to be a list of names")
    return config


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelLoadError(f"{CONFIG_FILE} is larger than {MAX_CONFIG_BYTES >> 20} MiB")
        return read_json(file)
    except (ModelLoadError, OSError) as error:
        told = error.message.replace(str(file), CONFIG_FILE) if isinstance(error, ModelLoadError) else ""
        raise ModelLoadError(told or f"{CONFIG_FILE} cannot be read") from error


def _targets(value: Any) -> tuple[str, ...] | re.Pattern[str] | None:
    if isinstance(value, str):
        return None if value.lower() == ALL_LINEAR else compiled(value, "target_modules")
    names = _names(value, "target_modules")
    if not names:
        raise ModelLoadError("target_modules is empty")
    return names


def _names(value: Any, field: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise ModelLoadError(f"{field} must be a list of module names")
    if len(value) > MAX_NAMES:
        raise ModelLoadError(f"{field} names {len(value)} modules, at most {MAX_NAMES} are read")
    return tuple(value)


def _layers(value: Any) -> frozenset[int] | None:
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in values):
        raise ModelLoadError("layers_to_transform must be layer numbers")
    return frozenset(values) or None


def _patterns(value: Any, field: str, limit: int) -> dict[re.Pattern[str], int]:
    if not isinstance(value or {}, dict):
        raise ModelLoadError(f"{field} must be an object")
    if len(value or {}) > MAX_PATTERNS:
        raise ModelLoadError(f"{field} has {len(value)} patterns, at most {MAX_PATTERNS} are read")
    return {compiled(key, field): _whole(number, field, limit) for key, number in (value or {}).items()}


def _whole(value: Any, field: str, limit: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise ModelLoadError(f"{field} must be a whole number from 1 to {limit}; got {str(value)[:40]!r}")
    return value
