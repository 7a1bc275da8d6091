"""A checkpoint of a given shape with seeded random weights and the bundled tokenizer, for benchmarks that load one."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from core.engine.random_model import random_module
from core.models.bundled import bundled_model_dir


def save_random_checkpoint(shape: Mapping[str, Any], dtype: torch.dtype, directory: Path) -> PreTrainedModel:
    """Write a checkpoint into `directory`, made if need be; `shape` as for `random_module`. Returns the model."""
    logging.disable_progress_bar()
    weights = shutil.ignore_patterns("*.safetensors", "config.json")
    shutil.copytree(bundled_model_dir(), directory, ignore=weights, dirs_exist_ok=True)
    model = random_module(shape, dtype, torch.device("cpu"))
    model.save_pretrained(directory)
    return model
