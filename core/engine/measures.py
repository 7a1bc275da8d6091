"""The measures of a checkpoint without an engine around it: what benchmarks count bytes by."""

from __future__ import annotations

import torch

from core.config import ModelConfig
from core.models.base import ModelSpec
from core.models.loader import load_model


def measure(path: str, dtype: str = "float32") -> ModelSpec:
    """Load the checkpoint on the CPU, with its self-check, and say what it caches. Raises StartupError."""
    return load_model(ModelConfig(path, dtype=dtype), torch.device("cpu")).spec
