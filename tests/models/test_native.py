"""Native decoders give the logits that transformers gives, in every kind of step, and take over while serving."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.config import ModelConfig
from core.models.loader import load_model
from core.models.native import family, weights
from core.models.native.extension import ExtensionUnavailable, load_extension
from core.models.native.family import UpgradingModel
from core.models.transformers_backend import TransformersModel
from tests.models.reference import PackedRun, PlainModel
from tests.models.test_transformers_backend import sequences, worst_error

Make = Callable[[str], Path]
CPU = torch.device("cpu")
KINDS = ("llama", "qwen2", "qwen3")


def load(path: Path, dtype: str = "float32", native: str = "wait") -> UpgradingModel:
    model = load_model(ModelConfig(str(path), dtype=dtype, native=native), CPU)
    assert isinstance(model, UpgradingModel)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(checkpoint: Make, kind: str) -> None:
    path, rows = checkpoint(kind), sequences()
    model, plain = load(path), PlainModel(path)
    assert model.native
    worst, same = worst_error(PackedRun(model, rows), {row: plain.logits(ids) for row, ids in rows.items()})
    assert worst < 1e-4
    assert same
