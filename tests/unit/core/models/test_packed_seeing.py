"""Four-bit checkpoints of models that also see: their text is packed, and files may call it something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.models.native.family import UpgradingModel
from core.models.quantized.grouped import grouped_weight
from core.models.quantized.packed_files import word_nibbles
from tests.support.packed_int4 import make_packed
from tests.support.vision_checkpoints import make_vision_checkpoint
from tests.unit.core.models.test_packed_int4 import load, loaded, together

KINDS = ("gemma3", "gemma4", "glm4v", "internvl", "llava", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl")
FORMS = ("gptq", "awq", "ct-asym")


def close(found: Any, floats: Any) -> None:
    torch.testing.assert_close(together(found), together(floats), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_packed_is_the_text_and_stands_for_its_floats(kind: str, tmp_path: Path) -> None:
    form = FORMS[KINDS.index(kind) % len(FORMS)]
    packed, plain = make_packed(make_vision_checkpoint(kind, tmp_path / "base"), tmp_path, form)
    model = loaded(packed, dtype="float32")
    assert model.spec.quantization and model.spec.vision is not None
    marks = [name for name in load_file(packed / "model.safetensors") if name.endswith((".qweight", ".weight_packed"))]
    grouped = [name for name, module in model.module.named_modules() if grouped_weight(module) is not None]
    assert len(grouped) == len(marks) > 10
    close(model, load(plain, dtype="float32"))


@pytest.mark.usefixtures("native_code")
@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "qwen2_5_vl"])
def test_compiled_code_computes_the_text(kind: str, tmp_path: Path) -> None:
    packed, plain = make_packed(make_vision_checkpoint(kind, tmp_path / "base"), tmp_path, "gptq")
    model = loaded(packed, dtype="float32", native="wait")
    assert isinstance(model, UpgradingModel) and model.native
    close(model, load(plain, dtype="float32"))


@pytest.mark.usefixtures("native_code")
@pytest.mark.parametrize("native", ["off", "wait"])
@pytest.mark.parametrize("kind", ["mistral3", "qwen2_5_vl"])
def test_the_output_matrix_may_be_packed_too(kind: str, native: str, tmp_path: Path) -> None:
    """Compiled code lets go of the modules beside what sees at its first step, and of a head in whatever form."""
    base = make_vision_checkpoint(kind, tmp_path / "base", tie_word_embeddings=False)
    packed, plain = make_packed(base, tmp_path, "gptq-sym", head=True)
    assert any("lm_head.qweight" in name for name in load_file(packed / "model.safetensors"))
    model = loaded(packed, dtype="float32", native=native)
    assert isinstance(model, UpgradingModel) == (native == "wait")
    close(model, load(plain, dtype="float32"))


@pytest.mark.parametrize(("kind", "form"), [("gemma3", "gptq"), ("qwen2_5_vl", "awq")])
def test_what_sees_may_be_packed_too(kind: str, form: str, tmp_path: Path) -> None:
    """SigLIP draws a weight for layers that have none."""
    packed, plain = make_packed(make_vision_checkpoint(kind, tmp_path / "base"), tmp_path, form, tower=True)
    close(loaded(packed, dtype="float32"), load(plain, dtype="float32"))


def test_one_row_turned_round_is_read_too() -> None:
    """torch calls it contiguous, whatever its strides are."""
    words = torch.arange(64, dtype=torch.int32)[None].t()
    assert torch.equal(word_nibbles(words), word_nibbles(words.clone(memory_format=torch.contiguous_format)))
    assert word_nibbles(words).shape == (64, 4)
