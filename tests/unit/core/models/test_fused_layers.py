"""Which layers compute by fused kernels, what the kernels are called with, and the way back.

The kernels stand in, in PyTorch, and take what the real ones take and nothing else: those need Triton, see
`test_fused.py`. Everything that decides about them runs as it is.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from core.models.fused.layers import fuse_layers, unfuse_layers
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint

FUSED = "core.models.fused"
CALLED: Counter[str] = Counter()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    assert x.dtype == weight.dtype
    CALLED["rms_norm"] += 1
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    assert gate.shape == up.shape and gate.dtype == up.dtype
    CALLED["silu_mul"] += 1
    return torch.nn.functional.silu(gate) * up


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert q.shape[0] == k.shape[0] == 1, "its programs are told of tokens and heads, and of no batch"
    assert cos.shape == sin.shape == (1, q.shape[2], q.shape[3]) and q.stride(-1) == k.stride(-1) == 1
    CALLED["rotate"] += 1
    turned: tuple[torch.Tensor, torch.Tensor] = apply_rotary_pos_emb(q, k, cos, sin)
    return turned


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLED.clear()
    for file, kernel in (("norm", rms_norm), ("activation", silu_mul), ("rotary", rotate)):
        module: Any = ModuleType(f"{FUSED}.{file}")
        setattr(module, kernel.__name__, kernel)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def make(kind: str, directory: Path) -> Any:
    path = make_checkpoint(kind, directory, seed=0)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def logits(model: Any, *shape: int) -> torch.Tensor:
    ids = torch.randint(VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_fused_layers_give_what_the_modules_give_and_go_again(kind: str, tmp_path: Path) -> None:
    model = make(kind, tmp_path)
    blocks, norms = model.config.num_hidden_layers, 4 if kind == "qwen3" else 2
    plain = logits(model, 1, 9)
    assert fuse_layers(model) == blocks * (norms + 2) + 1, "norms, gates and rotations, the final norm"
    assert not CALLED
    torch.testing.assert_close(logits(model, 1, 9), plain, atol=1e-5, rtol=1e-5)
    assert {"rms_norm": blocks * norms + 1, "silu_mul": blocks, "rotate": blocks} == CALLED
    unfuse_layers(model)
    CALLED.clear()
    assert torch.equal(logits(model, 1, 9), plain)
    assert not CALLED


def test_several_sequences_at_once_are_turned_by_the_model_itself(tmp_path: Path) -> None:
    """So the self-check runs a model over single tokens."""
    model = make("llama", tmp_path)
    plain = logits(model, 3, 5)
    fuse_layers(model)
    torch.testing.assert_close(logits(model, 3, 5), plain, atol=1e-5, rtol=1e-5)
    assert CALLED["rotate"] == 0 and CALLED["silu_mul"] > 0


def test_a_norm_in_another_dtype_is_left_to_the_module(tmp_path: Path) -> None:
    model = make("llama", tmp_path)
    norm = model.model.norm
    fuse_layers(model)
    given = torch.randn(2, norm.weight.shape[0], dtype=torch.bfloat16)
    assert torch.equal(norm(given), type(norm).forward(norm, given))
    assert not CALLED


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss"])
def test_what_computes_otherwise_is_not_fused(kind: str, tmp_path: Path) -> None:
    """Gemma adds one to the weight of a norm; gates of others are not silu, or in experts."""
    assert fuse_layers(make(kind, tmp_path)) == 0
