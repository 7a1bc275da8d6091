"""Four-bit checkpoints of models that also see: their text is packed, and files may call it something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.models.native.family import UpgradingModel
from core.models.quantized.grouped import grouped_weight
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
