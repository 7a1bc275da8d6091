"""What few configurations of a declared family have: compiled code computes it, or is not used, whatever logits say."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.config import ModelConfig
from core.models.loader import load_model
from core.models.native import weights
from core.models.native.family import UpgradingModel
from core.models.native.reading import NotDense
from core.models.native.weights import check_alone
from tests.support.checkpoints import make_checkpoint
from tests.support.native_cases import CASES, checkpoint_of
from tests.unit.core.models.reference import CPU

pytestmark = pytest.mark.usefixtures("native_code")


def is_native(path: Path, dtype: str = "float32", **options: str) -> bool:
    model = load_model(ModelConfig(str(path), dtype=dtype, native="wait", **options), CPU)  # type: ignore[arg-type]
    return isinstance(model, UpgradingModel) and model.native


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_angles_of_another_base_are_seen(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In bfloat16 the few tokens of the proof cannot tell them apart, and tokens were wrong."""
    path = checkpoint_of("granite_swa, angles of each layer", tmp_path)
    assert is_native(path, dtype)
    monkeypatch.setattr(weights, "_rotaries", lambda model, family: [model.base_model.rotary_emb] * 3)
    assert not is_native(path, dtype)
    assert "other angles than its rotary embedding makes" in caplog.text


@pytest.mark.parametrize("case", ["olmoe", "phimoe"])
def test_experts_of_any_size_are_served_in_bfloat16(case: str, tmp_path: Path) -> None:
    """torch's grouped products take rows of whole 16 bytes."""
    assert is_native(make_checkpoint(case, tmp_path / "odd", **CASES[case] | {"intermediate_size": 44}), "bfloat16")


@pytest.mark.parametrize("case", ["afmoe", "hunyuan_v1_moe", "llama4_text", "phimoe"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_chooses_experts_is_left_whole(case: str, quantization: str, tmp_path: Path) -> None:
    assert is_native(checkpoint_of(case, tmp_path), "bfloat16", quantization=quantization)


def test_distances_are_weighed_over_codes(tmp_path: Path) -> None:
    """The proof compares with what the modules make of the same codes."""
    assert is_native(checkpoint_of("bloom", tmp_path), kv_cache_dtype="int8")


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("apertus", "its activation has numbers of its own"),
        ("bloom", "its embeddings are normed"),
        ("falcon, grouped", "queries that share a key stand between keys"),
        ("mpt", "its scores depend on distance"),
    ],
)
def test_a_decoder_of_a_gpu_does_not_take_them(case: str, says: str, tmp_path: Path) -> None:
    model = load_model(ModelConfig(str(checkpoint_of(case, tmp_path)), native="off"), CPU)
    with pytest.raises(NotDense, match=says):
        check_alone(model.module, model.spec)  # type: ignore[attr-defined]
