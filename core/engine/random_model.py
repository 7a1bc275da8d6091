"""A model of a given shape with random weights, made on the device, for benchmarks that have no checkpoint."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from core.attention.torch_native import TorchNativeAttention
from core.config import ModelConfig
from core.memory.kv_pool import KVPool
from core.models.base import Model
from core.models.config import read_checkpoint_config
from core.models.fused.layers import wanted
from core.models.hf.backend import prove_module

SPREAD = 0.02
"""Standard deviation of the weights: activations stay finite, and no token wins by far."""


def random_module(shape: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A transformers model on `device`, with weights from a fixed seed.

    `shape`: fields of a configuration, its `model_type` among them.
    """
    fields = dict(shape)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device(device), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=SPREAD)
    ready: PreTrainedModel = model.eval().requires_grad_(False)
    return ready


def as_model(module: PreTrainedModel) -> Model:
    """`module` as the `Model` of an engine. Raises ModelLoadError when it fails the self-check of a checkpoint.

    On a GPU that is what `core.models.native.family.load_native` serves there, a fused decoder: what is measured is
    what is served.
    """
    config = json.loads(module.config.to_json_string(use_diff=False))
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(config))
        checkpoint = read_checkpoint_config(name)
        model = prove_module(module, checkpoint, ModelConfig(name), lambda *_: None)
    if wanted(module.device):
        from core.models.fused.upgrade import with_fused

        return with_fused(model)
    return model


def let_go(model: Model, device: torch.device) -> None:
    """Bind `model` to a pool of one page, so that it no longer holds the pools of an engine that has ended."""
    spec = model.spec
    model.bind(KVPool(spec.kv_layers, 1, 1, spec.dtype, device), TorchNativeAttention())
