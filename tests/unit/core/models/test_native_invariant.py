"""A deterministic native decoder gives a token the same bits in any step, of every family that is declared."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from core.attention.torch_native import TorchNativeAttention
from core.config import ModelConfig
from core.errors import ConfigError
from core.memory.kv_format import PLAIN
from core.models.invariance_proof import prove_invariance
from core.models.loader import load_model
from core.models.native.family import UpgradingModel
from core.models.vision.families import VISION_FAMILIES
from tests.support.checkpoints import make_checkpoint
from tests.support.fakes.paged_steps import Part
from tests.support.native_cases import CASES, WHOLE, checkpoint_of
from tests.unit.core.models.reference import CPU, PackedRun
from tests.unit.core.models.test_native_families import WindowedRun
from tests.unit.core.models.test_native_shapes import LONG

pytestmark = pytest.mark.usefixtures("native_code")


def loaded(
    path: Path, dtype: str = "bfloat16", quantization: str = "none", deterministic: bool = True, threads: int = 2
) -> UpgradingModel:
    """As an engine has it."""
    config = ModelConfig(str(path), dtype=dtype, quantization=quantization, native="wait", deterministic=deterministic)
    with patch("torch.get_num_threads", return_value=threads):
        model = load_model(config, CPU)
    assert isinstance(model, UpgradingModel) and model.invariant == deterministic
    return model


def refusal(model: UpgradingModel) -> str:
    """What the proof at start says of it; nothing if it is proved."""
    try:
        prove_invariance(model, TorchNativeAttention(), CPU, PLAIN)
    except ConfigError as error:
        return error.message
    return ""


@pytest.mark.parametrize("case", [case for case in CASES if WHOLE.get(case, ("",))[0] not in VISION_FAMILIES])
def test_every_family_is_proved(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "aria_text":  # It calls torch's grouped products by itself, which take no experts of such odd sizes.
        monkeypatch.setattr("transformers.integrations.moe._can_use_grouped_mm", lambda *_, **__: False)
    assert not refusal(loaded(checkpoint_of(case, tmp_path)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_every_kind_of_weights_is_proved(dtype: str, quantization: str, tmp_path: Path) -> None:
    """Deep enough for several passes over a panel, and for several groups of four-bit weights."""
    path = make_checkpoint("llama", tmp_path / "model", intermediate_size=2304, max_position_embeddings=512)
    assert not refusal(loaded(path, dtype, quantization))


@pytest.mark.parametrize("case", ["glm4_moe", "qwen2_moe"])
def test_an_expert_of_all_tokens_is_proved_in_bytes(case: str, tmp_path: Path) -> None:
    """A compiler rounded a lone row's sums twice where it rounded those of several rows once."""
    assert not refusal(loaded(checkpoint_of(case, tmp_path), "float32", "int8"))


@pytest.mark.parametrize("case", ["gemma3_text", "qwen3_moe", "youtu", "qwen3_next"])
def test_threads_change_no_bit(case: str, tmp_path: Path) -> None:
    path, ids = checkpoint_of(case, tmp_path), {1: torch.arange(LONG).remainder(300).add(3).tolist()}
    one, *others = (
        PackedRun(loaded(path, threads=threads), ids, max_len=LONG + 2).step([Part(1, 0, LONG)], 1).clone()
        for threads in (1, 2, 5)
    )
    assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("case", ["gemma3_text", "llama4_text"])
def test_without_the_setting_they_are_not(case: str, tmp_path: Path) -> None:
    """Windows and chunks begin anywhere in a panel, so that keys meet in other lanes."""
    model = loaded(checkpoint_of(case, tmp_path), "float32", deterministic=False)
    assert re.match(r"deterministic is not possible: \w+ gives \d+ of \d+ tokens other logits", refusal(model))


@pytest.mark.parametrize("case", ["gemma3_text", "cohere2"])
def test_keys_that_left_a_window_are_not_read(case: str, tmp_path: Path) -> None:
    """Blocks of keys begin before a window does, where pages are anybody's by now: NaN stands in them here."""
    model = loaded(checkpoint_of(case, tmp_path), "float32")
    window, ids = CASES[case]["sliding_window"], {1: torch.arange(LONG).remainder(300).add(3).tolist()}
    whole = PackedRun(model, ids, max_len=LONG + 2).step([Part(1, 0, LONG)], 1).clone()
    run = WindowedRun(model, ids, max_len=LONG + 2)
    run.step([Part(1, 0, LONG - 8)], 1)
    for prefix, extend in ((LONG - 8, 5), (LONG - 3, 1), (LONG - 2, 1), (LONG - 1, 1)):
        run.forget(1, prefix + 1 - window)
        found = run.step([Part(1, prefix, extend)], int(extend > 1))
    assert torch.equal(found, whole)
