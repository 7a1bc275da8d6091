"""Weights in eight-bit floats: the numbers that are kept, what is computed with them, and that tokens stay apart."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core.config import ModelConfig
from core.errors import ModelLoadError
from core.models.loader import load_model
from core.models.native.family import UpgradingModel
from core.models.quantized import at_load
from core.models.quantized.fp8 import FP8, LARGEST, keep_fp8, multiply, round_rows, why_no_fp8
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.fakes.paged_steps import Part
from tests.unit.core.models.reference import CPU, PackedRun, PlainModel


def randn(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e4])
def test_rounding_is_off_by_half_a_step_at_most(scale: float) -> None:
    """Of three digits behind the point, or near zero of a 512th of the scale."""
    rows = randn(7, 300, scale=scale)
    rows[3] = 0.0
    values, scales = round_rows(rows)
    assert (values.dtype, scales.shape) == (FP8, (7, 1))
    off = (values.float() * scales - rows).abs()
    assert bool((off <= torch.maximum(rows.abs() / 16, scales / 1024) * 1.001).all())
    assert (values.float().abs().amax(1)[[0, 1, 2, 4, 5, 6]] == LARGEST).all(), "the range is used to its end"


@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_the_rounded_numbers(bias: bool) -> None:
    x, (weight, scale) = randn(5, 48), round_rows(randn(32, 48, seed=1))
    added = randn(32, seed=2) if bias else None
    (values, by_token), wide = round_rows(x), weight.float() * scale
    expected = nn.functional.linear(values.float() * by_token, wide, added)
    torch.testing.assert_close(multiply(x, weight, scale, added), expected, atol=1e-5, rtol=1e-5)


def test_a_token_is_rounded_by_itself() -> None:
    """Whatever requests share its step."""
    x, (weight, scale) = randn(6, 32), round_rows(randn(16, 32, seed=1))
    x[4] *= 1e6
    alone = torch.cat([multiply(x[i : i + 1], weight, scale, None) for i in range(6)])
    torch.testing.assert_close(multiply(x, weight, scale, None), alone, atol=0, rtol=1e-6)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_no_number_fails_its_own_token_and_no_other(odd: float) -> None:
    x, (weight, scale) = randn(3, 32), round_rows(randn(16, 32, seed=1))
    x[1, 7] = odd
    found = multiply(x, weight, scale, None)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


def test_a_weight_that_is_no_number_is_named() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with torch.no_grad():
        model[1].weight[3, 3] = float("nan")
    with pytest.raises(ModelLoadError, match=r"^1 has weights that are not finite"):
        keep_fp8(model, ())


def test_layers_of_odd_sizes_and_those_named_stay_whole(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 16), nn.Linear(16, 32))
    with caplog.at_level(logging.INFO):
        keep_fp8(model, {model[2]})
    assert [each.weight.numel() > 0 for each in model] == [True, True, True, False]
    assert [record.getMessage()[0] for record in caplog.records] == ["0", "1"]


def test_a_model_is_quantised_at_load_and_half_of_its_bytes_stay(tmp_path: Path) -> None:
    """The output matrix too; embeddings, which are looked up, stay as they are."""
    directory = make_checkpoint("llama", tmp_path, seed=0, hidden_size=64, intermediate_size=96, vocab_size=VOCAB_SIZE)
    model: Any = load_model(ModelConfig(str(directory), dtype="bfloat16", quantization="fp8"), CPU)
    assert not isinstance(model, UpgradingModel), "native code does not compute such weights"
    assert model.spec.quantization == "fp8 (e4m3), scales by output and token"
    for name, module in model.module.named_modules():
        if name.endswith("_proj"):
            held = sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
            assert held == module.in_features * module.out_features + 4 * module.out_features
    ids = [random.Random(0).randrange(3, VOCAB_SIZE) for _ in range(20)]
    run = PackedRun(model, {1: ids})
    run.step([Part(1, 0, 13)], 1)
    found, plain = run.step([Part(1, 13, 7)], 1)[-1], PlainModel(directory).logits(ids)[-1]
    off = float((found - plain).abs().max() / plain.abs().max())
    assert 1e-3 < off < 0.15, off


class Ada:
    """A device that PyTorch says this of."""

    type = "cuda"


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ((8, 0), torch.bfloat16, "compute capability 8.9 or newer, and this one has 8.0"),
        ((8, 9), torch.float32, "dtype bfloat16, not float32"),
        ((8, 9), torch.bfloat16, None),
        ((9, 0), torch.bfloat16, None),
    ],
)
def test_gpus_without_such_numbers_are_told(
    capability: tuple[int, int], dtype: torch.dtype, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device: Any = Ada()
    found = why_no_fp8(device, dtype)
    assert found is None if reason is None else found is not None and reason in found
    assert why_no_fp8(CPU, dtype) is None


def test_what_expands_latents_stays_whole(tmp_path: Path) -> None:
    """Keys and values would be kept expanded otherwise."""
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "hidden_size": 64, "intermediate_size": 64}
    directory = make_checkpoint("deepseek_v3", tmp_path, seed=0, **sizes)
    model: Any = load_model(ModelConfig(str(directory), dtype="bfloat16", quantization="fp8", native="off"), CPU)
    held = {name.rpartition(".")[2]: module for name, module in model.module.named_modules()}
    assert held["kv_b_proj"].weight.numel() > 0 and held["o_proj"].weight.numel() == 0


def test_a_device_without_such_numbers_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_load, "why_no_fp8", lambda device, dtype: "it needs another device")
    directory = make_checkpoint("llama", tmp_path, seed=0)
    with pytest.raises(ModelLoadError, match="quantization 'fp8' is not possible: it needs another device"):
        load_model(ModelConfig(str(directory), dtype="bfloat16", quantization="fp8"), CPU)
