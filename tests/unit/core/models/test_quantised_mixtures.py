"""Mixtures whose linear layers are quantised at load: native code takes these, and leaves experts as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.config import ModelConfig
from core.errors import ModelLoadError
from core.models.loader import load_model
from core.models.native.family import UpgradingModel
from tests.support.fakes.paged_steps import Part
from tests.support.native_cases import checkpoint_of
from tests.unit.core.models.reference import CPU, PackedRun

PROMPTS = {1: list(range(3, 40)), 2: [5, 9, 5], 3: [7]}


def said(path: Path, quantization: str, native: str) -> torch.Tensor:
    """Logits behind each prompt, all of them in one step."""
    try:
        model = load_model(ModelConfig(str(path), dtype="float32", quantization=quantization, native=native), CPU)
    except ModelLoadError as refusal:
        pytest.fail(str(refusal))
    if native == "wait":
        assert isinstance(model, UpgradingModel) and model.native, "transformers goes on computing it"
    run = PackedRun(model, PROMPTS, max_len=48)
    return run.step([Part(row, 0, len(ids)) for row, ids in PROMPTS.items()], len(PROMPTS)).clone()


@pytest.mark.usefixtures("native_code")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(
    "case", ["qwen2_moe", "granitemoeshared", "deepseek_v3", "mamba", "jamba", "gemma4_text, experts"]
)
def test_native_code_computes_what_transformers_does(case: str, quantization: str, tmp_path: Path) -> None:
    """One has a gate for the expert of all tokens, a matrix of one row; one a linear router; one attends to latents.

    Mamba-1 reads the weight of a linear layer and does not call it.
    """
    path = checkpoint_of(case, tmp_path)
    want = said(path, quantization, "off")
    # Of the largest logit: products of four-bit weights are differences of greater sums.
    atol = 1e-4 * float(want.abs().max())
    torch.testing.assert_close(said(path, quantization, "wait"), want, atol=atol, rtol=0)
