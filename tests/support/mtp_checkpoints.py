"""Tiny checkpoints with heads for multi-token prediction, laid out as published ones are."""

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
"""Layers of the model itself; the heads are the next ones."""
STRIDE = 5
"""Of a model that `teach` has made, each token is followed by the one that is so many further."""


def make_mtp_checkpoint(kind: str, directory: Path, heads: int = 1, **overrides: Any) -> Path:
    """A model of `kind` with as many layers more as there are `heads`, and what makes a head of each of them."""
    path = make_checkpoint(kind, directory, num_hidden_layers=LAYERS + heads, **overrides)
    weights = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config.update(num_hidden_layers=LAYERS, num_nextn_predict_layers=heads)
    (path / "config.json").write_text(json.dumps(config))
    generator, width = torch.Generator().manual_seed(11), config["hidden_size"]
    for layer in range(LAYERS, LAYERS + heads):
        for name in NORMS:
            weights[f"model.layers.{layer}.{name}.weight"] = 1 + 0.1 * torch.randn(width, generator=generator)
        weights[f"model.layers.{layer}.eh_proj.weight"] = 0.2 * torch.randn(width, 2 * width, generator=generator)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


NORMS = ("enorm", "hnorm", "shared_head.norm")


def teach(path: Path, token: float, state: float, rest: float) -> None:
    """Make the model at `path` say a rule, see `STRIDE`, and its heads as well.

    A head goes by its token, with the weight `token`, and by the state that it reads, with the weight `state`: with one
    of these 1 and the other 0 it is right as long as that one is the right one. `rest`: how much of their random
    weights layers and heads keep. With 0 nothing else counts; with more heads are right now and then, and what they say
    depends on all places before.
    """
    weights = load_file(path / "model.safetensors")
    vocab, width = weights["model.embed_tokens.weight"].shape
    assert vocab <= width, "each token has a direction of its own"
    ids = torch.arange(vocab)
    after = torch.zeros(width, width)
    after[(ids + STRIDE) % vocab, ids] = 1
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weights[name] = rest * weight
        elif "norm" in name and "layernorm" not in name:
            weights[name] = torch.ones_like(weight)
        elif "eh_proj" in name:
            weights[name] = torch.cat([token * torch.eye(width), state * after], 1) + rest * weight
    # Of length 8 in 64 dimensions, which norms leave as they are.
    weights["model.embed_tokens.weight"] = width**0.5 * torch.eye(vocab, width)
    weights["lm_head.weight"] = 4 * width**-0.5 * after[:vocab].contiguous()
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def leave_heads_to_themselves(kind: str, patch: Any) -> None:
    """Tell `transformers` which layers of a tiny model are heads: it knows the numbers of published ones only."""
    import transformers

    found: Any = getattr(transformers, str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]))
    patch.setattr(found, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{LAYERS + k}\..*" for k in range(4)])


def plain_model(path: Path) -> Any:
    """The model as `transformers` loads it."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
