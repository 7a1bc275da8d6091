"""The `ModelSpec` of a checkpoint without an engine around it: benchmarks count bytes with it."""

from __future__ import annotations

import torch

from core.config import ModelConfig
from core.models.base import ModelSpec
from core.models.loader import load_model


def measure(path: str, dtype: str = "float32") -> ModelSpec:
    """Load the checkpoint at `path` on the CPU, with its self-check, and return what it caches.

    Raises StartupError when the checkpoint cannot be served.
    """
    return load_model(ModelConfig(path, dtype=dtype), torch.device("cpu")).spec
