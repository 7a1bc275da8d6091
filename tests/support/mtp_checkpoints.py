"""Tiny checkpoints with a head for multi-token prediction, laid out as published ones are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.checkpoints import make_checkpoint

LAYERS = 2
"""Layers of the model itself; the head is the next one."""


def make_mtp_checkpoint(kind: str, directory: Path, **overrides: Any) -> Path:
    """A model of `kind` with one layer more than it has, and what makes a head of that layer."""
    path = make_checkpoint(kind, directory, num_hidden_layers=LAYERS + 1, **overrides)
    weights = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config.update(num_hidden_layers=LAYERS, num_nextn_predict_layers=1)
    (path / "config.json").write_text(json.dumps(config))
    generator, width = torch.Generator().manual_seed(11), config["hidden_size"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"model.layers.{LAYERS}.{name}.weight"] = 1 + 0.1 * torch.randn(width, generator=generator)
    weights[f"model.layers.{LAYERS}.eh_proj.weight"] = 0.2 * torch.randn(width, 2 * width, generator=generator)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def leave_heads_to_themselves(kind: str, patch: Any) -> None:
    """Tell `transformers` which layer of a tiny model is the head: it knows the numbers of published ones only."""
    import transformers

    found: Any = getattr(transformers, str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]))
    patch.setattr(found, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{LAYERS}.*"])


def plain_model(path: Path) -> Any:
    """The model as `transformers` loads it."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
