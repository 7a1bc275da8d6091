"""Which models a fused decoder serves, what the log says of the others, and that a wrong one is not used.

Its kernels stand in, in PyTorch, as in `test_fused_decoder.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.config import ModelConfig
from core.models.fused.decoder import check_fusible
from core.models.hf.backend import TransformersModel
from core.models.loader import load_model
from core.models.native.reading import NotDense
from tests.support.checkpoints import make_checkpoint
from tests.support.fakes import plain_kernels
from tests.support.native_cases import CASES
from tests.unit.core.attention.test_triton import needs_triton
from tests.unit.core.models.reference import CPU, PackedRun, PlainModel
from tests.unit.core.models.test_fused_decoder import checkpoint, fused, load, sequences, worst

pytestmark = needs_triton

REFUSED = {
    "gpt_oss": "mixtures of experts",
    "youtu": "keys and values of their own",
    "lfm2": "recurrent layers",
    "gpt2": "it embeds positions",
    "codegen": "its queries, keys and values come in parts",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_dense_is_refused_by_its_reason(case: str, tmp_path: Path) -> None:
    path = checkpoint(case, tmp_path) if case in CASES else make_checkpoint(case, tmp_path)
    model = load(path)
    before = [each.data_ptr() for each in model.module.parameters()]
    with pytest.raises(NotDense, match=REFUSED[case]):
        fused(model)
    assert [each.data_ptr() for each in model.module.parameters()] == before, "and nothing has changed"


def test_heads_of_several_sizes_are_refused(tmp_path: Path) -> None:
    model = load(checkpoint("llama", tmp_path))
    first, *others = model.spec.kv_layers
    spec = replace(model.spec, kv_layers=(replace(first, k_dim=8, v_dim=8), *others))
    with pytest.raises(NotDense, match="more than one size"):
        check_fusible(model.module, spec)


def test_gates_and_scales_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised = load_model(
        ModelConfig(str(checkpoint("llama", tmp_path)), dtype="float32", native="off", quantization="int8"), CPU
    )
    assert isinstance(quantised, TransformersModel)
    with pytest.raises(NotDense, match="quantised"):
        fused(quantised)


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused decoders are wanted on this device, without the kernels of single layers."""
    plain_kernels.put_in_place(monkeypatch)
    monkeypatch.setattr("core.models.native.family.wanted", lambda _: True)
    monkeypatch.setattr("core.models.loader.fuses", lambda _: True)


def served(path: Path, **options: Any) -> str:
    return type(load_model(ModelConfig(str(path), dtype="float32", native="auto"), CPU, **options)).__name__


@pytest.mark.usefixtures("as_on_cuda")
def test_a_dense_model_is_served_by_it_and_others_say_why_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    path = checkpoint("llama", tmp_path)
    assert served(path) == "FusedDecoder" and "2 dense layers" in caplog.text
    assert served(path, keeps_modules=True) == "TransformersModel" and "adapters" in caplog.text
    assert served(checkpoint("gpt_oss", tmp_path / "other")) == "TransformersModel"
    assert "mixtures of experts" in caplog.text
    assert served(make_checkpoint("gpt2", tmp_path / "gpt2")) == "TransformersModel"
    assert "it embeds positions" in caplog.text


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (lambda into, out, activation: out.copy_(into[:, : out.shape[1]]), "its logits differ by"),
        (lambda *_: 1 // 0, "it failed"),
    ],
    ids=["wrong", "failing"],
)
def test_a_decoder_that_is_wrong_or_fails_is_not_used(
    breaks: Callable[..., Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("core.models.fused.layer.activate", breaks)
    path = checkpoint("llama", tmp_path)
    model = load_model(ModelConfig(str(path), dtype="float32", native="auto"), CPU)
    assert isinstance(model, TransformersModel) and said in caplog.text
    assert worst(PackedRun(model, sequences()), PlainModel(path))[0] < 1e-4, "and the model is as it was"
