"""Fused layers equal the modules that they stand in for, and a model that they change is served without them.

Kernels run interpreted, in a process of their own, as those of attention do (`attention/test_triton.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import ModelConfig
from core.models.fused import layers
from core.models.hf import backend
from core.models.loader import load_model
from tests.support.checkpoints import make_checkpoint
from tests.support.repository import ROOT
from tests.unit.core.attention.test_conformance import DEVICE, INTERPRETED
from tests.unit.core.attention.test_triton_compiles import compiled

RUNS = INTERPRETED or DEVICE == "cuda"

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (slipstream[cuda])")
interpreted = pytest.mark.skipif(not RUNS, reason="runs interpreted, in the process of the first test, or on CUDA")


@needs_triton
@pytest.mark.skipif(RUNS, reason="this is that process")
def test_fused_layers_conform() -> None:
    """All of them. Those that take no whole model are run with the kernels of attention too, for each change."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/unit/core/models/test_fused.py", "-k", "interpreted"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]


def test_a_cpu_keeps_its_modules() -> None:
    assert not layers.wanted(torch.device("cpu"))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 20])
def test_interpreted_norm_equals_the_module(dtype: torch.dtype, width: int) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from core.models.fused.norm import rms_norm

    norm = LlamaRMSNorm(width, eps=1e-5).to(DEVICE, dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, width).to(DEVICE, dtype)
    for given in (x, x.transpose(0, 1), 100 * x):
        got = rms_norm(given, norm.weight, norm.variance_epsilon)
        assert got.shape == given.shape and got.dtype == dtype
        torch.testing.assert_close(got, norm(given))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interpreted_gate_equals_the_formula(dtype: torch.dtype) -> None:
    from core.models.fused.activation import silu_mul

    # Rows of less than a program's elements, and of more.
    for shape in ((3, 700), (2, 2100)):
        gate, up = (torch.randn(shape).mul(4).to(DEVICE, dtype) for _ in range(2))
        torch.testing.assert_close(silu_mul(gate, up), torch.nn.functional.silu(gate) * up)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interpreted_rotation_equals_the_function(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from core.models.fused.rotary import rotate

    q, k = (torch.randn(1, 3, heads, 12).to(DEVICE, dtype).transpose(1, 2) for heads in (4, 2))
    angles = torch.rand(1, 3, 6).mul(6).repeat(1, 1, 2)
    cos, sin = (table.to(DEVICE, dtype) for table in (angles.cos(), angles.sin()))
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    for got, expected in zip(rotate(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert got.shape == expected.shape and got.dtype == dtype
        torch.testing.assert_close(got, expected, **tolerance)


@interpreted
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_interpreted_model_passes_its_own_check(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "wanted", lambda _: True)
    directory = make_checkpoint(kind, tmp_path, seed=0)
    config = ModelConfig(str(directory), dtype="float32", native="off")
    module: Any = load_model(config, torch.device(DEVICE)).module  # type: ignore[attr-defined]
    per_layer = 4 + 2 * (kind == "qwen3")
    fused = [each for each in module.modules() if "forward" in each.__dict__]
    assert len(fused) == per_layer * module.config.num_hidden_layers + 1, "norms, gates and rotations, the final norm"


WRONG: dict[str, Any] = {
    "_gated": lambda module, x: module.down_proj(module.up_proj(x)),
    "_normed": lambda module, x: x,
    "_rotate": lambda plain, q, k, cos, sin: (q, k),
}


@interpreted
@pytest.mark.parametrize("name", WRONG)
def test_interpreted_wrong_layers_are_taken_back(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "wanted", lambda _: True)
    monkeypatch.setattr(layers, name, WRONG[name])
    directory = make_checkpoint("llama", tmp_path, seed=0)
    config = ModelConfig(str(directory), dtype="float32", native="off")
    module: Any = load_model(config, torch.device(DEVICE)).module  # type: ignore[attr-defined]
    assert not [each for each in module.modules() if "forward" in each.__dict__]
    assert "no fused layers" in caplog.text


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
def test_fused_kernels_compile() -> None:
    from core.models.fused import activation, norm, rotary

    data = dict.fromkeys(("x", "weight", "out"), "*bf16") | {"eps": "fp32"}
    assert compiled(norm._rms_norm, data, {"WIDTH": 4096, "BLOCK": 4096}, 90).asm["cubin"]
    data = dict.fromkeys(("q", "k", "cos", "sin", "q_out", "k_out"), "*bf16")
    assert compiled(rotary._rotate, data, {"HEADS": 32, "HALF": 64, "BLOCK": 64}, 90).asm["cubin"]
    data = dict.fromkeys(("gate", "up", "out"), "*bf16")
    assert compiled(activation._silu_mul, data, {"WIDTH": 14336, "BLOCK": activation.BLOCK}, 90).asm["cubin"]
